"""Engines: what carries runs, one file each beside this one, under the names that a study can state."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import get_args

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import Engine
from scalebench.errors import EngineError, nearest
from scalebench.study.choices import VIRTUAL, EngineName

# of native engines; each is a file here that makes an `ENGINE`
NAMES: tuple[str, ...] = get_args(EngineName)


def named(name: str) -> Engine:
    """Return the engine called `name`, `virtual` included.

    Raises:
        EngineError: there is none of this name.
    """
    if name not in (VIRTUAL, *NAMES):
        raise EngineError(f"unknown engine {name!r}; {nearest(name, NAMES)}")
    return _loaded(name)


@cache
def _loaded(name: str) -> Engine:
    found: Engine = import_module(f"{__name__}.{name}").ENGINE
    return found


def available(name: str, *, here: bool = True) -> str | None:
    """Return None if engine `name` can be launched, else the reason and the command that adds it; imports little.

    `here` is this machine, with its GPUs and its job; otherwise a job still to be
    submitted with this installation.
    """
    return named(name).lacks(here=here)


def require(name: str) -> None:
    """Check that engine `name` is installed.

    Raises:
        EngineError: it is unknown or missing; the message ends with the command that adds it.
    """
    reason = available(name)
    if reason is not None:
        raise EngineError(f"engine {name} is not available: {reason}")


def providing(capability: Capability) -> tuple[str, ...]:
    """Return the native engines that provide a capability, in the order in which strategies prefer them."""
    return tuple(name for name in NAMES if capability in named(name).provides)


def of_tasks() -> str:
    """Return the name of the engine that computes graphs of tasks."""
    return next(name for name in NAMES if named(name).runs_tasks)


def on_gpus() -> str:
    """Return the name of the engine between GPUs, which a study for them takes unless it states one."""
    return next(name for name in NAMES if named(name).on_gpus)
