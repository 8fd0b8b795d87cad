"""The laps of real workers for a timeline: recorded by their clocks and aligned to a common beginning.

The clocks of several nodes are compared with that of rank 0, by an exchange of
messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalebench.comm.control import ObjectGroup
from scalebench.native.waiting import Waits
from scalebench.system.clock import Task, WallClock
from scalebench.training.outcome import Lap, Outcome
from scalebench.training.pacing import PacedClock

_ROUNDS = 10


@dataclass(frozen=True)
class ClockOffset:
    """How far the clocks of a worker are ahead of those of rank 0, in seconds, each true to within `error_s`.

    `wall_s` is that of the time of day, which log files have; `monotonic_s` that of the
    clock by which durations are measured, which begins with the boot of a node.
    """

    wall_s: float = 0.0
    monotonic_s: float = 0.0
    error_s: float = 0.0


def clock_offsets(
    group: ObjectGroup,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.perf_counter,
) -> list[ClockOffset] | None:
    """Return the offset of each rank of `group` on rank 0; None on the others.

    Cristian (1989, doi:10.1007/BF01784024): rank 0 asks all at t0, a rank answers with
    its time T, and the last answer is here at t1. T was read between t0 and t1, so the
    offset is T - (t0 + t1) / 2, wrong by at most (t1 - t0) / 2. The shortest of some
    rounds counts. It holds for collectives of any kind, as far as rank 0 is the first
    to begin.
    """
    found: list[ClockOffset] | None = None
    for _ in range(_ROUNDS):
        group.Barrier()  # all are here: no round waits for a rank that is late
        began = monotonic()
        began_wall = wall()
        group.bcast(None)
        times = group.gather((wall(), monotonic()))
        if times is None:
            continue
        half = (monotonic() - began) / 2
        if found is None or half < found[-1].error_s:
            found = [
                ClockOffset(
                    there_wall - (began_wall + half), there - (began + half), half
                )
                for there_wall, there in times
            ]
            found[0] = ClockOffset()  # rank 0 has no offset against itself
    return found


class TracedClock(WallClock):
    """A wall clock that keeps every lap, in seconds of `perf_counter`; only traced runs use it."""

    laps: list[Lap]

    def start(self) -> None:
        super().start()
        self.laps = []

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        before, running = self.mark, self.running
        super().did(task, samples, share)
        if running:
            activity = "communication" if task == Task.COMM else task.name.lower()
            self.laps.append(Lap(activity, before, self.mark))


class TracedPacedClock(TracedClock, PacedClock):
    """A paced clock that keeps every lap, as stretched."""


def align(
    outcome: Outcome,
    waited: Sequence[Waits] | None,
    busy: Sequence[Sequence[tuple[float, float]]] = (),
    offsets: Sequence[ClockOffset] | None = None,
) -> None:
    """Let all laps of `outcome` count from the moment training began; add that moment and the servers' laps.

    `offsets` of the workers' clocks on several nodes are taken off their laps; None on
    one node, which has one clock. Where waits are known, a lap of communication is
    divided at them; a reply is waited for in the middle of the exchange with its
    server, and drawn at the beginning. The times at which a server was `busy` are of
    worker 0's clock.
    """
    reports = outcome.workers
    ahead = [
        0.0 if offsets is None else offsets[report.rank].monotonic_s
        for report in reports
    ]
    starts = [
        report.laps[0].begin_s - own if report.laps else time.perf_counter()
        for report, own in zip(reports, ahead, strict=True)
    ]
    zero = min(starts)
    for worker, report in enumerate(reports):
        laps = (
            parted(report.laps, waited[worker]) if waited is not None else report.laps
        )
        own_zero = zero + ahead[worker]
        report.laps = [
            Lap(lap.activity, lap.begin_s - own_zero, lap.end_s - own_zero)
            for lap in laps
        ]
    outcome.add_facts(began_unix_s=time.time() - (time.perf_counter() - zero))
    if busy:
        length = max(lap.end_s for report in reports for lap in report.laps)
        served = [
            [
                Lap("serving", begin - zero, end - zero)
                for begin, end in laps
                if 0 <= begin - zero <= length
            ]
            for laps in busy
        ]
        outcome.add_facts(server_laps=served)


def parted(laps: Sequence[Lap], waited: Waits) -> list[Lap]:
    """Divide laps of communication where a wait within them begins and ends."""
    found: list[Lap] = []
    left = deque(waited.tolist())
    for lap in laps:
        begin = lap.begin_s
        while left and left[0][0] < lap.end_s:
            since, until = max(begin, left[0][0]), min(left[0][1], lap.end_s)
            if lap.activity == "communication" and until > since:
                if since > begin:
                    found.append(Lap(lap.activity, begin, since))
                found.append(Lap("waiting", since, until))
                begin = until
            if left[0][1] > lap.end_s:
                break
            left.popleft()
        if lap.end_s > begin:
            found.append(Lap(lap.activity, begin, lap.end_s))
    return found
