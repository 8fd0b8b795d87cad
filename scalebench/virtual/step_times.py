"""How long one local step takes: measured tables, one repetition's draw from them, and the jitter of single steps."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from scalebench.system.clock import Task

_LEFT_OUT = 0.2  # of the blocks, at either end

_TASK_COLUMNS = ("data_s", "forward_s", "backward_s", "update_s")
STEP_TASKS = (Task.DATA, Task.FORWARD, Task.BACKWARD, Task.UPDATE)


class BatchTimes(BaseModel):
    """Seconds per step at one batch size, as the means of consecutive blocks of steps, by task."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int
    data_s: list[float]
    forward_s: list[float]
    backward_s: list[float]
    update_s: list[float]

    def blocks(self) -> NDArray[np.float64]:
        """(4, blocks) in the order of STEP_TASKS."""
        return np.array([getattr(self, name) for name in _TASK_COLUMNS])


class StepTable(BaseModel):
    """What was measured, or stated, of one model on one kind of node under one load."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    busy_workers: int  # how many workers computed on the node at the same time
    batches: list[BatchTimes]
    shuffle_s_per_sample: float
    release: list[float]  # share of the backward pass after which each parameter's gradient is there
    jitter: list[float]  # step time divided by its mean, a sample of the distribution
    outliers: float = 0.0  # share of the steps that were left out of it
    others_load: float | None = None  # share of the cores' time that other programs took while it was measured

    def scaled(self, factor: float) -> StepTable:
        """The table of a machine that takes `factor` times as long for everything."""
        batches = [
            batch.model_copy(
                update={name: [factor * value for value in getattr(batch, name)] for name in _TASK_COLUMNS}
            )
            for batch in self.batches
        ]
        shuffle = self.shuffle_s_per_sample * factor
        return self.model_copy(update={"batches": batches, "shuffle_s_per_sample": shuffle})


class StepTimes:
    """One repetition's step times: the table with its blocks resampled once, for all strategies and worker counts.

    Of the resampled blocks the fifth with the shortest steps and the fifth with the longest are left out, and the rest
    averaged: what held up single blocks while the machine was measured is not part of the program that is simulated.
    """

    def __init__(self, table: StepTable, *, seed: int, repetition: int) -> None:
        draw = np.random.default_rng([seed, repetition, 0xCA11])
        self.table = table
        self._sizes = np.array(sorted(batch.samples for batch in table.batches))
        rows = []
        for batch in sorted(table.batches, key=lambda batch: batch.samples):
            blocks = batch.blocks()
            chosen = blocks[:, draw.integers(blocks.shape[1], size=blocks.shape[1])]
            rows.append(middle(chosen).mean(axis=1))
        self._seconds = np.array(rows)  # (sizes, tasks)
        self.task_seconds = lru_cache(maxsize=None)(self._task_seconds)

    def _task_seconds(self, task: Task, samples: int) -> float:
        """Seconds of `task` on a batch of `samples`; between and beyond the measured sizes linear in samples."""
        if task == Task.SHUFFLE:
            return self.table.shuffle_s_per_sample * samples
        if task not in STEP_TASKS:
            return 0.0
        column = self._seconds[:, STEP_TASKS.index(task)]
        largest = float(self._sizes[-1])
        if samples > largest:
            return float(column[-1]) * samples / largest
        return float(np.interp(samples, self._sizes, column))


def middle(blocks: NDArray[np.float64]) -> NDArray[np.float64]:
    """The middle three fifths of `blocks` (..., tasks, blocks) by the time of a whole step; all of fewer than five."""
    order = np.argsort(blocks.sum(axis=-2, keepdims=True), axis=-1, kind="stable")
    cut = int(_LEFT_OUT * blocks.shape[-1])
    return np.take_along_axis(blocks, order, axis=-1)[..., cut : blocks.shape[-1] - cut]
