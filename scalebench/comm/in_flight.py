"""A non-blocking allreduce of real processes: the wait that compute did not hide is booked where it happens."""

from __future__ import annotations

from torch import Tensor

from scalebench.clock import Task, WallClock
from scalebench.comm.base import Request
from scalebench.comm.journal import Numbers
from scalebench.comm.wire import unpack


class InFlight:
    """`raw` is the engine's request; what it brings in `packed` goes into `target`, divided by `total`.

    Its entry in the group's `meetings` is made at once, for all members begin in the same order, whatever the order in
    which they wait; `came` is when it was begun.
    """

    def __init__(
        self,
        raw: Request,
        packed: Tensor,
        target: Tensor,
        total: float | None,
        clock: WallClock,
        came: float,
        meetings: Numbers,
    ) -> None:
        self._raw, self._packed, self._target, self._total = raw, packed, target, total
        self._clock, self._meetings = clock, meetings
        self._landed = False
        self._place = len(meetings) if clock.running else None  # None: outside the training time
        if clock.running:
            meetings.extend((came, came, came))

    def wait(self) -> None:
        if self._landed:
            return
        clock = self._clock
        clock.did(Task.OTHER)
        since = clock.mark
        self._raw.wait()
        unpack(self._packed, self._target, self._total)
        self._landed = True
        clock.did(Task.COMM)
        if clock.running and self._place is not None:
            self._meetings[self._place + 1], self._meetings[self._place + 2] = since, clock.mark

    def done(self) -> bool:
        return self._landed or self._raw.done()
