"""Times of what strategies compute beside plain steps, measured in short virtual runs.

A run has the study's smallest number of communicating workers and a few batches, so
that every operation gets vectors as in the study. Where workers share layers, their
steps and those of the whole model are taken in turn. Times are taken in reference
steps. No time of a native run is used.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from scalebench.calibration.quiet_rounds import Until, quiet_rounds
from scalebench.cluster.mesh import Mesh
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.errors import RunError
from scalebench.pricing.machine import (
    Machine,
    OperationTime,
    OperationTimes,
    StepTimes,
    name_of,
)
from scalebench.strategies import registry
from scalebench.strategies.base import Batch
from scalebench.study.spec import Run
from scalebench.system.clock import Task, WallClock
from scalebench.training.division import step_overhead
from scalebench.training.loop import train
from scalebench.training.reference_step import Gauge
from scalebench.training.replica import Replica
from scalebench.virtual.engine import Simulation
from scalebench.virtual.lock_step import strategy_of
from scalebench.virtual.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from scalebench.comm.native import NativeCommunicator

_T = TypeVar("_T")
SECONDS = 1.0  # of a strategy, at most
_STEPS = 16  # of an epoch
_BUDGET_S = 2.0  # of the processor, for each run
_FEWEST_RUNS, _MOST_RUNS = 2, 100  # of a strategy
# Of the steps of a divided model: torch plans its gathers in the first ones.
_WARM_UP_STEPS, _MOST_STEPS = 3, 32
# by operation: (multiple of the messages, seconds)
_Found = dict[str, list[tuple[int, float]]]
_ByTask = dict[tuple[Task, int], float]  # and samples


class _BudgetSpentError(RunError):
    """End of the time for one strategy."""


def _timed(operation: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of `operation` and its processor seconds."""
    began = time.thread_time()
    result = operation()
    return result, time.thread_time() - began


class _MeasuringClock(VirtualClock):
    """Virtual clock that adds the times of its strategy's operations to `found`."""

    found: _Found
    deadline: float

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        if not self.running:
            return operation(*arguments)
        result, seconds = _timed(partial(operation, *arguments))
        self.found[name_of(operation)].append((1, seconds))
        if time.thread_time() > self.deadline:
            raise _BudgetSpentError("measured long enough")
        return result

    def execute_by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        rows: Sequence[Sequence[Tensor]],
        *equal: object,
    ) -> list[Sequence[Tensor]]:
        """Compute each worker's row by itself, as a real worker does."""
        return [
            [
                made[0]
                for made in self.execute(compute, *(row[None] for row in own), *equal)
            ]
            for own in rows
        ]

    def rehearse(
        self, operation: Callable[..., object], *arguments: object, times: int = 1
    ) -> None:
        if self.running:
            _, seconds = _timed(partial(operation, *arguments))
            self.found[name_of(operation)].append((times, seconds))


def measure_operations(
    runs: Sequence[Run],
    datasets: dict[int, Dataset],
    machine: Machine,
    seconds: float = SECONDS,
) -> OperationTimes:
    """Measure the operations of each strategy of `runs` for some seconds, at the speed of `machine`.

    The result is by strategy with options.
    """
    smallest: dict[str, Run] = {}
    # The smallest count takes the least time, and the cost of each further worker is
    # measured apart.
    for run in sorted(
        (run for run in runs if run.workers > 1), key=lambda run: run.workers
    ):
        smallest.setdefault(str(run.strategy), run)
    times: OperationTimes = {}
    for name, run in smallest.items():
        strategy, dataset = strategy_of(run), datasets[run.workers]
        times[name] = {}
        # Others of a named arithmetic compute only steps and averages of gradients.
        if strategy.arithmetic(run.workers) is None:
            times[name] = _played_times(run, dataset, machine, seconds)
        if strategy.traits.shares_layers(run.workers):
            # In place of that of the played steps, which takes no time there.
            overheads = step_overheads(run, dataset, machine, _BUDGET_S)
            times[name][name_of(step_overhead)] = _time(
                [(1, each) for each in overheads], run.workers
            )
    return times


def _played_times(
    run: Run, dataset: Dataset, machine: Machine, seconds: float
) -> dict[str, OperationTime]:
    """Play some batches again and again for some seconds, and return the times of the operations in them."""
    until: Until[_Found] = Until(seconds, fewest=_FEWEST_RUNS, most=_MOST_RUNS)
    rounds = quiet_rounds(
        partial(_played, run, dataset, machine), Gauge().seconds, until
    )
    found: _Found = defaultdict(list)
    for each in rounds:
        factor = machine.reference_s / each.reference_s if machine.reference_s else 1.0
        for operation, calls in each.found.items():
            found[operation] += [
                (multiple, seconds * factor) for multiple, seconds in calls
            ]
    return {
        operation: _time(calls, run.workers)
        for operation, calls in sorted(found.items())
    }


