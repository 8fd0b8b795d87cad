"""What time it is, and where it went: every second of a worker's training is booked on one task.

A clock is a chain of laps: `did(task)` adds the time since the last lap to `task`, so that
compute + comm + data + other = train holds by construction. The wall clock measures laps, the paced clock stretches
them to a stated device, the virtual clock looks them up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, TypeVar

_T = TypeVar("_T")
_COARSE_S = 2e-4  # before a moment, at which sleeping stops being precise enough


class Task(IntEnum):
    """What a lap was spent on."""

    DATA = 0  # fetching a batch
    SHUFFLE = 1  # laying out an epoch's samples
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4
    COMM = 5
    OTHER = 6


@dataclass
class Ledger:
    """Seconds per task, and the waiting for others that is part of `COMM`."""

    seconds: list[float] = field(default_factory=lambda: [0.0] * len(Task))
    wait: float = 0.0

    @property
    def data_s(self) -> float:
        return self.seconds[Task.DATA] + self.seconds[Task.SHUFFLE]

    @property
    def compute_s(self) -> float:
        return self.seconds[Task.FORWARD] + self.seconds[Task.BACKWARD] + self.seconds[Task.UPDATE]

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
        return Ledger(list(self.seconds), self.wait)


class Clock(Protocol):
    """One worker's time. Before `start` and while paused nothing is booked."""

    ledger: Ledger

    def start(self) -> None:
        """Training begins: the next lap starts here."""

    def did(self, task: Task, samples: int = 0) -> None:
        """Book the time since the last lap on `task`, which worked on `samples` samples."""

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        """Call `operation`, a strategy's own arithmetic: measured as a part of the lap under way, or looked up."""

    def elapsed(self) -> float:
        """Training seconds since `start`, pauses left out."""

    def paused(self) -> AbstractContextManager[None]:
        """What happens inside costs no training time."""

    @property
    def running(self) -> bool:
        """Whether time is being booked."""


def sleep_until(moment: float) -> None:
    """Return at `moment` of `time.perf_counter`, to some microseconds: asleep, then looking at the clock."""
    left = moment - time.perf_counter()
    if left > _COARSE_S:
        time.sleep(left - _COARSE_S)
    while time.perf_counter() < moment:
        os.sched_yield()


class WallClock:
    """Measured time. `synchronise` is called before each reading (a GPU's queue is drained by it).

    `mark` is when the last lap ended, in seconds of `time.perf_counter`.
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

    def did(self, task: Task, samples: int = 0) -> None:
        if self.running:  # once per phase of every step: as few calls as can be
            if self._synchronise is not None:
                self._synchronise()
            now = time.perf_counter()
            self.ledger.seconds[task] += now - self.mark
            self.mark = now

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        return operation(*arguments)

    def elapsed(self) -> float:
        return self.ledger.total_s + (self._read() - self.mark if self.running else 0.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
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
