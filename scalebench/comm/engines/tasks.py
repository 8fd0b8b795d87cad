"""Tasks: blocks of steps on processes, dask.distributed or Ray, without ranks; scalebench.tasks runs them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from scalebench.cluster.engine_costs import EngineCost
from scalebench.comm.base import Capability
from scalebench.comm.engines.base import NO_TORCH, Engine, folder_of
from scalebench.study.choices import Backend
from scalebench.study.spec import TaskOptions

# Seconds of a task behind another one at 2 workers, as measured (docs/tasks.md,
# prices); by backend.
_DEPENDENT_S: dict[Backend, float] = {"processes": 1.6e-3, "dask": 35e-3, "ray": 3.2e-3}
_PACKAGES = {
    "dask": ("distributed", "scalebench[tasks]"),
    "ray": ("ray", "scalebench[ray]"),
}  # what adds each


class Tasks(Engine):
    """A graph of tasks, each of which trains a worker for whole epochs."""

    name = "tasks"
    provides = frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE})
    has_ranks = False
    runs_tasks = True

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None where torch is installed: no launcher is needed."""
        return None if folder_of("torch") is not None else NO_TORCH

    def lacks_with(
        self, options: TaskOptions, workers: int, slots: Sequence[int]
    ) -> str | None:
        """Return None if the backend is installed, and has processes for all workers: its own stay on one node."""
        if reason := backend_lacks(options.backend):
            return f"tasks.backend: {reason}; or use backend: processes"
        if options.scheduler is not None or len(slots) == 1 or workers <= slots[0]:
            return None
        return (
            f"tasks of backend {options.backend} stay on one node of {slots[0]} slots, and the largest run "
            f"takes {workers}; use --workers 1..{slots[0]}, or backend: dask with the address of a scheduler whose "
            "workers are on all nodes"
        )

    def typical_cost(self, options: TaskOptions) -> EngineCost:
        """Return what a task behind another one takes on the backend, for each round, beside the links."""
        seconds = _DEPENDENT_S[options.backend]
        source = f"typical of {options.backend}: {1e3 * seconds:g} ms for a task behind another, measured at 2 workers"
        return EngineCost(
            engine=self.name, ranks=2, alpha_s=seconds, stated=True, source=source
        )


def backend_lacks(backend: str) -> str | None:
    """Return None if `backend`, which computes tasks, is installed, else the command that adds it."""
    package, install = _PACKAGES.get(backend, ("", ""))
    if not package or find_spec(package) is not None:
        return None
    return f'{package} is not installed; add it with: pip install "{install}"'


ENGINE = Tasks()
