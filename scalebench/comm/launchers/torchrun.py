"""torchrun, of PyTorch: starts ranks on this host, joined by no MPI."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from scalebench.comm.launchers import mpirun
from scalebench.comm.launchers.base import Launcher, Placement, ReportedEnd
from scalebench.errors import EngineError

_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_OF_THE_AGENT = (
    "MASTER_ADDR",
    "MASTER_PORT",
)  # where its agent listens: ranks meet elsewhere


class Torchrun(Launcher):
    """Starts ranks by torch's elastic agent, which starts all again when one of an elastic launch has died."""

    name = "torchrun"
    binds = False

    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None for ranks that no MPI joins, where torch is installed."""
        if by_mpi:
            return mpirun.lacks_mpi(self.name)
        return (
            None
            if find_spec("torch")
            else "torchrun comes with torch, which is not installed: pip install torch"
        )

    def command(self, placement: Placement) -> list[str]:
        """Return torchrun of this interpreter, for one node; it binds ranks to no cores."""
        if placement.by_mpi:
            raise EngineError(mpirun.lacks_mpi(self.name))
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={placement.ranks}",
            f"--max-restarts={placement.restarts or 0}",
            "--no-python",
        ]

    def rank(self) -> int:
        """Return the rank; forget where the agent listens, as no rank can listen there too."""
        for name in _OF_THE_AGENT:
            os.environ.pop(name, None)
        return super().rank()

    def serves(self) -> str:
        return "gloo and nccl, on this host"

    def reported_ends(self, output: str) -> Iterator[ReportedEnd]:
        """Yield the ranks in lines of the agent that name one: `failed (exitcode: -9) local_rank: 1`."""
        for failed in _FAILED.finditer(output):
            code = int(failed[1])
            # torch tells a signal as a negative exit code.
            yield ReportedEnd(int(failed[2]), -code if code < 0 else None)


LAUNCHER = Torchrun()
