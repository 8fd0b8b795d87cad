"""Costs of the engines on this machine: measured once, in real processes, from synthetic buffers; kept in the cache.

Programs of `probes/` measure them, on ranks of an MPI. How ranks are started, `launch/` knows, which lies above this
room: it hands over commands (`Placing`), and this room says what runs on them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scalebench.cluster.engine_costs import MARK, EngineCosts, joined
from scalebench.comm import engines
from scalebench.comm.launchers import chosen, mpirun
from scalebench.errors import EngineError
from scalebench.formatting import counted
from scalebench.native.postmortem import telling_line
from scalebench.records.machine_facts import TRANSPORTS, cpu_model
from scalebench.system import hardware
from scalebench.system.disturbance import BackgroundLoad
from scalebench.system.file_access import cache_folder
from scalebench.system.parent_watch import end_with_parent

MEASURABLE = tuple(name for name in engines.NAMES if engines.named(name).is_measured)
_JOINS = "mpi"  # engine of the ranks that measure
_MOST_RANKS = 16
_LIMIT_S = 180.0
_PROBE = 15  # version of the probe: another number makes cached files stale
_PLACES = 4  # groups of nodes, at most
_SIZES = (
    4,
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
)  # bytes, between nodes
_PACKAGES = ("torch", *TRANSPORTS)


def measure_engines(
    placing: Placing,
    seconds: float,
    *,
    between_nodes: bool,
    note: Callable[[str], None],
) -> EngineCosts:
    """Measure the costs of all engines on this host, `between_nodes` of an allocation too; each takes `seconds`."""
    here = [name for name in MEASURABLE if engines.available(name) is None]
    if _JOINS not in here:
        if here:
            note(
                "engines are measured by ranks of an MPI, which is not here: the network model alone is charged"
            )
        return EngineCosts()
    try:
        inside = measure_engine_costs(
            cache_folder("engines"), here, placing.on_this_host, seconds=seconds
        )
    except EngineError as error:
        note(f"engines are charged by the network model alone, as {error}")
        return EngineCosts()
    if not between_nodes:
        return inside
    try:
        ranks = placing.on_all_nodes()
        between = (
            None
            if ranks is None
            else measure_between_nodes(here, ranks, seconds=seconds)
        )
    except EngineError as error:
        note(f"between nodes the network model is charged, as {error}")
        return inside
    return inside if between is None else joined([inside, between])


def measure_engine_costs(
    cache_dir: Path,
    wanted: Sequence[str],
    on_this_host: Callable[[int], Ranks],
    *,
    seconds: float = 12.0,
) -> EngineCosts:
    """Measure the costs of `wanted` (of MEASURABLE) at 2 ranks, and at as many as there are cores.

    Costs measured on this machine with these versions are read from `cache_dir`; else
    measuring takes `seconds` at most. Costs disturbed by other programs are not kept in
    `cache_dir`. With mpi come the entries mpi-onesided (lock, fetch, store, unlock),
    mpi-server (a request and its reply), mpi-server-busy (the server's part of it),
    mpi-broadcast, mpi-reduce and the linear ones of both; with gloo come
    gloo-allgather, gloo-reduce-scatter and gloo-send (one message).

    Raises:
        EngineError: an engine is missing, or measuring it failed; the message has the first line of the cause.
    """
    names = [name for name in MEASURABLE if name in wanted]
    for name in names:
        engines.require(name)
    source = _source()
    # Costs are those of machine and versions, not of a study: one measurement serves
    # all.
    path = cache_dir / "engine-costs" / f"{_key(names, source)}.json"
    if path.exists():
        return EngineCosts.load(path)
    background = BackgroundLoad()
    costs = _measure(names, on_this_host, source, seconds)
    costs = costs.model_copy(update={"others_load": background.share()})
    if not costs.disturbed:  # else the next study measures them again
        costs.save(path)
    return costs


def _measure(
    names: list[str], on_this_host: Callable[[int], Ranks], source: str, seconds: float
) -> EngineCosts:
    counts = sorted({2, max(2, min(hardware.physical_cores(), _MOST_RANKS))})
    ranks = on_this_host(max(counts))
    spec = {
        "names": names,
        "ranks": counts,
        "seconds": seconds,
        "source": f"{source}; bound to {ranks.binding}",
    }
    return _measured_by(ranks, spec, f"the engines {', '.join(names)}")


def measure_between_nodes(
    wanted: Sequence[str], ranks: Ranks, *, seconds: float = 12.0
) -> EngineCosts:
    """Measure those of `wanted` that move bytes between nodes, among `ranks`, one on each slot of the allocation.

    The others get the costs of the engine that moves theirs: Horovod those of MPI.
    Nothing is kept: another allocation has other nodes.

    Raises:
        EngineError: measuring failed; the message has the first line of the cause.
    """
    names = [
        name
        for name in MEASURABLE
        if name in wanted and not engines.named(name).moves_by
    ]
    # One engine after the other, in each group of nodes.
    each_s = seconds / max(1, len(names)) / _PLACES
    source = (
        f"{_source()}; {counted(ranks.count, 'rank')} on {counted(ranks.nodes, 'node')}"
    )
    spec = {"names": names, "seconds": each_s, "sizes": list(_SIZES), "source": source}
    costs = _measured_by(ranks, spec, f"{', '.join(names)} between nodes")
    moved = [
        entry.model_copy(update={"engine": name})
        for name in wanted
        for entry in costs.entries
        if entry.engine == engines.named(name).moves_by
    ]
    return costs.model_copy(update={"entries": [*costs.entries, *moved]})


def _measured_by(ranks: Ranks, spec: dict[str, object], what: str) -> EngineCosts:
    return EngineCosts.model_validate_json(
        ranks.printed("engine_probe", spec, what, _LIMIT_S)
    )


def _source() -> str:
    """Method, machine and versions; a change of the costs changes this text."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cores = hardware.cores()
    return f"synthetic buffers, {cpu_model()}, {cores} cores, {platform.python_version()}, {', '.join(versions)}"


def _key(names: list[str], source: str) -> str:
    text = json.dumps([_PROBE, names, source, platform.node(), str(mpirun.find())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Ranks:
    """Ranks that measure: `command` starts `count` of them, up to the program, bound as `binding` says."""

    count: int
    nodes: int
    binding: str
    command: Sequence[str]
    environment: Mapping[str, str]

    def printed(
        self, program: str, spec: Mapping[str, object], what: str, limit_s: float
    ) -> str:
        """Run the module `program` of `probes/` with the argument `spec`; return what its first rank prints.

        Raises:
            EngineError: `what` could not be measured within `limit_s`; the message has the first line of the cause.
        """
        module = f"scalebench.calibration.probes.{program}"
        try:
            done = subprocess.run(
                [*self.command, sys.executable, "-m", module, json.dumps(spec)],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                preexec_fn=end_with_parent,
            )
        except subprocess.TimeoutExpired:
            raise EngineError(
                f"measuring {what} took more than {limit_s:.3g} s"
            ) from None
        lines = [
            line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line
        ]
        if len(lines) > 1:  # each rank took itself for the only one
            launcher = chosen()
            raise EngineError(
                mpirun.apart(
                    len(lines),
                    1,
                    launcher.name,
                    mpirun.library(),
                    without_mpi=launcher.without_mpi,
                )
            )
        if done.returncode != 0 or not lines:
            raise EngineError(
                f"measuring {what} failed: {telling_line(done.stderr)}; see scalebench doctor"
            )
        return lines[-1]


@dataclass(frozen=True)
class Placing:
    """Where ranks that measure can be started: so many on this host; one on each slot of an allocation of several
    nodes, None where there is one node only. `tasks` measures the engine of that name,
    which has no ranks."""

    on_this_host: Callable[[int], Ranks]
    on_all_nodes: Callable[[], Ranks | None]
    tasks: Callable[[], EngineCosts]
