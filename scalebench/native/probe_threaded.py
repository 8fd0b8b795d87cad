"""Costs of engines with a thread of their own, Horovod and gloo, and of their hooks and wrappers in a step.

Such engines wait for timers and for the scheduler: their costs are measured in seconds, not in reference steps.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import numpy as np
import torch
from mpi4py import MPI

from scalebench.cluster.engine_costs import EngineCost
from scalebench.comm.mpi import MpiCommunicator
from scalebench.comm.native import NativeCommunicator
from scalebench.models.flat import side_by_side
from scalebench.native.connection import connected
from scalebench.native.probe_rounds import CYCLE_S, Operation, ProbeRounds, sleep_until_all_arrive
from scalebench.native.probe_samples import GRID, Found, Key, Sample, entry
from scalebench.system.stopwatch import Stopwatch
from scalebench.training.reference_step import Step, reference_network

_SMALL = 16 << 10  # bytes: up to here Horovod's negotiation can be told from its transport
_PAIRS, _STEPS = 12, 4  # windows of an engine's step in a round, and steps of each
_CYCLES = 16  # of Horovod's loop, timed in a round
_QUARTILES = 1.349  # standard deviations of a normal distribution between its quartiles


def measure_horovod(rounds: ProbeRounds, source: str) -> tuple[Found, list[EngineCost]]:
    """Measure Horovod's allreduce, divided into cycle, negotiation and transport, and its cost per step."""
    import horovod.torch as hvd

    buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in GRID}
    hooked = [torch.zeros(16) for _ in range(4)]  # as many as a model with two layers hands over
    transport = MpiCommunicator(rounds.mpi, rounds.clock)

    def one_round() -> list[Sample]:
        samples: list[Sample] = []
        for nbytes in GRID:
            if nbytes <= _SMALL:
                moved = partial(transport.allreduce_, buffers[nbytes])
                samples.append(rounds.after_a_step(("transport", nbytes), moved))
        samples.append(rounds.window(("at once", 4), partial(transport.allreduce_, buffers[4]), together=True))
        with _engine("horovod", rounds, rounds.mpi) as comm:
            for nbytes in GRID:
                samples.append(rounds.after_computing(("horovod", nbytes), partial(comm.allreduce_, buffers[nbytes])))
            began = time.perf_counter()
            handles = [hvd.allreduce_async_(tensor, name=f"probe.{i}") for i, tensor in enumerate(hooked)]
            samples.append(Sample(("enqueue", 0), time.perf_counter() - began, undisturbed=True))
            for handle in handles:
                hvd.synchronize(handle)
        return samples + _alone("horovod", rounds)

    found = rounds.measure(one_round, relative=False)
    lengths = found.values(("cycle", 4), relative=False)
    cycle_s, (low, high) = median(lengths), np.quantile(lengths, (0.25, 0.75))
    # A tensor of a lone worker that is ready at any moment waits for half a cycle on average.
    negotiation = max(0.0, found.seconds(("horovod alone", 4), relative=False) - cycle_s / 2)
    moved = {nbytes: found.seconds(("transport", nbytes)) for nbytes in GRID if nbytes <= _SMALL}
    # Horovod moves and adds bytes by this MPI's allreduce; the rest of a small operation's time is waiting for turns.
    whole = {nbytes: found.seconds(("horovod", nbytes), relative=False) for nbytes in GRID}
    besides = max(0.0, median(whole[nbytes] - seconds for nbytes, seconds in moved.items()))
    points = [(nbytes, moved.get(nbytes, max(0.0, seconds - besides))) for nbytes, seconds in whole.items()]
    alone_s, together_s = _added(found)
    return found, [
        entry(
            "horovod",
            points,
            ranks=rounds.mpi.size,
            source=source,
            negotiation_s=negotiation,
            message_s=found.least(("at once", 4)),
            cycle_s=cycle_s,
            cycle_spread_s=float(high - low) / _QUARTILES,
            per_step_s=found.seconds(("enqueue", 0)) + together_s,
            alone_s=alone_s,
        )
    ]


