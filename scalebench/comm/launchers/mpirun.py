"""mpirun, of Open MPI: starts ranks on all hosts of an allocation, joined by the MPI."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from scalebench.comm.launchers.base import HostFacts, Launcher, Placement, ReportedEnd
from scalebench.comm.mpi_match import ADD_MPI, mismatch
from scalebench.errors import EngineError

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
    own = Path(sys.executable).parent / "mpirun"
    if os.access(own, os.X_OK):
        return own
    found = shutil.which("mpirun")
    return Path(found) if found else None


def missing() -> str:
    """The reason why there is no mpirun, and the command that adds one."""
    return f"no mpirun beside {sys.executable} or on PATH; add it with: {ADD_MPI}"


def mapping(placement: Placement) -> list[str]:
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


def reported_ends(output: str) -> Iterator[ReportedEnd]:
    """Yield the ranks that mpirun names in its output: first one that a signal ended, then one that exited."""
    flat = " ".join(output.split())
    if signalled := _SIGNALLED.search(flat):
        yield ReportedEnd(int(signalled[1]), int(signalled[2]))
    for pattern in (_IMPROPER, _EXITED):
        if exited := pattern.search(flat):
            yield ReportedEnd(int(exited[1]))


class Mpirun(Launcher):
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

    def command(self, placement: Placement) -> list[str]:
        """Return mpirun with the places of the ranks; other hosts get variables by name."""
        path = find()
        if path is None:
            raise EngineError(missing())
        command = [str(path), "-n", str(placement.ranks)]
        for name in placement.passed:
            command += ["-x", name]
        return command + mapping(placement)

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

    def host_facts(self) -> HostFacts:
        """Return PRRTE's number: inside a job of Slurm srun's number is there too."""
        numbers = (
            os.environ.get(name) for name in ("PMIX_RANK", "OMPI_COMM_WORLD_RANK")
        )
        return HostFacts(next(filter(None, numbers), "0"))

    def reported_ends(self, output: str) -> Iterator[ReportedEnd]:
        return reported_ends(output)