def _played(run: Run, dataset: Dataset, machine: Machine) -> _Found:
    """Play a few batches of an epoch, without evaluation, and return the times of the operations in it."""
    simulation = Simulation(run, dataset, machine, _MeasuringClock)
    # Batches go to replicas, each of which may be several workers.
    count = simulation.mesh.data
    size = simulation.plan.batch_size
    rows = min(dataset.n_train, _STEPS * size * count)
    # A few batches for each worker: as many rows as these need.
    simulation.dataset = replace(
        dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows]
    )
    simulation.plan = BatchPlan(rows, count, seed=run.seed, batch_per_worker=size)
    replicas = [simulation.replica(rank) for rank in range(run.workers)]
    found: _Found = defaultdict(list)
    deadline = time.thread_time() + _BUDGET_S
    for replica in replicas:
        clock: Any = replica.clock
        clock.found, clock.deadline = found, deadline
    programs = {
        rank: partial(train, replica, simulation.strategy)
        for rank, replica in enumerate(replicas)
    }
    with suppress(RunError):  # budget spent or diverged: the times so far are kept
        simulation.scheduler.run(programs)
    return found


class _StepClock(WallClock):
    """Processor seconds of a worker's own tasks, and the shares of the model's work that these are charged as."""

    def __init__(self) -> None:
        super().__init__()
        # by task and the samples that it is of
        self._seconds: _ByTask = defaultdict(float)
        self._shares: _ByTask = defaultdict(float)

    def of(self, step: Callable[[], None]) -> tuple[_ByTask, _ByTask]:
        """Return the seconds and shares of a step."""
        self._seconds, self._shares = defaultdict(float), defaultdict(float)
        self.mark = time.thread_time()
        step()
        return self._seconds, self._shares

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        now = time.thread_time()
        if task != Task.COMM:  # which is charged for itself
            self._seconds[task, samples] += now - self.mark
            self._shares[task, samples] += share
        self.mark = now


def step_overheads(
    run: Run, dataset: Dataset, machine: Machine, budget_s: float
) -> list[float]:
    """Return the seconds on `machine` by which steps of a worker take longer than the shares of the model's own step.

    The shares are those by which virtual runs charge a divided model. Layers that all
    workers compute, small operations in Python, and copies of shards are not divided;
    fully_shard and DTensor call hooks and dispatch each operation besides: some
    milliseconds a block of a small transformer. Both take steps in one process, one
    after the other, the worker among ranks that are not there: communication takes no
    time. By how much of its charge a step takes longer does not depend on the speed of
    the moment; the charge is that of the machine.
    """
    from scalebench.comm.torch_dist import silent_group  # a second of imports

    torch.set_num_threads(run.threads_per_worker)
    clock = _StepClock()
    times = StepTimes(machine.table_for(run.workers), repetition=None)
    engine = registry.preferred_engine(run.strategy.name)
    strategy = registry.create(run.strategy.name, run.strategy.options, engine)
    with silent_group(run.workers, clock) as comm:
        worker = _replica(run, dataset, comm, strategy.traits.mesh(run.workers))
        strategy.setup(worker)
        whole = _replica(run, dataset, comm.split(lambda rank: rank))
        batch = next(worker.batches(0))

        def overhead() -> float:
            taken, shares = clock.of(partial(strategy.warm_up, worker, batch))
            # In turn: the speed of a shared machine changes.
            step: _ByTask = {}
            for samples in {samples for _, samples in shares if samples}:
                step |= clock.of(partial(whole.local_step, _of_size(batch, samples)))[0]
            charged = sum(share * step.get(key, 0.0) for key, share in shares.items())
            excess = sum(taken.values()) / charged - 1
            return excess * sum(
                share * times.task_seconds(*key) for key, share in shares.items()
            )

        for _ in range(_WARM_UP_STEPS):
            overhead()
        found: list[float] = []
        deadline = time.thread_time() + budget_s
        while not found or (len(found) < _MOST_STEPS and time.thread_time() < deadline):
            found.append(overhead())
    return found


def _replica(
    run: Run, dataset: Dataset, comm: NativeCommunicator, mesh: Mesh | None = None
) -> Replica:
    mesh = mesh or Mesh(comm.size)
    plan = BatchPlan.of(run, run.workers, run.seed, dataset, mesh.parts)
    return Replica(run, dataset, plan, comm, comm.clock, mesh=mesh)


def _of_size(batch: Batch, samples: int) -> Batch:
    """Return a batch of so many samples, those of `batch` repeated."""
    places = torch.arange(samples) % len(batch.x)
    return batch._replace(x=batch.x[places], y=batch.y[places])


def _time(calls: list[tuple[int, float]], workers: int) -> OperationTime:
    """Return the median, and the cost of each further message."""
    once, twice = (
        [seconds for times, seconds in calls if times == multiple]
        for multiple in (1, 2)
    )
    whole = float(np.median(once))
    each = max(0.0, float(np.median(twice)) - whole) / workers if twice else 0.0
    return OperationTime(
        seconds=max(0.0, whole - each * (workers - 2)), per_member_s=each
    )
