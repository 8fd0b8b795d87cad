"""Where tasks are computed: processes of this node, dask.distributed, Ray. One class and one line of `BACKENDS` each.

The result of a task is an `EngineError` if it failed, a `DeadWorkerError` if its
process died. Backends compute at most one task of a worker at a time.

The processes of this node get their tasks through pipes: one thread submits tasks and
waits for their answers. A `concurrent.futures` pool hands a task to the thread that
manages the pool, to the one that writes into its queue, and back over the first, and
each waits to be woken.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import platform
import socket
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from scalebench.errors import EngineError, in_one_line
from scalebench.formatting import counted
from scalebench.study.spec import TaskOptions
from scalebench.system import parent_watch
from scalebench.tasks.block import TRIM

ANSWER_S = 10.0  # for a scheduler to answer
_START_S = 60.0  # for its workers to start
_TOPIC = "scalebench"  # of events on a dask scheduler
# A client's first bytes, with an empty frame of settings; the bytes before a frame, and
# the kind of one with settings.
_HTTP2_PREFACE, _HTTP2_HEAD, _HTTP2_SETTINGS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    9,
    b"\4",
)
_NUMBERS = itertools.count()  # of clients of this process
# the ticket of a task and its result, or the exception that it raised
Ended = tuple[Hashable, Any]


class DeadWorkerError(EngineError):
    """The process that computed a task has ended before the task."""


class Backend(Protocol):
    """Computes tasks for `workers` workers at the same time."""

    def submit(
        self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Begin to compute a task, preferably where those of equal `place` were computed."""

    def ended(self, timeout_s: float) -> list[Ended]:
        """Return tasks that have ended, waiting for the first so long at most."""

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of `function` in each process; no task is under way."""

    def repeated(self) -> int:
        """Return the number of tasks that the backend itself has begun again since the last call."""

    def close(self) -> None:
        """End what was started for the tasks."""


class Processes:
    """One process of this node for each worker, so that a process that dies takes one task along."""

    def __init__(self, options: TaskOptions, workers: int) -> None:
        self._processes = [TaskProcess() for _ in range(workers)]

    def submit(
        self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        self._alive(place % len(self._processes)).submit(ticket, function, *arguments)

    def _alive(self, place: int) -> TaskProcess:
        """Return the process of a place; another one if it has died."""
        if self._processes[place].is_dead:
            self._processes[place] = TaskProcess()
        return self._processes[place]

    def ended(self, timeout_s: float) -> list[Ended]:
        busy = [process for process in self._processes if process.is_busy]
        ready = wait([process.pipe for process in busy], timeout_s)
        return [
            (ticket, _result(value))
            for process in busy
            if process.pipe in ready
            for ticket, value in process.ended()
        ]

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        processes = [self._alive(place) for place in range(len(self._processes))]
        for process in processes:
            process.submit(None, function, *arguments)
        results = [value for process in processes for _, value in process.ended()]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def repeated(self) -> int:
        return 0

    def close(self) -> None:
        for process in self._processes:
            process.close()


class TaskProcess:
    """A process of this node that computes tasks, one after the other, as they come; it ends with this one."""

    def __init__(self) -> None:
        context = parent_watch.preloaded_forkserver()
        # can be read once a task, or the process, has ended
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_compute, args=(theirs,), daemon=True)
        with parent_watch.signals_blocked():
            self._process.start()
        theirs.close()  # the process has its own: its end is then the end of the pipe
        # the first is computed, the others wait for it
        self._tasks: deque[tuple[Hashable, bytes]] = deque()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        """True if the process has ended."""
        return not self._process.is_alive()

    @property
    def is_busy(self) -> bool:
        """True if a task is under way."""
        return bool(self._tasks)

    def submit(
        self, ticket: Hashable, function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Begin to compute `function(*arguments)`, after what was submitted before."""
        self._tasks.append(
            (ticket, pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL))
        )
        if len(self._tasks) == 1:
            self._send()

    def ended(self) -> list[Ended]:
        """Wait for the task under way and return it; if the process ends before it, all that were submitted."""
        try:
            content = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self._process.join()
            error = DeadWorkerError(
                f"a process ended with exit code {self._process.exitcode}"
            )
            left, self._tasks = self._tasks, deque()
            return [(ticket, error) for ticket, _ in left]
        ticket, _ = self._tasks.popleft()
        if self._tasks:
            self._send()
        return [(ticket, pickle.loads(content))]  # noqa: S301  # of a process that was started here

    def close(self) -> None:
        """End the process, with what it is computing."""
        self._process.terminate()
        self.pipe.close()

    def _send(self) -> None:
        """Send the first task; never while another is computed, whose answer would wait for this one to be read."""
        with suppress(OSError):  # the process has died, as `ended` finds
            self.pipe.send_bytes(self._tasks[0][1])


