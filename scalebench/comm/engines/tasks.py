"""Tasks: blocks of steps on processes, dask.distributed or Ray, without ranks; scalebench.tasks runs them."""

from __future__ import annotations

from importlib.util import find_spec

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm.base import Capability
from scalebench.comm.engines.base import NO_TORCH, Engine, folder_of
from scalebench.study.choices import Backend

TASKS = "tasks"
# Seconds of a task behind another one at 2 workers, as measured (docs/tasks.md,
# prices); by backend.
_DEPENDENT_S: dict[Backend, float] = {"processes": 1.6e-3, "dask": 35e-3, "ray": 3.2e-3}
_PACKAGES = {
    "dask": ("distributed", "scalebench[tasks]"),
    "ray": ("ray", "scalebench[ray]"),
}  # what adds each


class Tasks(Engine):
    """A graph of tasks, each of which trains a worker for whole epochs."""

    name = TASKS
    provides = frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE})
    has_ranks = False
    runs_tasks = True

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None where torch is installed: no launcher is needed."""
        return None if folder_of("torch") is not None else NO_TORCH


def with_typical_cost(known: EngineCosts, backend: Backend) -> EngineCosts:
    """Return costs in which a round of tasks takes what a task behind another one takes on `backend`, and the links."""
    seconds = _DEPENDENT_S[backend]
    source = f"typical of {backend}: {1e3 * seconds:g} ms for a task behind another, measured at 2 workers"
    typical = EngineCost(
        engine=TASKS, ranks=2, alpha_s=seconds, stated=True, source=source
    )
    others = [entry for entry in known.entries if entry.engine != TASKS]
    return known.model_copy(update={"entries": [*others, typical]})


def backend_lacks(backend: str) -> str | None:
    """Return None if `backend`, which computes tasks, is installed, else the command that adds it."""
    package, install = _PACKAGES.get(backend, ("", ""))
    if not package or find_spec(package) is not None:
        return None
    return f'{package} is not installed; add it with: pip install "{install}"'


ENGINE = Tasks()
