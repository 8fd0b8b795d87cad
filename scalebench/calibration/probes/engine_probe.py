"""Costs of the engines, from synthetic buffers only: `mpirun -n P python -m scalebench...engine_probe SPEC`.

No run of a study is timed here, so a virtual run is never fitted to the real one it is compared with. All ranks take
part in every operation, in rounds: the reference step of rank 0 while the others sleep, then one window of each
operation. A cost is the median of its undisturbed windows, or without enough of them the lower decile of all
operations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module

import torch
from mpi4py import MPI

from scalebench.calibration.probes.node_probe import measure_between_nodes
from scalebench.calibration.probes.probe_rounds import ProbeRounds, sleep_until_all_arrive
from scalebench.cluster.engine_costs import MARK, EngineCosts, at_least, falls_below, joined
from scalebench.system.parent_watch import end_with_launcher

_UNDISTURBED = 0.1  # share of the windows, below which an engine's costs are marked as disturbed


def measure(engine: str, rounds: ProbeRounds, source: str) -> EngineCosts:
    """Measure the entries of one engine, the same on all ranks; `source` names machine and versions."""
    probe = import_module(f"scalebench.calibration.probes.probe_{engine}")
    found, entries = probe.measure(rounds, source)
    if found.share_undisturbed() < _UNDISTURBED:
        entries = [entry.model_copy(update={"disturbed": True}) for entry in entries]
    return EngineCosts(entries=entries, reference_s=found.reference_s)


def _measure_at(
    world: MPI.Comm, names: Sequence[str], ranks: Sequence[int], seconds: float, source: str
) -> EngineCosts:
    """Measure the engines `names` among so many ranks; more ranks never cost less."""
    found: list[EngineCosts] = []
    before: dict[str, EngineCosts] = {}  # among fewer ranks
    for count in ranks:
        group = world.Split(0 if world.rank < count else MPI.UNDEFINED, world.rank)
        if world.rank < count:
            rounds = ProbeRounds(group, seconds / len(ranks) / len(names))
            for engine in names:
                measured = measure(engine, rounds, source)
                fewer = before.get(engine)  # known to the ranks that were there
                if group.bcast(fewer is not None and falls_below(measured, fewer)):
                    measured = measure(engine, rounds, source)
                before[engine] = measured if fewer is None else at_least(measured, fewer)
                found.append(before[engine])
        sleep_until_all_arrive(world)
    return joined(found)


def main(text: str) -> None:
    """Measure the engines that the JSON `text` names, at its rank counts or between nodes, and print the costs."""
    end_with_launcher()
    spec = json.loads(text)
    torch.set_num_threads(1)
    costs = (_measure_at if "ranks" in spec else measure_between_nodes)(MPI.COMM_WORLD, **spec)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{MARK}{costs.model_dump_json()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
