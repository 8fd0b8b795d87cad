"""Check that mpirun starts the MPI that mpi4py was built against: else every process is alone in a world of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from scalebench.system.parent_watch import end_with_parent

ADD_MPI = 'pip install "scalebench[mpi]"'
REBUILD = "pip install --no-binary mpi4py --force-reinstall mpi4py"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_LIMIT_S = 60.0
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_SIZE = "from mpi4py import MPI; print('scalebench-size', MPI.COMM_WORLD.size)"
_RANKS = 2


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
