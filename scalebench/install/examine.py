"""Examination of the machine: parts that a scaling study can use, and commands that add missing ones."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from scalebench.comm.engines import available
from scalebench.comm.launchers import chosen, mpirun, named
from scalebench.comm.launchers.horovodrun import ADD_HOROVOD
from scalebench.errors import EngineError
from scalebench.formatting import counted
from scalebench.launch.calibrating import measure_allreduce
from scalebench.launch.hosts import reachable
from scalebench.records import machine_facts
from scalebench.system.hardware import cores, memory_mib, usable_memory_mib

# Open MPI's own choice switched off: its algorithm 4 is the ring.
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}
_SECONDS = 60  # to import Horovod
# of the examination, after which a comparison that was not asked for is left out
_LIMIT_S = 10.0
# seconds for each of the two allreduces, without starting their ranks
_COMPARING_S = 0.5
_COMPARING_LIMIT_S = 120.0  # for both, with starting, if asked for
_MOST_RANKS = 4  # on each node: an allocation may have hundreds of slots there
_SLOWER = 1.25  # slowdown relative to a ring above noise


@dataclass(frozen=True)
class MachinePart:
    """One part of the machine or installation; `add` is the command that adds a missing one, if possible."""

    part: str
    present: bool
    detail: str
    add: str = ""


def examine(*, network: bool = False) -> list[MachinePart]:
    """Return all parts that determine the available executions and engines.

    In an allocation of several nodes, or on this node if `network`, MPI's allreduce is
    compared with a ring. All takes ten seconds at most there, unless `network`.
    """
    over = time.monotonic() + (_COMPARING_LIMIT_S if network else _LIMIT_S)
    looks = (
        _python,
        _cores,
        _memory,
        _gpus,
        _compiler,
        _torch,
        _mpirun,
        _mpi4py,
        _launcher,
        _horovod,
    )
    found = [look() for look in looks]
    found += [
        _of_torch("gloo", None if find_spec("torch") else "needs PyTorch"),
        _of_torch("NCCL", available("nccl")),
    ]
    found.append(_slurm())
    compares = network or _several_nodes()
    return (
        [*found, _allreduce(over)] if compares and available("mpi") is None else found
    )


def _python() -> MachinePart:
    return MachinePart(
        "Python", True, f"{platform.python_version()} at {sys.executable}"
    )


def _cores() -> MachinePart:
    usable, there = cores(), os.cpu_count() or 1
    return MachinePart(
        "cores", True, f"{usable} usable" + (f" of {there}" if there != usable else "")
    )


def _memory() -> MachinePart:
    here, usable = memory_mib(), usable_memory_mib()
    bound = f", limited to {usable / 1024:.1f} GiB" if usable < here else ""
    return MachinePart("memory", True, f"{here / 1024:.1f} GiB{bound}")


def _gpus() -> MachinePart:
    if found := machine_facts.gpus():
        return MachinePart(
            "GPUs", True, "; ".join(f"{gpu['name']}, {gpu['memory']}" for gpu in found)
        )
    return MachinePart("GPUs", False, "no NVIDIA GPU; workers train on CPU cores")


def _compiler() -> MachinePart:
    command = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if command is None:
        return MachinePart(
            "C++ compiler",
            False,
            "none; needed to build Horovod",
            "apt-get install g++",
        )
    output = machine_facts.output_of(command, "--version")
    return MachinePart(
        "C++ compiler",
        bool(output),
        f"{command}: {output.splitlines()[0] if output else 'does not run'}",
    )


def _torch() -> MachinePart:
    if find_spec("torch") is None:
        return MachinePart("PyTorch", False, "not installed", "pip install torch")
    return MachinePart("PyTorch", True, version("torch"))


def _mpirun() -> MachinePart:
    path = mpirun.find()
    if path is None:
        return MachinePart(
            "MPI", False, "no mpirun beside this Python or on PATH", mpirun.ADD_MPI
        )
    output = machine_facts.output_of(str(path), "--version")
    found = re.search(r"\(?(Open MPI|Intel|MPICH|HYDRA)[^\n]*", output)
    name = found[0] if found else "does not run"
    return MachinePart(
        "MPI", bool(output), f"{path}: {name}", "" if output else mpirun.ADD_MPI
    )


def _several_nodes() -> bool:
    try:
        return len(reachable().hosts) > 1
    except EngineError:
        return True  # the error is reported at use


def _allreduce(over: float) -> MachinePart:
    """Compare MPI's allreduce, which Open MPI chooses by a fixed table, with a ring, before the moment `over`."""
    part = "allreduce"
    try:
        nodes = len(reachable().hosts)
        ranks, chosen = _of_one_mib({}, over)
        _, forced = _of_one_mib(RING, over)
    except EngineError as error:
        late = "not compared with a ring in time; `scalebench doctor --network` takes two minutes if need be"
        return MachinePart(part, False, late if time.monotonic() > over else str(error))
    where = f"1 MiB among {counted(ranks, 'rank')} on {counted(nodes, 'node')}"
    detail = f"{where}: {chosen * 1e3:.3g} ms as this MPI chooses, {forced * 1e3:.3g} ms by a ring"
    if chosen <= _SLOWER * forced:
        return MachinePart(part, True, detail)
    forcing = " ".join(f"{name}={value}" for name, value in RING.items())
    return MachinePart(
        part,
        False,
        f"{detail}, {chosen / forced:.1f} times as long; force the ring with: export {forcing}",
    )


