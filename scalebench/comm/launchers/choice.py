"""The launcher of this command: stated, or the one that fits the allocation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from scalebench.comm import slurm
from scalebench.comm.launchers import mpirun
from scalebench.comm.launchers.base import Launcher
from scalebench.comm.launchers.horovodrun import Horovodrun
from scalebench.comm.launchers.local import Local
from scalebench.comm.launchers.mpirun import Mpirun
from scalebench.comm.launchers.srun import Srun
from scalebench.comm.launchers.torchrun import Torchrun
from scalebench.errors import EngineError, nearest

VARIABLE = "SCALEBENCH_LAUNCHER"
AUTO = "auto"
_LAUNCHERS = {
    each.name: each for each in (Local(), Mpirun(), Srun(), Torchrun(), Horovodrun())
}
NAMES = tuple(_LAUNCHERS)


def named(name: str) -> Launcher:
    """Return the launcher called `name`.

    Raises:
        EngineError: there is none of this name.
    """
    if name not in _LAUNCHERS:
        raise EngineError(f"unknown launcher {name!r}; {nearest(name, (AUTO, *NAMES))}")
    return _LAUNCHERS[name]


def chosen() -> Launcher:
    """Return the launcher that SCALEBENCH_LAUNCHER names (`--launcher`), or else the one that fits this allocation.

    That is mpirun; without one srun in a job of Slurm, and elsewhere processes of this
    host alone.

    Raises:
        EngineError: SCALEBENCH_LAUNCHER names another.
    """
    stated = os.environ.get(VARIABLE) or AUTO
    if stated != AUTO:
        try:
            return named(stated)
        except EngineError as error:
            raise EngineError(f"{VARIABLE}: {error}") from None
    if mpirun.find() is not None:
        return named("mpirun")
    by_slurm = slurm.in_job() and shutil.which("srun") is not None
    return named("srun" if by_slurm else "local")


@contextmanager
def using(name: str) -> Iterator[None]:
    """Let `chosen`, in child processes too, return the launcher that a study names, unless the command names one."""
    before = os.environ.get(VARIABLE)
    if name == AUTO or before not in (None, "", AUTO):
        yield
        return
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
