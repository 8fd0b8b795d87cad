"""Pending non-blocking operations of real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from scalebench.comm.counters import Numbers
from scalebench.comm.wire import unpack
from scalebench.system.clock import Task, WallClock, sleep_until


class Pending(NamedTuple):
    """A pending operation of an engine."""

    wait: Callable[[], object]
    done: Callable[[], object]

    def then(self, finish: Callable[[], object]) -> Pending:
        """Return the operation with `finish` called at the end of its `wait`."""

        def wait() -> None:
            self.wait()
            finish()

        return Pending(wait, self.done)


class InFlight:
    """Request with the engine's request `raw`, whose result in `packed` is divided by `total` into `target`.

    Its entry in the group's `log` is made at the begin `came`, as all members begin operations in the same order,
    but may wait in another. It lasts `slowed` seconds longer than the engine: from its observed end, or from `came` if
    it had ended before the wait.
    """

    def __init__(
        self,
        raw: Pending,
        packed: Tensor,
        target: Tensor,
        total: float | None,
        clock: WallClock,
        came: float,
        log: Numbers,
        slowed: float = 0.0,
    ) -> None:
        self._raw, self._packed, self._target, self._total = raw, packed, target, total
        self._clock, self._log = clock, log
        self._landed = False
        self._slowed, self._came = slowed, came
        self._place = len(log) if clock.running else None  # None: outside the training time
        if clock.running:
            log.extend((came, came, came))

    def wait(self) -> None:
        if self._landed:
            return
        clock = self._clock
        clock.did(Task.OTHER)
        since = clock.mark
        was_done = self._raw.done()
        self._raw.wait()
        if self._slowed:
            sleep_until((self._came if was_done else time.perf_counter()) + self._slowed)
        unpack(self._packed, self._target, self._total)
        self._landed = True
        clock.did(Task.COMM)
        if clock.running and self._place is not None:
            self._log[self._place + 1], self._log[self._place + 2] = since, clock.mark

    def done(self) -> bool:
        return self._landed or (bool(self._raw.done()) and time.perf_counter() >= self._came + self._slowed)


class Gathered:
    """An allgather under way, which keeps the `tensor` that is sent; `every` (K, ...) becomes those of all ranks."""

    def __init__(
        self, request: InFlight, tensor: Tensor, every: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> None:
        self._request, self._tensor, self._every, self._combine = request, tensor, every, combine

    def result(self) -> Tensor:
        self._request.wait()
        return self._combine(list(self._every.unbind()))


class Sending:
    """Request of a message under way, which keeps its tensor; it is logged as sent when it began."""

    def __init__(self, raw: Pending, tensor: Tensor, clock: WallClock) -> None:
        self._raw, self._tensor, self._clock = raw, tensor, clock
        self._left = False

    def wait(self) -> None:
        if self._left:
            return
        self._clock.did(Task.OTHER)
        self._raw.wait()
        self._left = True
        self._clock.did(Task.COMM)

    def done(self) -> bool:
        return self._left or bool(self._raw.done())
