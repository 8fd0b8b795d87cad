"""Charges on programs: prices of communication, seconds of compute, with the factors on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from scalebench.cluster.network import Network
from scalebench.pricing.costs import Costs, GradientTensor, Prices
from scalebench.pricing.machine import Machine, OperationTime, StepTable, StepTimes
from scalebench.pricing.program import Compute
from scalebench.pricing.schedule import Ints
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.choices import EngineName
from scalebench.study.heterogeneity import Jitter, jitter_source
from scalebench.study.spec import Run
from scalebench.system.clock import Task
from scalebench.training.pacing import release_shares

Floats = NDArray[np.float64]


class Machines(Protocol):
    """Charges of M machines.

    `spread` (M,) is the standard deviation of a step's seconds where jitter is
    expected, not drawn; `slowness[worker]` the factor on compute that begins at a
    moment.
    """

    @property
    def prices(self) -> Prices: ...
    @property
    def spread(self) -> Floats | None: ...
    @property
    def slowness(self) -> Mapping[int, Callable[[float], float]]: ...

    def seconds(self, compute: Compute, workers: Ints) -> Floats:
        """Return the seconds of each event, (events, M, workers), with an axis of one where workers are equal."""

    def operation_s(self, name: str, messages: int) -> Floats:
        """Return the seconds of a strategy's operation on so many messages, (M,)."""


@dataclass(frozen=True)
class Charges:
    """Prices and times of M repetitions of one run. Implements `Machines`.

    `times` and `jitter` have those of each repetition. `speed` (workers,) multiplies
    every computation of a worker (2.0: half as fast), `jitter[m][worker](step)` those
    of that step, and `slowness[worker](now)` those that begin at that moment.
    """

    costs: Costs
    times: Sequence[StepTimes]
    speed: Floats
    jitter: Sequence[Sequence[Jitter]] = ()
    slowness: Mapping[int, Callable[[float], float]] = field(default_factory=dict)
    operations: Mapping[str, OperationTime] = field(default_factory=dict)
    spread: None = None

    @classmethod
    def of(cls, runs: Sequence[Run], machine: Machine) -> Charges:
        """Return the charges of `runs`, equal up to seed and jitter, on `machine`, with the differences they state."""
        run, workers = runs[0], range(runs[0].workers)
        table, options = machine.table_for(run.workers), run.virtual
        cluster = machine.cluster.with_slow_links(options.slow_links)
        network = Network(cluster, cluster.node.workers_per_node, options.collective)
        return cls(
            Costs(network, machine.engines, carrier(run)),
            [
                # The draw belongs to the repetition, not to the seed of its data: all
                # strategies of a repetition get the same one.
                StepTimes(
                    table, seed=each.seed - each.repetition, repetition=each.repetition
                )
                for each in runs
            ],
            # Stated for the workers that differ; others are as measured.
            np.array([options.slowdown.get(rank, 1.0) for rank in workers]),
            [
                [jitter_of(each, table, rank) for rank in workers]
                if _jitters(each, table)
                else []
                for each in runs
            ],
            {
                rank: slowness
                for rank in workers
                if (slowness := options.slowness(rank)) is not None
            },
            machine.operations.get(str(run.strategy), {}),
        )

    @cached_property
    def prices(self) -> Prices:
        """Costs of each repetition, which are the same."""
        return Prices([self.costs] * len(self.times))

    def seconds(self, compute: Compute, workers: Ints) -> Floats:
        """Return the seconds of each event, (events, M, workers), without slowness."""
        base = np.empty(
            (len(compute.amounts), len(self.times), compute.amounts.shape[1])
        )
        for task, places in compute.places.items():
            # Operations of a strategy have a time each, tasks of a step one function of
            # the samples.
            if task != Task.OTHER:
                for repetition, times in enumerate(self.times):
                    base[places, repetition] = times.seconds(
                        task, compute.amounts[places]
                    )
                continue
            for place in places.tolist():
                base[place] = self.operation_s(
                    compute.names[place], int(compute.amounts[place, 0])
                )[:, None]
        # Tasks of a stage or a layer are parts of the model's work, at the time of a
        # whole step.
        base *= compute.shares[:, None, None]
        factors: Floats = np.broadcast_to(
            self.speed[workers], (len(base), len(self.times), len(workers))
        )
        if any(self.jitter) and len(base):
            # Jitter belongs to a step: all of its tasks are as late.
            low, high = int(compute.steps[0]), int(compute.steps[-1]) + 1
            # broadcast_to gives a view that cannot be written to.
            factors = factors.copy()
            for repetition, jitter in enumerate(self.jitter):
                if jitter:
                    drawn = np.array(
                        [jitter[worker].span(low, high) for worker in workers.tolist()]
                    )
                    factors[:, repetition] *= drawn.T[compute.steps - low]
        return base * factors

    def operation_s(self, name: str, messages: int) -> Floats:
        """Return the seconds of a strategy's operation on so many messages, (M,); zero if it was not measured."""
        found = self.operations.get(name)
        # What a strategy computes besides steps is measured on the machine, and unknown
        # on a stated cluster.
        return np.full(len(self.times), 0.0 if found is None else found.among(messages))


