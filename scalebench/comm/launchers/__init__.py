"""Launchers: the programs that start real ranks, one file each beside this one, and the one that this command takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import get_args

from scalebench.comm.launchers import mpirun, srun
from scalebench.comm.launchers.base import Launcher, OwnJob
from scalebench.errors import EngineError, nearest
from scalebench.study.choices import LauncherName

VARIABLE = "SCALEBENCH_LAUNCHER"
AUTO = "auto"
# each is a file here that makes a `LAUNCHER`
NAMES: tuple[str, ...] = tuple(name for name in get_args(LauncherName) if name != AUTO)


def named(name: str) -> Launcher:
    """Return the launcher called `name`.

    Raises:
        EngineError: there is none of this name.
    """
    if name not in NAMES:
        raise EngineError(f"unknown launcher {name!r}; {nearest(name, (AUTO, *NAMES))}")
    return _loaded(name)


@cache
def _loaded(name: str) -> Launcher:
    found: Launcher = import_module(f"{__name__}.{name}").LAUNCHER
    return found


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
    # First: it starts the ranks of every engine, on several hosts too.
    if mpirun.find() is not None:
        return named("mpirun")
    by_slurm = srun.in_job() and shutil.which("srun") is not None
    return named("srun" if by_slurm else "local")


def own_job() -> OwnJob:
    """Return the batch job of this process, by the scheduler that can tell of it."""
    # the only one of which starts and states are read; outside of its jobs it knows of
    # nothing
    return srun.JOB


@contextmanager
def using(name: str) -> Iterator[None]:
    """Let `chosen`, in child processes too, return the launcher that a study names, unless the command names one."""
    before = os.environ.get(VARIABLE)
    # What a command names goes before what its study does.
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
