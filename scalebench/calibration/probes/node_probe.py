"""Costs of collectives between nodes.

Measured with one rank on each of two nodes, of all nodes and of their geometric mean, which shows the growth with
their number, and with all ranks where nodes hold several. A cost is the median of the repetitions. When the time is
over, sizes above a MiB are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from mpi4py import MPI

from scalebench.calibration.probes.allreduce_probe import PAUSE_S, between_steps
from scalebench.calibration.probes.probe_samples import entry
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.system.clock import WallClock

_FEWEST, _MOST = 3, 200  # repetitions of an operation
_ALWAYS = 1 << 20  # bytes: up to here all sizes are measured, however long it takes
Operation = Callable[[torch.Tensor], object]
Measure = Callable[[MPI.Comm, Callable[[], object], int], list[float]]  # seconds of so many repetitions


def measure_between_nodes(
    world: MPI.Comm, names: Sequence[str], sizes: Sequence[int], seconds: float, source: str
) -> EngineCosts:
    """Measure the allreduce of the engines `names`, and MPI's reduce and broadcast; rank 0 takes part everywhere."""
    found: list[EngineCost] = []
    for group, nodes in _places(world):
        for engine in names if group != MPI.COMM_NULL else ():
            with named(engine).connect(Place(group, WallClock(), one_node=False)) as comm:
                operations: list[tuple[str, Operation, Measure]] = [
                    (engine, partial(comm.allreduce_, op="mean"), between_steps)
                ]
                if engine == "mpi":
                    operations += [
                        ("mpi-broadcast", comm.broadcast_, _up_to_the_last),
                        ("mpi-reduce", comm.reduce_, _up_to_the_last),
                    ]
                for name, operation, measure in operations:
                    points = list(_curve(group, operation, sizes, seconds / len(operations), measure))
                    found.append(entry(name, points, ranks=group.size, nodes=nodes, source=source))
        world.Barrier()
    return EngineCosts(entries=found)


def _places(world: MPI.Comm) -> Iterator[tuple[MPI.Comm, int]]:
    """Yield the groups to measure, null on ranks outside, and their nodes; each rank of a single node counts as one."""
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    if local.size == world.size:
        yield world, world.size
        return
    leads = local.rank == 0
    leaders = world.Split(0 if leads else MPI.UNDEFINED, world.rank)
    nodes = world.bcast(leaders.size if leads else None)
    for count in sorted({2, round((2 * nodes) ** 0.5), nodes}):
        takes_part = leads and leaders.rank < count
        yield world.Split(0 if takes_part else MPI.UNDEFINED, world.rank), count
    if world.size > nodes:
        yield world, nodes


def _curve(
    group: MPI.Comm, operation: Operation, sizes: Sequence[int], seconds: float, measure: Measure
) -> Iterator[tuple[int, float]]:
    """Yield (bytes, seconds) of `operation` for all `sizes` up to a MiB, and for larger ones as the time allows."""
    end = time.perf_counter() + seconds
    for nbytes in sizes:
        buffer = torch.zeros(max(1, nbytes // 4))
        operation(buffer)
        group.Barrier()
        began = time.perf_counter()
        operation(buffer)
        one = time.perf_counter() - began + PAUSE_S
        repetitions = group.bcast(int(min(_MOST, max(_FEWEST, seconds / len(sizes) / one))))
        yield nbytes, median(measure(group, partial(operation, buffer), repetitions))
        if group.bcast(nbytes >= _ALWAYS and time.perf_counter() > end):
            return


def _up_to_the_last(group: MPI.Comm, operation: Callable[[], object], repetitions: int) -> list[float]:
    """Time an operation of which some ranks are done earlier, from a barrier to the end of the last rank."""
    times = []
    for _ in range(repetitions):
        group.Barrier()
        began = time.perf_counter()
        operation()
        times.append(group.allreduce(time.perf_counter() - began, MPI.MAX))
    return times
