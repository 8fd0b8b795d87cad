"""Prices of a schedule: seconds of steps, measured or stated, costs of engines, and operations of strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.study.spec import Component, Training
from scalebench.system.clock import BACKWARD_SHARE, FORWARD_SHARE, Task

_TRIMMED = 0.2  # share of the blocks at either end

# In the order of STEP_TASKS: `BatchTimes.blocks` stacks them so.
_TASK_COLUMNS = ("data_s", "forward_s", "backward_s", "update_s")
STEP_TASKS = (Task.DATA, Task.FORWARD, Task.BACKWARD, Task.UPDATE)
STATED_STEPS = (  # what a user is told of them
    "steps take the stated time and messages that of the network: what a strategy computes beside its steps (merging "
    "and averaging models, updates of a server) is charged nothing"
)


Seconds = Annotated[
    list[Annotated[float, Field(ge=0, allow_inf_nan=False)]], Field(min_length=1)
]


class LayerShare(BaseModel):
    """Shares of a layer, between which a model can be cut, in the forward and the backward pass."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str  # of its first module with parameters
    forward: NonNegativeFloat
    backward: NonNegativeFloat


class BatchTimes(BaseModel):
    """Seconds per step and task at one batch size, as means of consecutive blocks of steps, and how passes divide."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    samples: PositiveInt
    data_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    release: list[
        float
        # share of the backward pass after which each parameter's gradient is complete
    ] = []
    # empty where the model cannot be cut, or layers were not measured
    layers: list[LayerShare] = []

    def blocks(self) -> NDArray[np.float64]:
        """Return (4, blocks) in the order of STEP_TASKS."""
        return np.array([getattr(self, name) for name in _TASK_COLUMNS])


class Trained(BaseModel):
    """Model and data whose steps were measured, as far as a prediction needs them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Component
    optimizer: Component
    dataset: str
    samples: PositiveInt  # of the training set
    input_shape: tuple[int, ...]
    outputs: PositiveInt
    task: str


class StepTable(BaseModel):
    """Measured or stated step times of one model on one kind of node under one load."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    source: str
    busy_workers: PositiveInt  # that computed on the node at the same time
    batches: Annotated[list[BatchTimes], Field(min_length=1)]
    shuffle_s_per_sample: NonNegativeFloat
    jitter: list[float]  # sample of step times divided by their mean
    outliers: float = 0.0  # share of steps excluded from it
    # share of the cores used by other programs during the measurement
    others_load: float | None = None
    # by processor time, as other programs took the cores in nearly every window
    disturbed: bool = False

    def release_at(self, samples: float) -> list[float]:
        """Return the release of gradients at the measured batch size nearest to `samples`, by ratio."""
        return self.nearest(samples).release

    def layers_at(self, samples: float) -> list[LayerShare]:
        """Return the shares of layers at the measured batch size nearest to `samples`, by ratio."""
        return self.nearest(samples).layers

    def nearest(self, samples: float) -> BatchTimes:
        """Return the times at the measured batch size nearest to `samples`, by ratio."""
        return min(
            self.batches, key=lambda batch: abs(math.log(batch.samples / samples))
        )

    def scaled(self, factor: float) -> StepTable:
        """Return the table of a machine that takes `factor` times as long."""
        batches = [
            batch.model_copy(
                update={
                    name: [factor * value for value in getattr(batch, name)]
                    for name in _TASK_COLUMNS
                }
            )
            for batch in self.batches
        ]
        shuffle = self.shuffle_s_per_sample * factor
        return self.model_copy(
            update={"batches": batches, "shuffle_s_per_sample": shuffle}
        )


def table_under(tables: Sequence[StepTable], workers: int) -> StepTable:
    """Return the table measured under the load nearest to so many busy workers of a node."""
    return min(
        tables,
        # Of two as near the busier one, so that no slowdown by neighbours is missed.
        key=lambda table: (abs(table.busy_workers - workers), -table.busy_workers),
    )


def stated_table(training: Training, cluster: Cluster, batch_size: int) -> StepTable:
    """Return the table of the study's `device_step_time` (of a full batch of `batch_size`), else of the cluster file.

    A stated step time is split 1:2 into forward and backward pass and assumed to be
    proportional to the samples of a batch. Stated times have no spread, hence no jitter
    unless the study states one.
    """
    # A stated time is that of a worker on a full node.
    busy = cluster.node.workers_per_node
    seconds = training.device_step_time
    if seconds is not None:
        batches = [
            _batch(
                n,
                seconds * n / batch_size * FORWARD_SHARE,
                seconds * n / batch_size * BACKWARD_SHARE,
                0.0,
            )
            # Two sizes are enough for a time in proportion: between them it is
            # interpolated.
            for n in sorted({1, batch_size})
        ]
        source = f"stated: {seconds:g} s a step of {batch_size} samples"
    else:
        entries = cluster.step_times_of(str(training.model), training.dtype)
        batches = [
            _batch(n, entry.forward_s, entry.backward_s, entry.update_s)
            for n, entry in sorted(entries.items())
        ]
        source = f"cluster file {cluster.name}"
    return StepTable(
        source=source,
        busy_workers=busy,
        batches=batches,
        shuffle_s_per_sample=0.0,
        jitter=[],
    )


def _batch(samples: int, forward: float, backward: float, update: float) -> BatchTimes:
    return BatchTimes(
        samples=samples,
        data_s=[0.0],
        forward_s=[forward],
        backward_s=[backward],
        update_s=[update],
    )


class StepTimes:
    """Step times of one repetition: the table with its blocks resampled once, for all strategies and worker counts.

    Without a `repetition` no block is resampled.

    The mean of the resampled blocks is trimmed by the fifth with the shortest and the
    fifth with the longest steps, as delays of single blocks belong to the measuring
    machine and not to the simulated program.
    """

    def __init__(
        self, table: StepTable, *, seed: int = 0, repetition: int | None = 0
    ) -> None:
        draw = (
            # A constant of its own beside seed and repetition: other draws of the same
            # run (data, jitter) are independent of this one.
            np.random.default_rng([seed, repetition, 0xCA11])
            if repetition is not None
            else None
        )
        self.table = table
        self._sizes = np.array(sorted(batch.samples for batch in table.batches))
        rows = []
        # Ascending, as np.interp takes them.
        for batch in sorted(table.batches, key=lambda batch: batch.samples):
            blocks = batch.blocks()
            if draw is not None:
                # Whole steps are drawn, so that tasks of one step stay together.
                blocks = blocks[:, draw.integers(blocks.shape[1], size=blocks.shape[1])]
            rows.append(middle(blocks).mean(axis=1))
        self._seconds = np.array(rows)  # (sizes, tasks)
        # On the instance: the cache ends with the table, and needs no key for it.
        self.task_seconds = lru_cache(maxsize=None)(self._task_seconds)

    def _task_seconds(self, task: Task, samples: int) -> float:
        """Return seconds of `task` on a batch of `samples`."""
        return float(self.seconds(task, np.array(samples)))

    def seconds(self, task: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return seconds of `task` on batches of `samples`, linear between the measured sizes, proportional beyond.

        An update does not depend on the batch: it takes what it takes after the
        smallest.
        """
        if task == Task.SHUFFLE:
            return np.asarray(
                self.table.shuffle_s_per_sample * samples, dtype=np.float64
            )
        if task not in STEP_TASKS:
            return np.zeros(samples.shape)
        column = self._seconds[:, STEP_TASKS.index(Task(task))]
        if task == Task.UPDATE:
            # It reads parameters and no samples: differences between sizes are noise.
            return np.full(samples.shape, column[0])
        # np.interp ends at the last value; below the first size that is kept, too.
        beyond = np.maximum(1.0, samples / float(self._sizes[-1]))
        return np.asarray(np.interp(samples, self._sizes, column) * beyond)


