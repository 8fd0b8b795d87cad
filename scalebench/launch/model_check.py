"""Checks of the study's model, built once before anything runs: strategies, initial weights, memory."""

from __future__ import annotations

from scalebench.errors import ModelError
from scalebench.launch.memory import memory_notes
from scalebench.launch.planning import StudyPlan
from scalebench.launch.preparation import local_statistics
from scalebench.launch.sweep import strategy_warnings
from scalebench.launch.traffic import schedules_of
from scalebench.models.registry import build_model
from scalebench.study.spec import Run
from scalebench.training.initial_weights import load_weights


def look_at_model(plan: StudyPlan) -> list[str]:
    """Build the model and return notes on it: a factory that fails is one line, not a row per run.

    Raises:
        ModelError: it cannot be built, has nothing to train, or a strategy of the study can do nothing with it.
        StudyError: `init_weights` do not fit.
    """
    import torch

    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    dtype = getattr(torch, study.dtype)
    model = build_model(study.model, dataset.input_shape, dataset.outputs, dataset.task, dtype, study.seed)
    shapes = [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if parameters == 0:
        raise ModelError(f"model {study.model} has no parameters to train")
    if study.init_weights is not None:
        load_weights(study.init_weights, parameters)
    strategy_warnings(study, plan.sweep.runs, plan.cluster, shapes=shapes)
    statistics = any(buffer.is_floating_point() for buffer in model.buffers())
    notes = local_statistics(study) if statistics else []
    meta = model.to("meta")

    def replica_bytes(run: Run) -> int:
        try:
            schedules = schedules_of(plan, run.model_copy(update={"epochs": 1}), meta)
        except Exception:  # its program fails, or reads numbers out of tensors: its run will say so
            return 3 * parameters * int(dtype.itemsize)
        most: int = max(schedule.memory_bytes for schedule in schedules)
        return most

    return notes + memory_notes(plan, parameters * dtype.itemsize, replica_bytes)
