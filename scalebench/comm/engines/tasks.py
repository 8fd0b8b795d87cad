"""Tasks: blocks of steps on processes, dask.distributed or Ray, without ranks; scalebench.tasks runs them."""

from __future__ import annotations

from importlib.util import find_spec

from scalebench.comm.base import Capability
from scalebench.comm.engines.base import NO_TORCH, Engine, folder_of

TASKS = "tasks"
_PACKAGES = {"dask": ("distributed", "scalebench[tasks]"), "ray": ("ray", "scalebench[ray]")}  # what adds each


class Tasks(Engine):
    """A graph of tasks, each of which trains a worker for whole epochs."""

    name = TASKS
    provides = frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE})
    has_ranks = False

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None where torch is installed: no launcher is needed."""
        return None if folder_of("torch") is not None else NO_TORCH


def backend_lacks(backend: str) -> str | None:
    """Return None if `backend`, which computes tasks, is installed, else the command that adds it."""
    package, install = _PACKAGES.get(backend, ("", ""))
    if not package or find_spec(package) is not None:
        return None
    return f'{package} is not installed; add it with: pip install "{install}"'


ENGINE = Tasks()
