"""The study's model, built once before anything runs, and what its strategies make of it."""

from __future__ import annotations

from scalebench.errors import ModelError
from scalebench.launch.memory import what_may_not_fit
from scalebench.launch.planning import Plan
from scalebench.launch.preparation import local_statistics
from scalebench.models.registry import build_model
from scalebench.strategies import registry
from scalebench.training.initial_weights import load_weights


def look_at_model(plan: Plan) -> list[str]:
    """Build the model, so that a factory that fails or weights that do not fit are one line, not a row per run.

    The notes are what is odd about it.

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
    for run in {str(run.strategy): run for run in plan.sweep.runs if run.workers > 1}.values():
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        try:
            strategy.check_model(shapes)
        except ModelError as error:
            raise ModelError(f"strategy {run.strategy}: {error}") from None
    statistics = any(buffer.is_floating_point() for buffer in model.buffers())
    notes = local_statistics(study) if statistics else []
    return notes + what_may_not_fit(plan, parameters * dtype.itemsize)
