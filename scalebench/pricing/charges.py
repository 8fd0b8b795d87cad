"""Everything that one run is charged by: prices of operations, times of steps, factors on each worker's compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from scalebench.cluster.network import Network
from scalebench.pricing.costs import Costs, GradientTensor
from scalebench.pricing.machine import Machine, OperationTime
from scalebench.pricing.schedule import Ints
from scalebench.pricing.step_times import StepTable, StepTimes
from scalebench.strategies.base import Strategy
from scalebench.study.jitter import jitter_source
from scalebench.study.spec import Run
from scalebench.training.pacing import release_shares

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Charges:
    """Prices and times of one run.

    `speed` (workers,) multiplies every computation of a worker (2.0: half as fast), `jitter(workers, step)` those of
    that step, and `slowness[worker](now)` those that begin at that moment.
    """

    costs: Costs
    times: StepTimes
    speed: Floats
    jitter: Callable[[Ints, int], Floats] | None = None
    slowness: Mapping[int, Callable[[float], float]] = field(default_factory=dict)
    operations: Mapping[str, OperationTime] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, machine: Machine, strategy: Strategy) -> Charges:
        """Return the charges of a virtual `run` on `machine`, with the jitter and differences that it states."""
        table, options, workers = machine.table_for(run.workers), run.virtual, range(run.workers)
        cluster = machine.cluster.with_slow_links(options.slow_links)
        network = Network(cluster, cluster.node.workers_per_node, options.collective)
        engine = strategy.engines[0] if options.engine == "auto" else options.engine
        sources = [jitter_of(run, table, rank) for rank in workers]
        jitters = options.jitter != "none" and (options.jitter != "measured" or bool(table.jitter))
        return cls(
            Costs(network, machine.engines, engine),
            StepTimes(table, seed=run.seed - run.repetition, repetition=run.repetition),
            np.array([options.slowdown.get(rank, 1.0) for rank in workers]),
            (lambda ranks, step: np.array([sources[rank](step) for rank in ranks])) if jitters else None,
            {rank: slowness for rank in workers if (slowness := options.slowness(rank)) is not None},
            machine.operations.get(str(run.strategy), {}),
        )

    def factors(self, workers: Ints, step: int) -> Floats:
        """Return the factors on the compute of `workers` in a step."""
        speed: Floats = self.speed[workers]
        return speed if self.jitter is None else speed * self.jitter(workers, step)

    def operation_s(self, name: str, messages: int) -> float:
        """Return seconds of a strategy's operation on so many messages; zero if it was not measured."""
        found = self.operations.get(name)
        return 0.0 if found is None else found.among(messages)


def jitter_of(run: Run, table: StepTable, worker: int) -> Callable[[int], float]:
    """Return the factor on the compute of `worker` as a function of the step number."""
    options = run.virtual
    return jitter_source(options.jitter, options.jitter_sigma, seed=run.seed, worker=worker, measured=table.jitter)


def gradients(model: torch.nn.Module, release: Sequence[float]) -> list[GradientTensor]:
    """Return the gradients of a model; without measured shares released as in paced runs."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if len(release) != len(trainable):
        release = release_shares([parameter.numel() for parameter in trainable])
    return [GradientTensor(parameter.nbytes, share) for parameter, share in zip(trainable, release, strict=True)]