def _of_one_mib(settings: Mapping[str, str], over: float) -> tuple[int, float]:
    """Return the ranks of an allreduce of 1 MiB and its seconds, measured before the moment `over`."""
    return measure_allreduce(
        1 << 20,
        settings,
        seconds=_COMPARING_S,
        most_on_node=_MOST_RANKS,
        limit_s=max(0.0, over - time.monotonic()),
    )


def _mpi4py() -> MachinePart:
    try:
        number = version("mpi4py")
    except PackageNotFoundError:
        return MachinePart("mpi4py", False, "not installed", mpirun.ADD_MPI)
    path = mpirun.find()
    # A launcher that starts ranks without MPI does without a match.
    if (
        not chosen().without_mpi
        and path is not None
        and (reason := mpirun.mismatch(path))
    ):
        return MachinePart("mpi4py", False, f"{number}: {reason}", mpirun.REBUILD)
    library = mpirun.library().partition(",")[0]
    return MachinePart(
        "mpi4py",
        True,
        f"{number} with {library}"
        if library
        else f"{number}, which finds no MPI library",
    )


def _launcher() -> MachinePart:
    """Launcher of real ranks, and the engines that it serves."""
    launcher = chosen()
    # Whether it starts an MPI's ranks is the part MPI's to say.
    reason = launcher.lacks(by_mpi=False)
    if reason is not None:
        return MachinePart("launcher", False, f"{launcher.name}: {reason}")
    return MachinePart("launcher", True, f"{launcher.name} {launcher.serves()}")


def _horovod() -> MachinePart:
    reason = available("horovod")
    if reason is None:
        return _loaded_horovod()
    return MachinePart(
        "Horovod", False, reason.partition("; add it with")[0], ADD_HOROVOD
    )


def _loaded_horovod() -> MachinePart:
    """Import Horovod, as a library built for another torch does not load."""
    program = (
        "import horovod, horovod.torch as hvd, torch;"
        "names = ['MPI', 'Gloo', 'NCCL'];"
        "built = [hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built()];"
        "print(horovod.__version__, 'for torch', torch.__version__, 'with',"
        " ', '.join(name for name, there in zip(names, built) if there))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return MachinePart(
            "Horovod", False, "does not answer", f"{ADD_HOROVOD} --force"
        )
    if done.returncode == 0:
        return MachinePart("Horovod", True, done.stdout.strip())
    last = " ".join(done.stderr.strip().splitlines()[-1:])
    return MachinePart(
        "Horovod", False, f"does not load: {last}", f"{ADD_HOROVOD} --force"
    )


def _of_torch(part: str, reason: str | None) -> MachinePart:
    return MachinePart(part, reason is None, reason or "comes with PyTorch")


def _slurm() -> MachinePart:
    output = machine_facts.output_of("sinfo", "--version")
    if output:
        job = os.environ.get("SLURM_JOB_ID")
        lacking = named("srun").lacks(by_mpi=True, here=False)
        pmix = "without PMIx" if lacking else "with PMIx"
        return MachinePart(
            "Slurm", True, f"{output}, srun {pmix}" + (f", in job {job}" if job else "")
        )
    return MachinePart("Slurm", False, "not here; runs start on this machine alone")
