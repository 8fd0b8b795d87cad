"""A process of this node that computes tasks, one after the other, as they come through a pipe.

One thread submits tasks and waits for their answers. A `concurrent.futures` pool hands
a task to the thread that manages the pool, to the one that writes into its queue, and
back over the first, and each waits to be woken.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from scalebench.errors import EngineError, in_one_line
from scalebench.system.parent_watch import (
    exit_with_parent,
    preloaded_forkserver,
    signals_blocked,
)

# the ticket of a task and its result, or the exception that it raised
Ended = tuple[Hashable, Any]


class DeadWorkerError(EngineError):
    """The process that computed a task has ended before the task."""


class TaskProcess:
    """One process; it ends with this one."""

    def __init__(self) -> None:
        context = preloaded_forkserver()
        # can be read once a task, or the process, has ended
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_compute, args=(theirs,), daemon=True)
        with signals_blocked():
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
    exit_with_parent()
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
