"""Measurement of operations of strategies besides plain steps, in short virtual runs of each strategy.

A run has the study's smallest number of communicating workers and a few batches, so that every operation gets vectors
as in the study. Times are taken in reference steps. No time of a native run is used.
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

from scalebench.calibration.quiet_rounds import Until, quiet_rounds
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.errors import RunError
from scalebench.pricing.machine import Machine, OperationTime, OperationTimes, name_of
from scalebench.strategies import registry
from scalebench.study.spec import Run
from scalebench.training.loop import train
from scalebench.training.reference_step import Gauge
from scalebench.virtual.engine import Simulation
from scalebench.virtual.virtual_clock import VirtualClock

_T = TypeVar("_T")
_STEPS = 16  # of an epoch
_BUDGET_S = 2.0  # of the processor, for each run
_FEWEST_RUNS, _MOST_RUNS = 2, 100  # of a strategy
_RUNS_S = 1.0
Found = dict[str, list[tuple[int, float]]]  # by operation: (multiple of the messages, seconds)


class _BudgetSpentError(RunError):
    """End of the time for one strategy."""


def measure(operation: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of `operation` and its processor seconds."""
    began = time.thread_time()
    result = operation()
    return result, time.thread_time() - began


class MeasuringClock(VirtualClock):
    """Virtual clock that adds the times of its strategy's operations to `found`."""

    found: Found
    deadline: float

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        if not self.running:
            return operation(*arguments)
        result, seconds = measure(partial(operation, *arguments))
        self.found[name_of(operation)].append((1, seconds))
        if time.thread_time() > self.deadline:
            raise _BudgetSpentError("measured long enough")
        return result

    def rehearse(self, operation: Callable[..., object], *arguments: object, times: int = 1) -> None:
        if self.running:
            _, seconds = measure(partial(operation, *arguments))
            self.found[name_of(operation)].append((times, seconds))


def measure_operations(runs: Sequence[Run], datasets: dict[int, Dataset], machine: Machine) -> OperationTimes:
    """Measure the operations of each strategy of `runs`, by strategy with options, at the speed of `machine`."""
    smallest: dict[str, Run] = {}
    for run in sorted((run for run in runs if run.workers > 1), key=lambda run: run.workers):
        smallest.setdefault(str(run.strategy), run)
    times: OperationTimes = {}
    gauge = Gauge()
    for name, run in smallest.items():
        strategy = registry.create(run.strategy.name, run.strategy.options, "virtual")
        if strategy.arithmetic(run.workers) is not None:  # only steps and averages of gradients
            times[name] = {}
            continue
        until: Until[Found] = Until(_RUNS_S, fewest=_FEWEST_RUNS, most=_MOST_RUNS)
        rounds = quiet_rounds(partial(_played, run, datasets[run.workers], machine), gauge.seconds, until)
        found: Found = defaultdict(list)
        for each in rounds:
            factor = machine.reference_s / each.reference_s if machine.reference_s else 1.0
            for operation, calls in each.found.items():
                found[operation] += [(multiple, seconds * factor) for multiple, seconds in calls]
        times[name] = {operation: _time(calls, run.workers) for operation, calls in sorted(found.items())}
    return times


def _played(run: Run, dataset: Dataset, machine: Machine) -> Found:
    """Play a few batches of an epoch, without evaluation, and return the times of the operations in it."""
    simulation = Simulation(run, dataset, machine, MeasuringClock)
    count = simulation.mesh.data
    size = simulation.plan.batch_size
    rows = min(dataset.n_train, _STEPS * size * count)
    simulation.dataset = replace(dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows])
    simulation.plan = BatchPlan(rows, count, seed=run.seed, batch_per_worker=size)
    replicas = [simulation.replica(rank) for rank in range(run.workers)]
    found: Found = defaultdict(list)
    deadline = time.thread_time() + _BUDGET_S
    for replica in replicas:
        clock: Any = replica.clock
        clock.found, clock.deadline = found, deadline
    programs = {rank: partial(train, replica, simulation.strategy) for rank, replica in enumerate(replicas)}
    with suppress(RunError):  # budget spent or diverged: the times so far are kept
        simulation.scheduler.run(programs)
    return found


def _time(calls: list[tuple[int, float]], workers: int) -> OperationTime:
    """Return the median, and the cost of each further message."""
    once, twice = ([seconds for times, seconds in calls if times == multiple] for multiple in (1, 2))
    whole = float(np.median(once))
    each = max(0.0, float(np.median(twice)) - whole) / workers if twice else 0.0
    return OperationTime(seconds=max(0.0, whole - each * (workers - 2)), per_member_s=each)
