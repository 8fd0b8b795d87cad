"""`mpirun -n P python -m scalebench.native.node_probe SPEC`: costs of collectives between nodes.

Measured with one rank on each of two nodes, of all nodes and of their geometric mean, which shows the growth with
their number, and with all ranks where nodes hold several. An operation ends with its last rank; its cost is the median
of its repetitions. When the time is over, sizes above a MiB are left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from mpi4py import MPI

from scalebench.cluster.engine_costs import MARK, EngineCost, EngineCosts
from scalebench.native.connection import connected
from scalebench.native.probe_samples import entry
from scalebench.system.clock import WallClock
from scalebench.system.parent_watch import end_with_launcher

_FEWEST, _MOST = 3, 200  # repetitions of an operation
_ALWAYS = 1 << 20  # bytes: up to here all sizes are measured, however long it takes
Operation = Callable[[torch.Tensor], object]


class Place(NamedTuple):
    """A group of ranks, and the number of nodes that hold it."""

    group: MPI.Comm
    nodes: int


def places(world: MPI.Comm) -> Iterator[Place | None]:
    """Yield the groups to measure, or None on ranks outside; each rank of a single node counts as a node."""
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    if local.size == world.size:
        yield Place(world, world.size)
        return
    leads = local.rank == 0
    leaders = world.Split(0 if leads else MPI.UNDEFINED, world.rank)
    nodes = world.bcast(leaders.size if leads else None)
    for count in sorted({2, round((2 * nodes) ** 0.5), nodes}):
        takes_part = leads and leaders.rank < count
        group = world.Split(0 if takes_part else MPI.UNDEFINED, world.rank)
        yield Place(group, count) if takes_part else None
    if world.size > nodes:
        yield Place(world, nodes)


def entries_of(place: Place, engine: str, sizes: list[int], seconds: float, source: str) -> list[EngineCost]:
    """The costs of one engine's allreduce, and of MPI's reduce and broadcast, among the ranks of `place`."""
    found = []
    with connected(engine, place.group, WallClock(), one_node=False) as comm:
        operations: dict[str, Operation] = {engine: partial(comm.allreduce_, op="mean")}
        if engine == "mpi":
            operations |= {"mpi-broadcast": comm.broadcast_, "mpi-reduce": comm.reduce_}
        for name, operation in operations.items():
            points = list(_curve(place.group, operation, sizes, seconds / len(operations)))
            found.append(entry(name, points, ranks=place.group.size, nodes=place.nodes, source=source))
    return found


def _curve(group: MPI.Comm, operation: Operation, sizes: list[int], seconds: float) -> Iterator[tuple[int, float]]:
    """Yield (bytes, seconds) of `operation` for all `sizes` up to a MiB, and for larger ones as the time allows."""
    end = time.perf_counter() + seconds
    for nbytes in sizes:
        buffer = torch.zeros(max(1, nbytes // 4))
        operation(buffer)
        until = time.perf_counter() + seconds / len(sizes)
        times: list[float] = []
        while group.bcast(len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < until)):
            group.Barrier()
            began = time.perf_counter()
            operation(buffer)
            times.append(group.allreduce(time.perf_counter() - began, MPI.MAX))
        yield nbytes, median(times)
        if group.bcast(nbytes >= _ALWAYS and time.perf_counter() > end):
            return


def main(text: str) -> None:
    """Measure the engines that the JSON `text` names, and print the costs."""
    end_with_launcher()
    spec = json.loads(text)
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    found: list[EngineCost] = []  # rank 0 takes part everywhere
    for place in places(world):
        if place is not None:
            for engine in spec["engines"]:
                found += entries_of(place, engine, spec["sizes"], spec["seconds"], spec["source"])
        world.Barrier()
    if world.rank == 0:
        print(f"{MARK}{EngineCosts(entries=found).model_dump_json()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
