"""Averaging 20 million float32 parameters on two processes, against a raw in-place allreduce of the same engine.

    python benchmarks/averaging_bandwidth.py

The raw one only adds up; averaging divides as well. Result: the share of the raw bandwidth. Goal: at least 0.95.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from ranks import findings_of_ranks
from ratios import Finding, Goal, compare, show
from torch import Tensor

ENGINES = ("mpi", "horovod", "gloo")
PARAMETERS, PAIRS = 20_000_000, 21
GOAL = Goal(">=", 0.95)


def main() -> Iterator[Finding]:
    for engine in ENGINES:
        yield from findings_of_ranks("averaging_bandwidth", engine)


def measure_here(engine: str) -> list[Finding]:
    """Every rank: `allreduce_(mean)` of the communicator and the engine's own call, in turn."""
    from mpi4py import MPI

    from scalebench.clock import WallClock
    from scalebench.native.connection import connected

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    parameters = torch.zeros(PARAMETERS)
    clock = WallClock()
    with connected(engine, world, clock, one_node=True) as comm:
        raw = RAW[engine](parameters)

        def after_a_meeting(operation: Callable[[], object]) -> Callable[[], object]:
            def both() -> None:
                world.Barrier()
                operation()

            return both

        clock.start()
        averaging = after_a_meeting(lambda: comm.allreduce_(parameters, "mean"))
        comparison = compare(averaging, after_a_meeting(raw), PAIRS)
    return [comparison.inverse(f"bandwidth of averaging 20 M: {engine}", GOAL)]


def raw_mpi(tensor: Tensor) -> Callable[[], object]:
    from mpi4py import MPI

    wire = tensor.numpy()
    return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, wire)


def raw_horovod(tensor: Tensor) -> Callable[[], object]:
    import horovod.torch as hvd

    return lambda: hvd.allreduce_(tensor, name="raw", op=hvd.Sum)


def raw_gloo(tensor: Tensor) -> Callable[[], object]:
    return lambda: torch.distributed.all_reduce(tensor)


RAW = {"mpi": raw_mpi, "horovod": raw_horovod, "gloo": raw_gloo}

if __name__ == "__main__":
    show(main())