def middle(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the middle three fifths of `blocks` (..., tasks, blocks) by whole steps; all of fewer than five."""
    order = np.argsort(blocks.sum(axis=-2, keepdims=True), axis=-1, kind="stable")
    # 0 below five blocks, of which none is left out then.
    cut = int(_TRIMMED * blocks.shape[-1])
    return np.take_along_axis(blocks, order, axis=-1)[..., cut : blocks.shape[-1] - cut]


class OperationTime(BaseModel):
    """Seconds of an operation of a strategy besides steps: on the messages of two workers, and per further one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    seconds: NonNegativeFloat
    per_member_s: NonNegativeFloat = 0.0

    def scaled(self, factor: float) -> OperationTime:
        """Return the time on a machine that takes `factor` times as long."""
        return OperationTime(
            seconds=self.seconds * factor, per_member_s=self.per_member_s * factor
        )

    def among(self, members: int) -> float:
        """Return seconds of one call on the messages of `members` workers."""
        # Measured on two messages; one alone costs no less.
        return self.seconds + self.per_member_s * max(0, members - 2)


# by strategy with options, then by operation
OperationTimes = dict[str, dict[str, OperationTime]]


class Choice(BaseModel):
    """Ways to compute the gradients of one model and batch size, and why a replica has to compute by itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batched: bool = False
    fills: bool = False  # batches of different size, to be computed in one call
    one_batch: bool = False
    # operations, which do not depend on values: repeated, they give the same bits
    records: bool = False
    reason: str = ""


# by samples of a batch, then by the workers among which they were measured
Choices = dict[PositiveInt, dict[PositiveInt, Choice]]


def name_of(operation: Callable[..., Any]) -> str:
    """Return the qualified name of a function or method, also in a partial; of other objects that of the class."""
    while isinstance(operation, partial):
        operation = operation.func
    return str(getattr(operation, "__qualname__", type(operation).__qualname__))


@dataclass(frozen=True)
class Machine:
    """Prices of a virtual run: the cluster, the engines' costs, the step times by load of a node, and the
    operations of strategies; and how gradients are computed, as far as it was measured."""

    cluster: Cluster
    engines: EngineCosts
    tables: list[StepTable]
    operations: OperationTimes = field(default_factory=dict)
    # the machine speed of both, as the time of the reference step
    reference_s: float | None = None
    # It changes no time, but the last bits of weights: equal costs give equal runs.
    arithmetic: Choices = field(default_factory=dict)

    # Of more workers than a node holds, each node is full.
    def table_for(self, workers: int) -> StepTable:
        """The step times measured under the load that `workers` put on a node."""
        # A node is as busy as it can be from its number of workers on.
        return table_under(
            self.tables, min(workers, self.cluster.node.workers_per_node)
        )


def loads_up_to(node_workers: int) -> list[int]:
    """Return the measured numbers of workers that compute at the same time on a node: 1, 2, 4, ... and all."""
    return sorted(
        {
            min(1 << power, node_workers)
            for power in range(node_workers.bit_length() + 1)
        }
    )