def measure_gloo(rounds: ProbeRounds, source: str) -> tuple[Found, list[EngineCost]]:
    """Measure gloo's allreduce, and the cost per step of DDP."""
    buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in GRID}

    def one_round() -> list[Sample]:
        with _engine("gloo", rounds, rounds.mpi) as comm:
            samples = [
                rounds.after_computing(("gloo", nbytes), partial(comm.allreduce_, buffers[nbytes])) for nbytes in GRID
            ]
            samples += _beside_reference(rounds, ("joined", 0), _engine_step("gloo"), operator.sub)
        return samples + _alone("gloo", rounds)

    found = rounds.measure(one_round, relative=False)
    alone_s, _ = _added(found)
    curve = found.curve("gloo", GRID, relative=False)
    # Threads of joined ranks compete for the cores in a step, which costs more than the bucket's bare allreduce.
    sizes, seconds = zip(*curve, strict=True)
    bucket = sum(parameter.numel() for parameter in reference_network().parameters())  # DDP's only one
    bucket_s = float(np.interp(4 * bucket, sizes, seconds))
    return found, [
        entry(
            "gloo",
            curve,
            ranks=rounds.mpi.size,
            source=source,
            message_s=found.least(("gloo", 4), relative=False),
            per_step_s=max(0.0, found.seconds(("joined", 0), relative=False) - bucket_s),
            alone_s=alone_s,
        )
    ]


@contextmanager
def _engine(engine: str, rounds: ProbeRounds, group: MPI.Comm) -> Iterator[NativeCommunicator]:
    """Connect the engine on `group`, Horovod with its default cycle."""
    os.environ["HOROVOD_CYCLE_TIME"] = str(1e3 * CYCLE_S)
    try:
        with connected(engine, group, rounds.clock, one_node=True) as comm:
            yield comm
    finally:
        del os.environ["HOROVOD_CYCLE_TIME"]


def _alone(engine: str, rounds: ProbeRounds) -> list[Sample]:
    """Time steps of a lone worker with the engine's hooks and wrappers, relative to reference steps beside them.

    First of rank 0 while the others sleep, then of all ranks at the same time.
    """
    group = rounds.mpi.Split(rounds.mpi.rank)
    samples = []
    with _engine(engine, rounds, group):
        wrapped = _engine_step(engine)
        if rounds.mpi.rank == 0:
            samples += _beside_reference(rounds, ("alone", 0), wrapped, operator.truediv)
        sleep_until_all_arrive(rounds.mpi)
        samples += _beside_reference(rounds, ("together", 0), wrapped, operator.truediv)
        if engine == "horovod":
            import horovod.torch as hvd

            tensor = torch.zeros(1)

            def allreduce() -> None:  # the communicator leaves out that of a lone worker
                hvd.synchronize(hvd.allreduce_async_(tensor, name="probe.alone"))

            samples += rounds.one_by_one(("cycle", 4), allreduce, _CYCLES)
            samples.append(rounds.after_computing(("horovod alone", 4), allreduce))
        del wrapped
    group.Free()
    return samples


def _beside_reference(
    rounds: ProbeRounds, key: Key, step: Operation, compared: Callable[[float, float], float]
) -> list[Sample]:
    """Time windows of `step`, each `compared` with the reference step beside it: their difference or ratio.

    Both follow untimed steps: reading the counters, and other steps, evict caches.
    """
    samples = []
    for _ in range(_PAIRS):
        stopwatch = Stopwatch(computes=False, shares_cores=True)  # DDP's main thread waits for gloo's on this core
        rounds.gauge.steps(_STEPS)
        reference_s = rounds.gauge.steps(_STEPS)
        for _ in range(_STEPS):
            step()
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        seconds = (time.perf_counter() - began) / _STEPS
        samples.append(Sample(key, compared(seconds, reference_s), stopwatch.stop().undisturbed))
    return samples


def _added(found: Found) -> tuple[float, float]:
    """Seconds, at least zero, of the engine's step beyond the reference step: of one worker, and of all at once."""
    alone, together = (found.seconds((name, 0), relative=False) - 1.0 for name in ("alone", "together"))
    return max(0.0, alone) * found.reference_s, max(0.0, together) * found.reference_s


def _engine_step(engine: str) -> Step:
    """The reference step of a script: with Horovod a wrapped optimizer, tensor by tensor; with DDP a wrapped module."""
    net, x = reference_network(), torch.randn(8, 96)
    _, gradients, _ = side_by_side(net)
    if engine == "horovod":
        import horovod.torch as hvd

        plain = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
        wrapped = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())

        def step() -> None:
            gradients.zero_()
            net(x).sum().backward()
            wrapped.synchronize()
            with wrapped.skip_synchronize():
                wrapped.step()

    else:
        from torch.nn.parallel import DistributedDataParallel

        module = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)

        def step() -> None:
            gradients.zero_()
            module(x).sum().backward()
            optimizer.step()

    return step
