"""horovodrun, of Horovod: starts ranks on this host, joined by the MPI whose mpirun it calls, or elastic ones by gloo.

`python -m scalebench.comm.launchers.horovodrun COMMAND...` ends that mpirun with
itself.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from scalebench.comm.launchers import base, mpirun
from scalebench.errors import EngineError

ADD_HOROVOD = "scalebench install horovod"
_DIED = re.compile(r"^Process (\d+) exit with status code (\d+)\.$", re.MULTILINE)


def find() -> Path | None:
    """The `horovodrun` that belongs to this interpreter's environment, else the first on PATH."""
    return base.find_program("horovodrun")


class Horovodrun(base.Launcher):
    """Starts ranks of every engine as Horovod's users do, with the binding that scalebench asks for."""

    name = "horovodrun"
    without_mpi = False

    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None if horovodrun is here, and an mpirun that starts the MPI of mpi4py."""
        path = mpirun.find()
        if path is None:
            return mpirun.missing()
        if find() is None:
            return (
                f"no horovodrun beside {sys.executable} or on PATH; add it with: {ADD_HOROVOD}, "
                "or use --launcher mpirun"
            )
        return mpirun.mismatch(path) if by_mpi else None

    def serves(self) -> str:
        return "all engines, on this host"

    def command(self, placement: base.Placement) -> list[str]:
        """Return horovodrun, which hands the binding on to mpirun; elastic ranks are bound to no cores."""
        if placement.restarts is not None:
            horovodrun = [str(find()), *_elastic(placement.ranks, placement.restarts)]
            return [sys.executable, "-m", __name__, *horovodrun]
        if reason := self.lacks(by_mpi=False):
            raise EngineError(reason)
        binding = shlex.join(mpirun.mapping(placement))
        horovodrun = [
            str(find()),
            # Else a Horovod that was built without MPI would join the ranks by gloo.
            "--mpi",
            "-np",
            str(placement.ranks),
            f"--binding-args={binding}",
        ]
        return [sys.executable, "-m", __name__, *horovodrun]

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of mpirun, with that of mpi4py first on PATH, where horovodrun looks for it."""
        path = mpirun.find()
        first = [str(path.parent)] if path is not None else []
        rest = variables.get("PATH", os.defpath)
        found = {**variables, "PATH": os.pathsep.join([*first, rest])}
        return mpirun.LAUNCHER.environment(found)

    def rank(self) -> int:
        """Return the number with which an elastic rank was started; Horovod numbers those that are left anew."""
        return int(os.environ["HOROVOD_RANK"])

    def reported_ends(self, output: str) -> Iterator[base.ReportedEnd]:
        """Yield the ranks that mpirun names, or of elastic ones those in `Process 1 exit with status code 137.`"""
        yield from mpirun.reported_ends(output)
        for died in _DIED.finditer(output):
            code = int(died[2])
            yield base.ReportedEnd(int(died[1]), code - 128 if code > 128 else None)


LAUNCHER = Horovodrun()


def _elastic(ranks: int, restarts: int) -> list[str]:
    """Return the options of an elastic launch of so many ranks, of which `restarts` may die.

    Horovod never goes back to a host on which a rank has died. So that the others on
    this host go on, each rank has a host of its own: 127.0.0.1 with as many zeros more
    as its rank. It would look for an interface that two hosts share.
    """
    hosts = "".join(f"127.0.0.{'0' * rank}1:1\\n" for rank in range(ranks))
    return [
        # Elastic ranks are joined by gloo: an MPI ends all when one dies.
        *("--gloo", "--network-interface", "lo"),
        *(
            "-np",
            str(ranks),
            "--min-np",
            str(max(1, ranks - restarts)),
            "--max-np",
            str(ranks),
        ),
        # how often those that are left may form a smaller Horovod
        *("--reset-limit", str(restarts)),
        *("--host-discovery-script", shlex.join(["printf", hosts])),
    ]


def run(command: Sequence[str]) -> int:
    """Run horovodrun and return its exit code; a request to end reaches the mpirun that it starts.

    horovodrun becomes a shell, which a SIGTERM ends without the mpirun that this shell
    waits for.
    """
    import psutil

    process = subprocess.Popen(command)

    def end(signum: int, frame: object) -> None:
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.terminate()

    signal.signal(signal.SIGTERM, end)
    code = process.wait()
    # As a shell tells a signal: 128 and its number.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