@dataclass(frozen=True)
class EqualWorkers:
    """Prices of M machines on which all workers are equal. Implements `Machines`.

    `tasks` (tasks, M) are the seconds of each task, of a step or of an epoch's shuffle;
    `jitter` (M,) is the standard deviation of a step's compute relative to its mean;
    `operations` are those of the strategy on each machine.
    """

    prices: Prices
    tasks: Floats
    jitter: Floats
    operations: Sequence[Mapping[str, OperationTime]]
    joined: Floats | None = None  # steps for which one stands, (M,)
    slowness: Mapping[int, Callable[[float], float]] = field(default_factory=dict)

    @property
    def spread(self) -> Floats | None:
        """Standard deviation of a step's seconds, (M,)."""
        step = (
            self.tasks[Task.FORWARD]
            + self.tasks[Task.BACKWARD]
            + self.tasks[Task.UPDATE]
        )
        # None: without jitter there are no variances to sum.
        return self.jitter * step if self.jitter.any() else None

    def with_joined(self, steps: Floats) -> EqualWorkers:
        """Return the machines on which a step takes the time of `steps` (M,)."""
        tasks = self.tasks * steps
        # An epoch is laid out once, however many steps it has.
        tasks[Task.SHUFFLE] = self.tasks[Task.SHUFFLE]
        # Jitters of steps are independent: their sum grows with the root of the steps,
        # the task with all of them.
        return replace(
            self, tasks=tasks, jitter=self.jitter / np.sqrt(steps), joined=steps
        )

    def seconds(self, compute: Compute, workers: Ints) -> Floats:
        """Return the seconds of each event, (events, M, 1)."""
        found = self.tasks[compute.tasks] * compute.shares[:, None]
        updates = compute.places.get(Task.UPDATE)
        for place in compute.places.get(Task.OTHER, ()):
            found[place] = self.operation_s(
                compute.names[place], int(compute.amounts[place, 0])
            )
            # a part of the step
            if self.joined is not None and updates is not None and place < updates[-1]:
                found[place] *= self.joined
        return found[:, :, None]

    def operation_s(self, name: str, messages: int) -> Floats:
        """Return the seconds of a strategy's operation on so many messages, (M,); zero if it was not measured."""
        times = [own.get(name) for own in self.operations]
        return np.array(
            [0.0 if time is None else time.among(messages) for time in times]
        )


def carrier(run: Run) -> str:
    """Return the engine whose costs a simulated run is charged for its communication."""
    return charged_as(
        registry.create(run.strategy.name, run.strategy.options, "virtual"),
        run.virtual.engine,
    )


def charged_as(strategy: Strategy, engine: EngineName | Literal["auto"]) -> str:
    """Return the engine that is asked for, `auto`: the one that the strategy prefers."""
    return strategy.engines[0] if engine == "auto" else engine


def jitter_of(run: Run, table: StepTable, worker: int) -> Jitter:
    """Return the factor on the compute of `worker` as a function of the step number."""
    options = run.virtual
    return jitter_source(
        options.jitter,
        options.jitter_sigma,
        seed=run.seed,
        worker=worker,
        measured=table.jitter,
    )


def _jitters(run: Run, table: StepTable) -> bool:
    return run.virtual.jitter != "none" and (
        run.virtual.jitter != "measured" or bool(table.jitter)
    )


def gradients(model: torch.nn.Module, release: Sequence[float]) -> list[GradientTensor]:
    """Return the gradients of a model; without measured shares released as in paced runs."""
    trainable = [
        parameter for parameter in model.parameters() if parameter.requires_grad
    ]
    # Shares of another model, or none: stated times have none. Paced runs release by
    # elements, and virtual ones have to agree with them.
    if len(release) != len(trainable):
        release = release_shares([parameter.numel() for parameter in trainable])
    return [
        GradientTensor(parameter.nbytes, share)
        for parameter, share in zip(trainable, release, strict=True)
    ]
