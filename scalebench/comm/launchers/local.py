"""Processes of this host: `python -m scalebench.comm.launchers.local RANKS WIDTH PROGRAM...`, which needs no MPI."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from scalebench.comm.launchers import mpirun
from scalebench.comm.launchers.base import Launcher, Placement, ReportedEnd
from scalebench.errors import EngineError
from scalebench.system.hardware import cores_with_threads

_ENDED = re.compile(
    r"^scalebench: rank (\d+) (?:was ended by signal (\d+)|exited with code \d+)$",
    re.MULTILINE,
)


class Local(Launcher):
    """Starts ranks on this host as processes of a parent that names the first to fail, and ends the others."""

    name = "local"

    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None for ranks that no MPI joins."""
        return mpirun.lacks_mpi(self.name) if by_mpi else None

    def command(self, placement: Placement) -> list[str]:
        """Return the command of this file."""
        if placement.by_mpi:
            raise EngineError(mpirun.lacks_mpi(self.name))
        return [
            sys.executable,
            "-m",
            __name__,
            str(placement.ranks),
            str(placement.width),
        ]

    def serves(self) -> str:
        return "gloo and nccl, on this host"

    def reported_ends(self, output: str) -> Iterator[ReportedEnd]:
        """Yield the rank in the line that `start` prints."""
        if ended := _ENDED.search(output):
            yield ReportedEnd(int(ended[1]), int(ended[2]) if ended[2] else None)


LAUNCHER = Local()


def start(ranks: int, width: int, program: Sequence[str]) -> int:
    """Start `program` as so many ranks, bound to `width` cores each unless 0; return 0 once all have ended well.

    The first rank that fails is named on standard error; the others are asked to end,
    and its code is returned.
    """
    cores = cores_with_threads()
    running: dict[int, int] = {}  # rank by process
    for rank in range(ranks):
        # None for ranks beyond the cores, and where width is 0: they stay unbound.
        own = cores[rank * width : (rank + 1) * width]
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
        }
        process = subprocess.Popen(program, env=os.environ | variables)
        running[process.pid] = rank
        if own:
            os.sched_setaffinity(process.pid, frozenset().union(*own))
    while running:
        # Whichever has ended: a rank that fails is noticed while the others wait for it.
        pid, status = os.wait()
        rank = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            continue
        how = f"exited with code {code}" if code > 0 else f"was ended by signal {-code}"
        print(f"scalebench: rank {rank} {how}", file=sys.stderr, flush=True)
        for other in running:
            os.kill(other, signal.SIGTERM)
        return abs(code)
    return 0


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
