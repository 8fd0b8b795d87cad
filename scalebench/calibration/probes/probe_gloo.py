"""Costs of gloo's collectives and messages, and of DDP's hooks and wrapper in a step.

Workers that hold parts of a model gather, scatter and send: of few bytes an allgather
takes longer here than an allreduce, of which the network model makes it half.

gloo's threads wait for the scheduler: costs are measured in seconds, not in reference
steps.
"""

from __future__ import annotations

import operator
from functools import partial

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from scalebench.calibration.probes import probe_rounds
from scalebench.cluster.engine_costs import EngineCost
from scalebench.comm.base import Communicator
from scalebench.comm.engines.base import Engine, Place
from scalebench.models.flat import side_by_side
from scalebench.training.reference_step import Step, reference_network

_COARSE_GRID = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes
_GATHER, _SCATTER, _SEND = "allgather", "reduce-scatter", "send"


def measure(
    engine: Engine, rounds: probe_rounds.ProbeRounds, source: str
) -> tuple[probe_rounds.Found, list[EngineCost]]:
    """Measure gloo's collectives and messages, and the cost per step of DDP."""
    buffers = {nbytes: torch.zeros(nbytes // 4) for nbytes in probe_rounds.GRID}

    def one_round() -> list[probe_rounds.Sample]:
        with engine.connect(Place(rounds.mpi, rounds.clock, one_node=True)) as comm:
            samples = [
                rounds.after_computing(
                    (engine.name, nbytes), partial(comm.allreduce_, buffers[nbytes])
                )
                for nbytes in probe_rounds.GRID
            ]
            for nbytes in _COARSE_GRID:
                samples += _of_parts(rounds, comm, nbytes)
            samples.append(
                rounds.after_sleeping(partial(comm.allreduce_, buffers[4 << 10]))
            )
            samples += probe_rounds.beside_reference(
                rounds, ("joined", 0), _ddp_step(), operator.sub
            )
        return samples + probe_rounds.of_a_lone_worker(engine, rounds, _ddp_step)

    found = rounds.measure(one_round, relative=False)
    alone_s, _ = probe_rounds.added_by_hooks(found)
    curve = found.curve(engine.name, probe_rounds.GRID, relative=False)
    # Threads of joined ranks compete for the cores in a step, which costs more than the
    # bucket's bare allreduce.
    sizes, seconds = zip(*curve, strict=True)
    # DDP's only one
    bucket = sum(parameter.numel() for parameter in reference_network().parameters())
    bucket_s = float(np.interp(4 * bucket, sizes, seconds))
    made = partial(
        probe_rounds.entry,
        ranks=rounds.mpi.size,
        source=source,
        # Whatever the ranks exchange, the first of it wakes their threads.
        pause_s=found.pause_s(engine.name, relative=False),
    )
    others = [
        made(f"{engine.name}-{kind}", found.curve(kind, _COARSE_GRID, relative=False))
        for kind in (_GATHER, _SCATTER, _SEND)
    ]
    return found, [
        *others,
        made(
            engine.name,
            curve,
            message_s=found.least((engine.name, 4), relative=False),
            per_step_s=max(
                0.0, found.seconds(("joined", 0), relative=False) - bucket_s
            ),
            alone_s=alone_s,
        ),
    ]


def _of_parts(
    rounds: probe_rounds.ProbeRounds, comm: Communicator, nbytes: int
) -> list[probe_rounds.Sample]:
    """Time an allgather of so many bytes of each rank, a reduce-scatter of so many in all, and a message."""
    numbers = max(1, nbytes // (4 * comm.size))
    own, whole, message = (
        torch.zeros(numbers),
        torch.zeros(numbers * comm.size),
        torch.zeros(nbytes // 4),
    )

    def there_and_back() -> None:
        if comm.rank == 0:
            comm.send(message, 1)
            comm.recv_(message, 1)
        elif comm.rank == 1:
            comm.recv_(message, 0)
            comm.send(message, 0)

    both_ways = rounds.after_computing((_SEND, nbytes), there_and_back)
    return [
        rounds.after_computing((_GATHER, nbytes), partial(comm.allgather, message)),
        rounds.after_computing(
            (_SCATTER, nbytes), partial(comm.reduce_scatter_, own, whole)
        ),
        # A message takes half of the way there and back.
        both_ways._replace(
            seconds=both_ways.seconds / 2,
            each=tuple(seconds / 2 for seconds in both_ways.each),
        ),
    ]


def _ddp_step() -> Step:
    """Make the reference step of a script with a module wrapped for DDP."""
    net, x = reference_network(), torch.randn(8, 96)
    _, gradients, _ = side_by_side(net)
    module = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        gradients.zero_()
        module(x).sum().backward()
        optimizer.step()

    return step