def _compute(pipe: Connection) -> None:
    """Compute what comes through the pipe, in the process."""
    parent_watch.exit_with_parent()
    while True:
        try:
            content = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(content)  # noqa: S301  # of the process that started this one
            answer = pickle.dumps(function(*arguments), pickle.HIGHEST_PROTOCOL)
        except (
            Exception,
            SystemExit,
        ) as error:  # of any kind, raised by a user's model
            answer = _as_answer(error)
        pipe.send_bytes(answer)


def _as_answer(error: BaseException) -> bytes:
    """Return an answer with `error`, or with its text where it cannot be sent."""
    try:
        answer = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        pickle.loads(answer)  # noqa: S301  # an exception with arguments of its own may not come out again
    except Exception:
        return pickle.dumps(EngineError(in_one_line(error)), pickle.HIGHEST_PROTOCOL)
    return answer


class Dask:
    """`dask.distributed`: the scheduler of `tasks.scheduler`, or a cluster of processes on this node."""

    def __init__(self, options: TaskOptions, workers: int) -> None:
        from distributed import Client, KilledWorker

        self._killed = KilledWorker
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._name = f"scalebench-{platform.node()}-{os.getpid()}-{next(_NUMBERS)}"
        self._repeated = 0
        self._cluster = None if options.scheduler else _local_cluster(workers)
        if options.scheduler:
            _require_answer(options.scheduler)
        self._client = Client(
            options.scheduler or self._cluster, timeout=ANSWER_S, set_as_default=False
        )
        try:
            self._client.wait_for_workers(
                workers, timeout=_START_S if self._cluster is not None else ANSWER_S
            )
        except TimeoutError:
            found = len(self._client.scheduler_info(n_workers=-1)["workers"])
            self.close()
            raise _too_few(
                options, f"{counted(found, 'dask worker')}", found, workers
            ) from None

    def submit(
        self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        name = f"{self._name}-{ticket}"
        future = self._client.submit(
            _announced, name, function, *arguments, pure=False, key=name
        )
        future.add_done_callback(
            lambda future: _pass_on(self._ended, ticket, future, self._killed)
        )

    def ended(self, timeout_s: float) -> list[Ended]:
        return _first(self._ended, timeout_s)

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self._client.run(function, *arguments).values())

    def repeated(self) -> int:
        begun = Counter(
            name
            for _, name in self._client.get_events(_TOPIC)
            if str(name).startswith(self._name)
        )
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
        return
    # dask takes the first bytes of another protocol for the length of a message
    except MemoryError:
        why = " (another program does)"
    except TimeoutError:
        why = ""
    except (OSError, ValueError) as error:
        why = f" ({' '.join(str(error).split())})"
    raise EngineError(
        f"tasks.scheduler {address}: no dask scheduler answers there within {ANSWER_S:.0f} s{why}; start one with "
        "`dask scheduler`, or leave the address out for one of this node"
    )


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
        # a task that lost its worker comes back here, and is counted
        "distributed.scheduler.allowed-failures": 0,
    }
    with dask.config.set(settings):
        return LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
        )


