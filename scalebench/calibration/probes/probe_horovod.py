"""Costs of Horovod: cycle, negotiation, transport, and its hooks and optimizer in a step.

Horovod waits for timers: costs are measured in seconds, not in reference steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import horovod.torch as hvd
import numpy as np
import torch

from scalebench.calibration.probes import probe_rounds
from scalebench.cluster.engine_costs import EngineCost
from scalebench.comm.engines.base import Engine, Place
from scalebench.comm.mpi import MpiCommunicator
from scalebench.models.flat import side_by_side
from scalebench.training.reference_step import Step, reference_network

# bytes: up to here Horovod's negotiation can be told from its transport
_SMALL = 16 << 10
_CYCLES = 16  # of Horovod's loop, timed in a round
_QUARTILES = 1.349  # standard deviations of a normal distribution between its quartiles


def measure(
    engine: Engine, rounds: probe_rounds.ProbeRounds, source: str
) -> tuple[probe_rounds.Found, list[EngineCost]]:
    """Measure Horovod's allreduce, divided into cycle, negotiation and transport, and its cost per step."""
    buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in probe_rounds.GRID}
    # as many as a model with two layers hands over
    hooked = [torch.zeros(16) for _ in range(4)]
    transport = MpiCommunicator(rounds.mpi, rounds.clock)

    def one_round() -> list[probe_rounds.Sample]:
        samples: list[probe_rounds.Sample] = []
        for nbytes in probe_rounds.GRID:
            if nbytes <= _SMALL:
                moved = partial(transport.allreduce_, buffers[nbytes])
                samples.append(rounds.after_a_step(("transport", nbytes), moved))
        samples.append(
            rounds.window(
                ("at once", 4), partial(transport.allreduce_, buffers[4]), together=True
            )
        )
        with engine.connect(Place(rounds.mpi, rounds.clock, one_node=True)) as comm:
            for nbytes in probe_rounds.GRID:
                samples.append(
                    rounds.after_computing(
                        (engine.name, nbytes), partial(comm.allreduce_, buffers[nbytes])
                    )
                )
            began = time.perf_counter()
            handles = [
                hvd.allreduce_async_(tensor, name=f"probe.{i}")
                for i, tensor in enumerate(hooked)
            ]
            samples.append(
                probe_rounds.Sample(
                    ("enqueue", 0), time.perf_counter() - began, undisturbed=True
                )
            )
            for handle in handles:
                hvd.synchronize(handle)
        return samples + probe_rounds.of_a_lone_worker(
            engine, rounds, _horovod_step, partial(_cycles, rounds)
        )

    with _default_cycle():
        found = rounds.measure(one_round, relative=False)
    return found, [_costs(engine, found, rounds.mpi.size, source)]


def _costs(
    engine: Engine, found: probe_rounds.Found, ranks: int, source: str
) -> EngineCost:
    """Return Horovod's costs among `ranks`, from the operations that were timed."""
    lengths = found.values(("cycle", 4), relative=False)
    cycle_s, (low, high) = median(lengths), np.quantile(lengths, (0.25, 0.75))
    # A tensor of a lone worker that is ready at any moment waits for half a cycle on
    # average.
    negotiation = max(
        0.0, found.seconds(("horovod alone", 4), relative=False) - cycle_s / 2
    )
    moved = {
        nbytes: found.seconds(("transport", nbytes))
        for nbytes in probe_rounds.GRID
        if nbytes <= _SMALL
    }
    # Horovod moves and adds bytes by this MPI's allreduce; the rest of a small
    # operation's time is waiting for turns.
    whole = {
        nbytes: found.seconds((engine.name, nbytes), relative=False)
        for nbytes in probe_rounds.GRID
    }
    besides = max(
        0.0, median(whole[nbytes] - seconds for nbytes, seconds in moved.items())
    )
    points = [
        (nbytes, moved.get(nbytes, max(0.0, seconds - besides)))
        for nbytes, seconds in whole.items()
    ]
    alone_s, together_s = probe_rounds.added_by_hooks(found)
    return probe_rounds.entry(
        engine.name,
        points,
        ranks=ranks,
        source=source,
        negotiation_s=negotiation,
        message_s=found.least(("at once", 4)),
        cycle_s=cycle_s,
        cycle_spread_s=float(high - low) / _QUARTILES,
        per_step_s=found.seconds(("enqueue", 0)) + together_s,
        alone_s=alone_s,
    )


@contextmanager
def _default_cycle() -> Iterator[None]:
    """Let Horovod start with its default cycle."""
    os.environ["HOROVOD_CYCLE_TIME"] = str(1e3 * probe_rounds.CYCLE_S)
    try:
        yield
    finally:
        del os.environ["HOROVOD_CYCLE_TIME"]


def _cycles(rounds: probe_rounds.ProbeRounds) -> list[probe_rounds.Sample]:
    """Time allreduces of a lone worker, one after the other and at any moment of a cycle."""
    tensor = torch.zeros(1)

    def allreduce() -> None:  # the communicator leaves out that of a lone worker
        hvd.synchronize(hvd.allreduce_async_(tensor, name="probe.alone"))

    samples = rounds.one_by_one(("cycle", 4), allreduce, _CYCLES)
    return [*samples, rounds.after_computing(("horovod alone", 4), allreduce)]


def _horovod_step() -> Step:
    """Make the reference step of a script with a wrapped optimizer, tensor by tensor."""
    net, x = reference_network(), torch.randn(8, 96)
    _, gradients, _ = side_by_side(net)
    plain = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters())

    def step() -> None:
        gradients.zero_()
        net(x).sum().backward()
        wrapped.synchronize()
        with wrapped.skip_synchronize():
            wrapped.step()

    return step
