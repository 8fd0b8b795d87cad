"""Clocks of workers, which attribute every second of training to one task.

Training is a sequence of laps: `did(task)` adds the time since the last lap to `task`,
so that compute + comm + data + other = train holds by construction. The wall clock
measures laps, the paced clock stretches them to a stated device, the virtual clock
looks them up.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, Self, TypeVar

_T = TypeVar("_T")
# Of a stated step: a backward pass has two matrix products for each one of the forward
# pass; the update is neglected.
FORWARD_SHARE, BACKWARD_SHARE = 1 / 3, 2 / 3
_COARSE_S = 2e-4  # before the end of a sleep, to be spent polling


class Task(IntEnum):
    """Activity of a lap."""

    DATA = 0  # fetching a batch
    SHUFFLE = 1  # laying out an epoch's samples
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4
    COMM = 5
    OTHER = 6


@dataclass
class Ledger:
    """Seconds per task; `wait` is the part of `COMM` spent waiting for others, `bubble` that for other stages."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Task))
    wait: float = 0.0
    bubble: float = 0.0

    @property
    def data_s(self) -> float:
        return self.seconds[Task.DATA] + self.seconds[Task.SHUFFLE]

    @property
    def compute_s(self) -> float:
        return (
            self.seconds[Task.FORWARD]
            + self.seconds[Task.BACKWARD]
            + self.seconds[Task.UPDATE]
        )

    @property
    def comm_s(self) -> float:
        return self.seconds[Task.COMM]

    @property
    def other_s(self) -> float:
        return self.seconds[Task.OTHER]

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    def copy(self) -> Ledger:
        return Ledger(list(self.seconds), self.wait, self.bubble)


class Clock(Protocol):
    """Training time of one worker. No time is recorded before `start` and while paused."""

    ledger: Ledger

    def start(self) -> None:
        """Begin training and the first lap."""

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        """Add the time since the last lap to `task`, which processed `samples` samples.

        `share` is the share of the model's work in this task that the lap did.
        """

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        """Call `operation`, arithmetic of a strategy; its time is measured in the current lap or looked up."""

    def elapsed(self) -> float:
        """Return training seconds since `start`, without pauses."""

    def paused(self) -> AbstractContextManager[None]:
        """Pause the clock inside the context."""

    @property
    def running(self) -> bool:
        """True while time is recorded."""


def sleep_until(moment: float) -> None:
    """Sleep until `moment` of `time.perf_counter`, then poll, accurate to some microseconds."""
    left = moment - time.perf_counter()
    if left > _COARSE_S:
        time.sleep(left - _COARSE_S)
    while time.perf_counter() < moment:
        os.sched_yield()


class WallClock:
    """Measured time. `synchronise` is called before each reading, to wait for a device that works from a queue.

    `mark` is the end of the last lap, in seconds of `time.perf_counter`.
    """

    def __init__(self, synchronise: Callable[[], None] | None = None) -> None:
        self.ledger = Ledger()
        self.running = False
        self.mark = 0.0
        self._synchronise = synchronise

    def start(self) -> None:
        self.ledger = Ledger()
        self.running = True
        self.mark = self._read()

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        if self.running:  # hot path, once per phase of every step
            if self._synchronise is not None:
                self._synchronise()
            now = time.perf_counter()
            self.ledger.seconds[task] += now - self.mark
            self.mark = now

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        return operation(*arguments)

    def elapsed(self) -> float:
        return self.ledger.total_s + (self._read() - self.mark if self.running else 0.0)

    def moments(self, marks: Iterable[float]) -> array[float]:
        """Return the seconds of `time.perf_counter` at earlier values of `mark`, once training is over."""
        return array("d", marks)

    @contextmanager
    def paused(self) -> Iterator[None]:
        # Pauses may lie inside one another.
        was_running = self.running
        if was_running:
            self.did(Task.OTHER)
        self.running = False
        try:
            yield
        finally:
            self.running = was_running
            self.mark = self._read()

    def _read(self) -> float:
        if self._synchronise is not None:
            self._synchronise()
        return time.perf_counter()


class DeviceEvent(Protocol):
    """A place in the queue of a device, as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until the device has come here."""

    def elapsed_time(self, end_event: Self) -> float:
        """Return the milliseconds from here to a later event at which the device has been."""


class DeviceClock(WallClock):
    """Measured time of a device with a queue, such as a GPU: a lap ends when the device comes to its end.

    Within a step nothing waits for the device: `did` leaves an event in the queue, and
    who asks for a time waits for the last one. To wait in every lap would keep the
    queue empty, and two stages of a pipeline could wait for each other for ever, as a
    message is under way until the other side receives it.

    `mark` numbers the ends of laps, whose `moments` are known later.
    """

    def __init__(
        self, beat: Callable[[], None], event: Callable[[], DeviceEvent]
    ) -> None:
        """`event` puts an event into the queue; `beat` is called with each."""
        self._beat, self._event = beat, event
        self._moments: array[float] = array("d")
        self._queued: list[tuple[Task, DeviceEvent]] = []  # after the last moment
        super().__init__()

    @property
    def ledger(self) -> Ledger:
        """Seconds of all laps so far."""
        self._settle()
        return self._ledger

    @ledger.setter
    def ledger(self, value: Ledger) -> None:
        self._ledger = value

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        if self.running:
            self._beat()
            self._queued.append((task, self._event()))
            self.mark += 1

    def elapsed(self) -> float:
        total = self.ledger.total_s
        if not self.running:
            return total
        here = self._reached()
        return total + self._last.elapsed_time(here) / 1e3

    def moments(self, marks: Iterable[float]) -> array[float]:
        return array("d", (self._moments[int(mark)] for mark in marks))

    def _read(self) -> float:
        """Begin a lap with a moment of the host's clock, to which the device's times are added."""
        self._settle()
        self._last = self._reached()
        self._moments.append(time.perf_counter())
        return len(self._moments) - 1

    def _reached(self) -> DeviceEvent:
        """Return a new event, at which the device has come."""
        self._beat()
        event = self._event()
        event.synchronize()
        return event

    def _settle(self) -> None:
        """Wait for the end of the last lap, and add the laps up to there to the ledger."""
        if self._queued:
            self._queued[-1][1].synchronize()
        for task, event in self._queued:
            seconds = self._last.elapsed_time(event) / 1e3
            self._ledger.seconds[task] += seconds
            self._moments.append(self._moments[-1] + seconds)
            self._last = event
        self._queued.clear()
