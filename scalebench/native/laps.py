"""Every lap of a real worker, kept for a timeline, and the workers' laps laid over one another."""

from __future__ import annotations

import time
from collections.abc import Sequence

from scalebench.clock import Task, WallClock
from scalebench.native.waiting import Attendance
from scalebench.outcome import Lap, WorkerReport
from scalebench.pacing import PacedClock


class RecordingClock(WallClock):
    """A wall clock that keeps every lap, in seconds of `perf_counter`; ordinary runs pay nothing for it."""

    laps: list[Lap]

    def start(self) -> None:
        super().start()
        self.laps = []

    def did(self, task: Task, samples: int = 0) -> None:
        before, running = self._mark, self.running
        super().did(task, samples)
        if running:
            activity = "communication" if task == Task.COMM else task.name.lower()
            self.laps.append(Lap(activity, before, self._mark))


class RecordingPacedClock(RecordingClock, PacedClock):
    """The same of a paced worker: its laps are the stretched ones."""


def align(reports: Sequence[WorkerReport], attendances: Sequence[Attendance], *, one_clock: bool) -> float:
    """Let all laps count from the moment training began; returns that moment as a Unix time.

    Hosts have clocks of their own: then each worker counts from its own beginning, right after a barrier. On one host
    the time between a worker's arrival at a collective and the last one's becomes `waiting`.
    """
    began = [report.laps[0].begin_s if report.laps else time.perf_counter() for report in reports]
    latest: list[float] = []
    if one_clock and len({len(each.arrivals) for each in attendances}) == 1:
        latest = [max(moments) for moments in zip(*(each.arrivals for each in attendances), strict=True)]
    for report, attendance, own in zip(reports, attendances, began, strict=True):
        last = dict(zip(attendance.arrivals, latest, strict=bool(latest))) if latest else {}
        zero = min(began) if one_clock else own
        report.laps = [
            Lap(lap.activity, lap.begin_s - zero, lap.end_s - zero)
            for whole in report.laps
            for lap in _parted(whole, last)
        ]
    return time.time() - (time.perf_counter() - min(began))


def _parted(lap: Lap, last: dict[float, float]) -> list[Lap]:
    """A collective as waiting for the last worker, and what came then."""
    until = min(last.get(lap.begin_s, lap.begin_s), lap.end_s)
    if lap.activity != "communication" or until <= lap.begin_s:
        return [lap]
    return [Lap("waiting", lap.begin_s, until), Lap("communication", until, lap.end_s)]
