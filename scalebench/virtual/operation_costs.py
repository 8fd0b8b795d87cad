"""Measures what strategies compute beside their steps: runs each of them for a moment, and times those operations.

The run is a virtual one of the study's smallest number of workers that communicate, on a few batches, so that every
operation is called on the very vectors that it gets in the study. No time of a native run is used.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from scalebench.data.dataset import Dataset
from scalebench.data.plan import Plan
from scalebench.errors import RunError
from scalebench.strategies import registry
from scalebench.study.spec import Run
from scalebench.training.loop import train
from scalebench.virtual.clock import VirtualClock
from scalebench.virtual.engine import CostModel, Simulation
from scalebench.virtual.operation_times import OperationTime, OperationTimes, name_of

_T = TypeVar("_T")
_QUARTILE = 25
_STEPS = 16  # of an epoch
_BUDGET_S = 2.0  # of the processor, for each strategy
Found = dict[str, list[tuple[int, float]]]  # by operation: on how many times the messages, and how long


class _EnoughError(RunError):
    """The time for this strategy is spent."""


def measure(operation: Callable[[], _T]) -> tuple[_T, float]:
    """The result of `operation` and the processor seconds it took."""
    began = time.thread_time()
    result = operation()
    return result, time.thread_time() - began


class MeasuringClock(VirtualClock):
    """A virtual clock that times the operations of its strategy into `found`."""

    found: Found
    deadline: float

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        if not self.running:
            return operation(*arguments)
        result, seconds = measure(partial(operation, *arguments))
        self.found[name_of(operation)].append((1, seconds))
        if time.thread_time() > self.deadline:
            raise _EnoughError("measured long enough")
        return result

    def rehearse(self, operation: Callable[..., object], *arguments: object, times: int = 1) -> None:
        if self.running:
            _, seconds = measure(partial(operation, *arguments))
            self.found[name_of(operation)].append((times, seconds))


class _MeasuringSimulation(Simulation):
    """Trains on a few batches an epoch, and evaluates nothing."""

    clock_kind = MeasuringClock

    def measure(self, size: int) -> Found:
        rows = min(self.dataset.n_train, _STEPS * size * self.run.workers)
        part = replace(self.dataset, x_train=self.dataset.x_train[:rows], y_train=self.dataset.y_train[:rows])
        self.dataset, self.plan = part, Plan(rows, self.run.workers, seed=self.run.seed, batch_per_worker=size)
        replicas = [self._replica(rank) for rank in range(self.run.workers)]
        found: Found = defaultdict(list)
        deadline = time.thread_time() + _BUDGET_S
        for replica in replicas:
            clock: Any = replica.clock
            clock.found, clock.deadline = found, deadline
        with suppress(RunError):  # long enough, or diverged: what was timed until then counts
            self.scheduler.run({replica.rank: partial(train, replica, self.strategy) for replica in replicas})
        return found


def measure_operations(runs: Sequence[Run], datasets: dict[int, Dataset], cost_model: CostModel) -> OperationTimes:
    """The operations of each strategy of `runs` that has some, by the strategy with its options."""
    smallest: dict[str, Run] = {}
    for run in sorted((run for run in runs if run.workers > 1), key=lambda run: run.workers):
        smallest.setdefault(str(run.strategy), run)
    times: OperationTimes = {}
    for name, run in smallest.items():
        strategy = registry.create(run.strategy.name, run.strategy.options, "virtual")
        if strategy.arithmetic(run.workers) is not None:  # it steps and averages gradients, and nothing else
            times[name] = {}
            continue
        torch.set_num_threads(run.threads_per_worker)
        simulation = _MeasuringSimulation(run, datasets[run.workers], cost_model, strategy, deadline=float("inf"))
        found = simulation.measure(simulation.plan.batch_size)
        times[name] = {operation: _time(calls, run.workers) for operation, calls in sorted(found.items())}
    return times


def _time(calls: list[tuple[int, float]], workers: int) -> OperationTime:
    """The lower quartile, for others can only add, and where twice as many messages were tried, what each adds."""
    cached, twice = ([seconds for times, seconds in calls if times == wanted] for wanted in (1, 2))
    whole = float(np.percentile(cached, _QUARTILE))
    each = max(0.0, float(np.percentile(twice, _QUARTILE)) - whole) / workers if twice else 0.0
    return OperationTime(seconds=max(0.0, whole - each * (workers - 2)), per_member_s=each)
