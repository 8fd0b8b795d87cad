"""The interface of engines, each in one file beside this one; nothing heavy is imported before `connect`."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scalebench.comm.base import Capability
from scalebench.comm.launchers import chosen
from scalebench.comm.launchers.mpirun import ADD_MPI
from scalebench.errors import EngineError

if TYPE_CHECKING:
    from scalebench.cluster.engine_costs import EngineCost
    from scalebench.comm.control import ObjectGroup
    from scalebench.comm.native import NativeCommunicator
    from scalebench.study.spec import TaskOptions
    from scalebench.system.clock import WallClock

WITHOUT_GROUPS = frozenset(
    {Capability.BATCHES, Capability.COLLECTIVES, Capability.NONBLOCKING}
)
WITH_GROUPS = WITHOUT_GROUPS | {Capability.SPLIT, Capability.POINT_TO_POINT}
NO_TORCH = "torch is not installed; add it with: pip install torch"


@dataclass(frozen=True)
class Place:
    """The ranks that an engine joins; these are an MPI communicator where it needs an MPI."""

    ranks: ObjectGroup
    clock: WallClock
    one_node: bool  # which is this one
    # what takes long to start stays up for the next run, which has to have the same
    # ranks
    for_good: bool = False
    # hears for which rank this one waits, or None: all
    waits_for: Callable[[int | None], None] = lambda _: None


class Engine(ABC):
    """A transport: joins ranks for a run, and moves tensors between them."""

    name: ClassVar[str]
    provides: ClassVar[frozenset[Capability]]  # what strategies may ask of it
    progress_threads: ClassVar[int] = 0  # of each rank, that move bytes beside compute
    # an MPI joins its ranks, so only launchers that start those serve it
    needs_mpi: ClassVar[bool] = False
    on_gpus: ClassVar[bool] = False  # a worker takes a GPU of its own
    has_ranks: ClassVar[bool] = True  # started together by a launcher, for whole runs
    # computes graphs of tasks, by the backend that the key `tasks` of a study states
    runs_tasks: ClassVar[bool] = False
    cannot_carry: ClassVar[frozenset[str]] = frozenset()  # dtypes
    # by calibration/probes/probe_NAME.py, for the cost of virtual runs
    is_measured: ClassVar[bool] = False
    # the compute time of its runs has no hook of it, and is that of virtual runs
    computes_apart: ClassVar[bool] = False
    # engine that moves its bytes, and has its costs between nodes
    moves_by: ClassVar[str] = ""
    added_by: ClassVar[str] = ""  # command that builds it beside pip's packages
    # starts ranks of which one may die without the run; empty: there is none
    elastic_launcher: ClassVar[str] = ""
    # names the file of a timeline that it writes itself
    timeline_variable: ClassVar[str] = ""

    def lacks(self, *, here: bool = True) -> str | None:
        """Return None if it can be launched, else the reason and the command that adds it; imports little.

        `here` is this machine, with its GPUs and its job; otherwise a job still to be
        submitted with this installation.
        """
        by_mpi = self.starts_by_mpi()
        if reason := chosen().lacks(by_mpi=by_mpi, here=here):
            return reason
        if by_mpi and find_spec("mpi4py") is None:
            return f"mpi4py is not installed; add it with: {ADD_MPI}"
        return None if folder_of("torch") is not None else NO_TORCH

    def lacks_with(
        self, options: TaskOptions, workers: int, slots: Sequence[int]
    ) -> str | None:
        """Return None if its runs of so many workers, on nodes of these `slots`, go with `options`, else why not."""
        return None

    def typical_cost(self, options: TaskOptions) -> EngineCost | None:
        """Return its cost elsewhere, which charges what was not measured; None: the links do that alone."""
        return None

    def starts_by_mpi(self) -> bool:
        """Return True if its ranks are started as an MPI's; some launchers start others without."""
        return self.needs_mpi or not chosen().without_mpi

    def busy_threads(self, workers: int, threads_per_worker: int = 1) -> int:
        """Number of cores that one of `workers` keeps busy: compute and progress threads.

        A lone worker moves no bytes. Workers on GPUs take no core: more workers than
        GPUs are refused, not oversubscribed.
        """
        if self.on_gpus:
            return 0
        return threads_per_worker + (self.progress_threads if workers > 1 else 0)

    def connect(self, place: Place) -> AbstractContextManager[NativeCommunicator]:
        """Join the ranks of `place` for one run.

        Threads in the background slow everything else on the machine: they are started
        here, and ended on leaving.

        Raises:
            EngineError: an address of rank 0's host cannot be reached from here, or the engine has no ranks.
        """
        raise EngineError(f"engine {self.name} joins no ranks")


def folder_of(package: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None without it."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