class Ray:
    """Ray: the cluster of `tasks.scheduler`, or one on this node."""

    def __init__(self, options: TaskOptions, workers: int) -> None:
        import ray

        self._ray, self._workers = ray, workers
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        # else a cluster of our own reports to its makers
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {
            "logging_level": "error",
            "log_to_driver": False,
        }  # a dead worker is in its row
        if not options.scheduler:
            # beside any that runs here
            ray.init(
                address="local", num_cpus=workers, include_dashboard=False, **quiet
            )
            return
        _require_ray(options.scheduler)
        try:
            ray.init(address=options.scheduler, **quiet)
        except (
            OSError,
            RuntimeError,
            ray.exceptions.RayError,
        ) as error:  # no token, or another version of Ray
            raise EngineError(
                f"tasks.scheduler {options.scheduler}: Ray does not let this command in ({in_one_line(error)}); a "
                "cluster that asks for a token takes it with RAY_AUTH_MODE=token"
            ) from None
        found = int(ray.cluster_resources().get("CPU", 0))
        if found < workers:
            self.close()
            raise _too_few(options, f"a Ray of {counted(found, 'CPU')}", found, workers)

    def submit(
        self, ticket: int, place: int, function: Callable[..., Any], *arguments: Any
    ) -> None:
        task = self._ray.remote(num_cpus=1, max_retries=0)(function)
        future = task.remote(*arguments).future()
        death = self._ray.exceptions.WorkerCrashedError
        future.add_done_callback(
            lambda future: _pass_on(self._ended, ticket, future, death)
        )

    def ended(self, timeout_s: float) -> list[Ended]:
        return _first(self._ended, timeout_s)

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        task = self._ray.remote(num_cpus=1)(function)
        found: list[Any] = self._ray.get(
            [task.remote(*arguments) for _ in range(self._workers)]
        )
        return found

    def repeated(self) -> int:
        return 0

    def close(self) -> None:
        self._ray.shutdown()


def _require_ray(address: str) -> None:
    """Refuse HOST:PORT, or ray://HOST:PORT, where no Ray answers; Ray alone waits for three minutes.

    Its servers speak gRPC, hence HTTP/2, in which a server's first frame holds its
    settings (RFC 9113, 3.4).

    Raises:
        EngineError: names the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        return  # `auto`, and what only Ray knows how to read
    try:
        with socket.create_connection((host, int(port)), ANSWER_S) as server:
            server.sendall(_HTTP2_PREFACE)
            frame_type = server.recv(_HTTP2_HEAD, socket.MSG_WAITALL)[3:4]
        why = "" if frame_type == _HTTP2_SETTINGS else "another program does"
    except OSError as error:
        why = in_one_line(error)
    if why:
        raise EngineError(
            f"tasks.scheduler {address}: no Ray answers there within {ANSWER_S:.0f} s ({why}); start one with "
            "`ray start --head`, or leave the address out for one of this node"
        )


def _too_few(options: TaskOptions, there: str, found: int, workers: int) -> EngineError:
    """Return the refusal of a cluster that holds `found` workers at the same time, described by `there`."""
    return EngineError(
        f"tasks.scheduler {options.scheduler}: {there} there, and the largest run takes {workers}; start more, or use "
        f"--workers 1..{max(1, found)}"
    )


def _pass_on(
    ended: SimpleQueue[Ended], ticket: int, future: Any, death: type[BaseException]
) -> None:
    """Put an ended task into the queue; called by a thread of its backend."""
    if future.cancelled():
        return
    error = future.exception()
    if isinstance(error, death):
        error = DeadWorkerError(in_one_line(error))
    ended.put((ticket, future.result() if error is None else _result(error)))


def _result(value: Any) -> Any:
    """Return the result of a task, or an EngineError that names the exception that it raised."""
    if isinstance(value, BaseException) and not isinstance(value, DeadWorkerError):
        return EngineError(f"a task failed: {in_one_line(value)}")
    return value


def _first(ended: SimpleQueue[Ended], timeout_s: float) -> list[Ended]:
    """Return the first of the queue, if one comes in time."""
    try:
        return [ended.get(timeout=timeout_s)]
    except Empty:
        return []


BACKENDS: dict[str, Callable[[TaskOptions, int], Backend]] = {
    "processes": Processes,
    "dask": Dask,
    "ray": Ray,
}
