"""Costs of the engines, from synthetic buffers only: `mpirun -n P python -m scalebench...engine_probe SPEC`.

No run of a study is timed here, so a virtual run is never fitted to the real one it is
compared with. All ranks take part in every operation, in rounds: the reference step of
rank 0 while the others sleep, then one window of each operation. A cost is the median
of its undisturbed windows, or without enough of them the lower decile of all
operations.

Between nodes, collectives are measured with one rank on each of two nodes, of all nodes
and of their geometric mean, which shows the growth with their number, and with all
ranks where nodes hold several. When the time is over, sizes above a MiB are left out.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from statistics import median

import torch
from mpi4py import MPI

from scalebench.calibration.probes import probe_rounds
from scalebench.calibration.probes.allreduce_probe import PAUSE_S, between_steps
from scalebench.cluster import engine_costs
from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.system.clock import WallClock
from scalebench.system.parent_watch import end_with_launcher

# share of the windows, below which an engine's costs are marked as disturbed
_UNDISTURBED = 0.1
_FEWEST, _MOST = 3, 200  # repetitions of an operation
_ALWAYS = 1 << 20  # bytes: up to here all sizes are measured, however long it takes
_Operation = Callable[[torch.Tensor], object]
# seconds of so many repetitions
_Measure = Callable[[MPI.Comm, Callable[[], object], int], list[float]]


def main(text: str) -> None:
    """Measure the engines that the JSON `text` names, at its rank counts or between nodes, and print the costs."""
    end_with_launcher()
    # What torch has made stays: no search for unused objects in a window, or at the
    # end, has to look through it.
    gc.freeze()
    spec = json.loads(text)
    torch.set_num_threads(1)
    costs = (_measure_at if "ranks" in spec else _measure_between_nodes)(
        MPI.COMM_WORLD, **spec
    )
    if MPI.COMM_WORLD.rank == 0:
        print(f"{engine_costs.MARK}{costs.model_dump_json()}", flush=True)


def _measure_one(
    engine: str, rounds: probe_rounds.ProbeRounds, source: str
) -> engine_costs.EngineCosts:
    """Measure the entries of one engine, the same on all ranks; `source` names machine and versions."""
    probe = import_module(f"scalebench.calibration.probes.probe_{engine}")
    found, entries = probe.measure(named(engine), rounds, source)
    if found.share_undisturbed() < _UNDISTURBED:
        entries = [entry.model_copy(update={"disturbed": True}) for entry in entries]
    return engine_costs.EngineCosts(entries=entries, reference_s=found.reference_s)


def _measure_at(
    world: MPI.Comm,
    names: Sequence[str],
    ranks: Sequence[int],
    seconds: float,
    source: str,
) -> engine_costs.EngineCosts:
    """Measure the engines `names` among so many ranks; more ranks never cost less."""
    found: list[engine_costs.EngineCosts] = []
    before: dict[str, engine_costs.EngineCosts] = {}  # among fewer ranks
    for count in ranks:
        group = world.Split(0 if world.rank < count else MPI.UNDEFINED, world.rank)
        if world.rank < count:
            rounds = probe_rounds.ProbeRounds(group, seconds / len(ranks) / len(names))
            for engine in names:
                measured = _measure_one(engine, rounds, source)
                fewer = before.get(engine)  # known to the ranks that were there
                # More ranks that cost less are noise: measured once more, then raised
                # to the fewer.
                if group.bcast(
                    fewer is not None and engine_costs.falls_below(measured, fewer)
                ):
                    measured = _measure_one(engine, rounds, source)
                before[engine] = (
                    measured
                    if fewer is None
                    else engine_costs.at_least(measured, fewer)
                )
                found.append(before[engine])
        probe_rounds.sleep_until_all_arrive(world)
    return engine_costs.joined(found)


def _measure_between_nodes(
    world: MPI.Comm,
    names: Sequence[str],
    sizes: Sequence[int],
    seconds: float,
    source: str,
) -> engine_costs.EngineCosts:
    """Measure the allreduce of the engines `names`, and MPI's reduce and broadcast; rank 0 takes part everywhere."""
    found: list[engine_costs.EngineCost] = []
    for group, nodes in _places(world):
        for engine in names if group != MPI.COMM_NULL else ():
            with named(engine).connect(
                Place(group, WallClock(), one_node=False)
            ) as comm:
                operations: list[tuple[str, _Operation, _Measure]] = [
                    (engine, partial(comm.allreduce_, op="mean"), between_steps)
                ]
                if engine == "mpi":
                    operations += [
                        ("mpi-broadcast", comm.broadcast_, _up_to_the_last),
                        ("mpi-reduce", comm.reduce_, _up_to_the_last),
                    ]
                for name, operation, measure in operations:
                    points = list(
                        _curve(
                            group, operation, sizes, seconds / len(operations), measure
                        )
                    )
                    found.append(
                        probe_rounds.entry(
                            name, points, ranks=group.size, nodes=nodes, source=source
                        )
                    )
        world.Barrier()
    return engine_costs.EngineCosts(entries=found)


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
    group: MPI.Comm,
    operation: _Operation,
    sizes: Sequence[int],
    seconds: float,
    measure: _Measure,
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
        repetitions = group.bcast(
            int(min(_MOST, max(_FEWEST, seconds / len(sizes) / one)))
        )
        yield nbytes, median(measure(group, partial(operation, buffer), repetitions))
        if group.bcast(nbytes >= _ALWAYS and time.perf_counter() > end):
            return


def _up_to_the_last(
    group: MPI.Comm, operation: Callable[[], object], repetitions: int
) -> list[float]:
    """Time an operation of which some ranks are done earlier, from a barrier to the end of the last rank."""
    times = []
    for _ in range(repetitions):
        group.Barrier()
        began = time.perf_counter()
        operation()
        times.append(group.allreduce(time.perf_counter() - began, MPI.MAX))
    return times


if __name__ == "__main__":
    main(sys.argv[1])
