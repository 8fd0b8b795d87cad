"""Where tasks are computed: processes of this node, dask.distributed, Ray. One class and one line of `BACKENDS` each.

A backend calls `done(ticket, result)` when a task has ended, from any thread, with an `EngineError` for a task whose
process died. It computes at most one task of a worker at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from scalebench.errors import EngineError, in_one_line
from scalebench.formatting import counted
from scalebench.study.spec import TaskOptions
from scalebench.tasks.block import TRIM
from scalebench.tasks.process import ProcessDied, TaskProcess

ANSWER_S = 10.0  # for a scheduler to answer
_START_S = 60.0  # for its workers to start
_TOPIC = "scalebench"  # of events on a dask scheduler
_NUMBERS = itertools.count()  # of clients of this process
Done = Callable[[int, Any], None]


class DeadWorkerError(EngineError):
    """The process that computed a task has ended before the task."""


class Backend(Protocol):
    """Computes tasks for `workers` workers at the same time."""

    def submit(self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin to compute a task, preferably where those of equal `place` were computed."""

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of `function` in each process."""

    def repeated(self) -> int:
        """Return the number of tasks that the backend itself has begun again since the last call."""

    def close(self) -> None:
        """End what was started for the tasks."""


class Processes:
    """One process of this node for each worker, so that a process that dies takes one task along."""

    def __init__(self, options: TaskOptions, workers: int, done: Done) -> None:
        self._done = done
        self._processes = [TaskProcess() for _ in range(workers)]

    def submit(self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any) -> None:
        future = self._alive(place % len(self._processes)).submit(function, *arguments)
        future.add_done_callback(lambda ended: _pass_on(self._done, ticket, ended, ProcessDied))

    def _alive(self, place: int) -> TaskProcess:
        """Return the process of a place; another one if it has died."""
        if self._processes[place].is_dead:
            self._processes[place] = TaskProcess()
        return self._processes[place]

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        places = range(len(self._processes))
        futures = [self._alive(place).submit(function, *arguments) for place in places]
        return [future.result() for future in futures]

    def repeated(self) -> int:
        return 0

    def close(self) -> None:
        for process in self._processes:
            process.close()


class Dask:
    """`dask.distributed`: the scheduler of `tasks.scheduler`, or a cluster of processes on this node."""

    def __init__(self, options: TaskOptions, workers: int, done: Done) -> None:
        from distributed import Client, KilledWorker

        self._done, self._killed = done, KilledWorker
        self._name = f"scalebench-{platform.node()}-{os.getpid()}-{next(_NUMBERS)}"
        self._repeated = 0
        self._cluster = None if options.scheduler else _local_cluster(workers)
        if options.scheduler:
            _require_answer(options.scheduler)
        self._client = Client(options.scheduler or self._cluster, timeout=ANSWER_S, set_as_default=False)
        try:
            self._client.wait_for_workers(workers, timeout=_START_S if self._cluster is not None else ANSWER_S)
        except TimeoutError:
            found = len(self._client.scheduler_info(n_workers=-1)["workers"])
            self.close()
            raise EngineError(
                f"tasks.scheduler {options.scheduler}: {counted(found, 'dask worker')} there, and the largest run "
                f"takes {workers}; start more, or use --workers 1..{max(1, found)}"
            ) from None

    def submit(self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any) -> None:
        name = f"{self._name}-{ticket}"
        future = self._client.submit(_announced, name, function, *arguments, pure=False, key=name)
        future.add_done_callback(lambda ended: _pass_on(self._done, ticket, ended, self._killed))

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self._client.run(function, *arguments).values())

    def repeated(self) -> int:
        begun = Counter(name for _, name in self._client.get_events(_TOPIC) if str(name).startswith(self._name))
        before, self._repeated = self._repeated, begun.total() - len(begun)
        return self._repeated - before

    def close(self) -> None:
        for each in (getattr(self, "_client", None), self._cluster):
            if each is not None:
                each.close()


def _require_answer(address: str) -> None:
    """Refuse an address where no dask scheduler answers; dask's client alone waits on where something listens.

    Raises:
        EngineError: names the address.
    """
    from distributed.comm import connect

    async def ask() -> None:
        comm = await connect(address, timeout=ANSWER_S)
        comm.abort()

    try:
        asyncio.run(asyncio.wait_for(ask(), ANSWER_S))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"tasks.scheduler {address}: no dask scheduler answers there within {ANSWER_S:.0f} s "
            f"({in_one_line(error)}); start one with `dask scheduler`, or leave the address out for one of this node"
        ) from None


def _announced(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` on a dask worker, and let the scheduler know: it repeats the tasks of dead workers by itself."""
    from distributed import get_worker

    get_worker().log_event(_TOPIC, name)
    return function(*arguments)


def _local_cluster(workers: int) -> Any:
    """Start dask's own cluster, without the variable that makes torch give its memory back after every step."""
    import dask
    from distributed import LocalCluster

    before = dask.config.get("distributed.nanny.pre-spawn-environ", {})
    environ = {name: value for name, value in before.items() if name != TRIM}
    settings = {
        "distributed.nanny.pre-spawn-environ": environ,
        "distributed.scheduler.allowed-failures": 0,  # a task that lost its worker comes back here, and is counted
    }
    with dask.config.set(settings):
        return LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0")


class Ray:
    """Ray: the cluster of `tasks.scheduler`, or one on this node."""

    def __init__(self, options: TaskOptions, workers: int, done: Done) -> None:
        import ray

        self._done, self._ray, self._workers = done, ray, workers
        if options.scheduler:
            ray.init(address=options.scheduler, logging_level="error")
        else:
            ray.init(num_cpus=workers, include_dashboard=False, logging_level="error")

    def submit(self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any) -> None:
        task = self._ray.remote(num_cpus=1, max_retries=0)(function)
        future = task.remote(*arguments).future()
        future.add_done_callback(
            lambda ended: _pass_on(self._done, ticket, ended, self._ray.exceptions.WorkerCrashedError)
        )

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        task = self._ray.remote(num_cpus=1)(function)
        found: list[Any] = self._ray.get([task.remote(*arguments) for _ in range(self._workers)])
        return found

    def repeated(self) -> int:
        return 0

    def close(self) -> None:
        self._ray.shutdown()


def _pass_on(done: Done, ticket: int, ended: Any, death: type[BaseException]) -> None:
    """Pass the result of an ended task on, or what it raised."""
    if ended.cancelled():
        return
    error = ended.exception()
    if isinstance(error, death):
        done(ticket, DeadWorkerError(in_one_line(error)))
    elif error is not None:
        done(ticket, EngineError(f"a task failed: {in_one_line(error)}"))
    else:
        done(ticket, ended.result())


BACKENDS: dict[str, Callable[[TaskOptions, int, Done], Backend]] = {"processes": Processes, "dask": Dask, "ray": Ray}
