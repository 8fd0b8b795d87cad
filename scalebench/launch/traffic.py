"""What the first strategy of a study sends at each worker count, by its own formula, and what a shuffle adds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from scalebench.data.dataset import Dataset
from scalebench.launch.planning import Plan
from scalebench.models.flat import flatten
from scalebench.models.registry import build_model
from scalebench.strategies import registry
from scalebench.strategies.replica_state import remembered_by
from scalebench.strategies.traffic import Setting
from scalebench.study.spec import Study
from scalebench.training.optimizers import build_optimizer


@dataclass(frozen=True)
class Traffic:
    """Of a worker and epoch, on the mean over epochs and workers."""

    workers: int
    steps: int
    parameters: int
    syncs: float
    bytes_sent: float
    rows_bytes: float  # of rows that a shuffle moves, on top


def traffic_of(plan: Plan) -> list[Traffic]:
    """One entry for each worker count of the plan, in their order."""
    study, found = plan.study, []
    component = study.strategies[0]
    strategy = registry.create(component.name, component.options, "virtual")
    for workers, shards in sorted(plan.prepared.plans.items()):
        per_node = plan.cluster.node.workers_per_node
        setting = setting_of(study, plan.prepared.datasets[workers], workers, shards.steps(0), per_node)
        epochs = range(study.epochs)
        syncs = sum(strategy.syncs_in_epoch(epoch, setting) for epoch in epochs) / study.epochs
        sent = sum(strategy.bytes_in_epoch(epoch, setting) for epoch in epochs) / study.epochs
        moved = sum(int(shards.moved(epoch).sum()) for epoch in epochs) / study.epochs / workers
        row = bytes_of_row(plan.prepared.datasets[workers], getattr(torch, study.dtype))
        found.append(Traffic(workers, setting.steps, setting.parameters, syncs, sent, moved * row))
    return found


def bytes_of_row(dataset: Dataset, dtype: torch.dtype) -> int:
    """What a row takes when it moves to another worker: x in the run's dtype, y too or as a label of 8 bytes."""
    label = 8 if dataset.task == "classification" else dtype.itemsize
    return math.prod(dataset.x_train.shape[1:]) * dtype.itemsize + math.prod(dataset.y_train.shape[1:]) * label


def setting_of(study: Study, dataset: Dataset, workers: int, steps: int, workers_per_node: int) -> Setting:
    """What formulas need to know of the study's model and optimizer; the optimizer makes one step to show its state."""
    dtype: torch.dtype = getattr(torch, study.dtype)
    model = build_model(study.model, dataset.input_shape, dataset.outputs, dataset.task, dtype, study.seed)
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad)
    buffers = sum(buffer.numel() for buffer in model.buffers() if buffer.is_floating_point())
    of_all = sum(buffer.nbytes for buffer in model.buffers())
    flat, gradients = flatten(model)
    only = torch.nn.Parameter(flat)
    only.grad = gradients
    optimizer = build_optimizer(study.optimizer, [only], study.lr, flat=True)
    optimizer.step()
    remembered = sum(value.numel() for value in remembered_by(optimizer))
    size = dtype.itemsize
    return Setting(
        study.epochs, steps, workers, shapes, size, workers_per_node, buffers * size, remembered * size, of_all
    )
