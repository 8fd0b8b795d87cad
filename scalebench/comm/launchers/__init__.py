"""Launchers: the programs that start real ranks, one file each beside this one, and the one that this command takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import get_args

from scalebench.comm.launchers import mpirun
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

    That is mpirun; without one that of the scheduler in its job, as srun, and elsewhere
    processes of this host alone.

    Raises:
        EngineError: SCALEBENCH_LAUNCHER names another.
    """
    stated = os.environ.get(VARIABLE) or AUTO
    if stated != AUTO:
        try:
            return named(stated)
        except EngineError as error:
            raise EngineError(f"{VARIABLE}: {error}") from None
    return of_all_hosts() or named("local")


def of_all_hosts(*, here: bool = True) -> Launcher | None:
    """Return the launcher for several hosts that is found: `here`, or for a job that is still to be submitted."""
    # First: it starts the ranks of every engine.
    if mpirun.find() is not None:
        return named("mpirun")
    for found in map(named, NAMES):
        if found.job is not None and found.lacks(by_mpi=False, here=here) is None:
            return found
    return None


def jobs() -> list[OwnJob]:
    """Return what the launchers of schedulers can tell of batch jobs."""
    return [job for name in NAMES if (job := named(name).job) is not None]


def own_job() -> OwnJob:
    """Return the batch job of this process, of which nothing is known outside of one."""
    return next((job for job in jobs() if job.start()[0]), OwnJob())


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
