"""The timeline of a run: when workers waited for each other, and their laps, aligned to a common beginning.

Both are computed after the run, from the event logs of all workers and servers, and
from the laps that clocks of traced runs keep. The clocks of several nodes are compared
with that of rank 0, by an exchange of messages.

A worker waits while it is blocked because another has not done its part yet. With t: the time at which it was blocked,
d: the time at which it continued, u: the time at which the other was ready, it waits min(max(u - t, 0), d - t) seconds:

    collective      u = max_j a_j            arrivals of all members; t > a_i for a non-blocking one
    receiving       u = begin of the other's send; the transfer is communication
    sending         u = begin of the other's receive (a buffered message ends at once, and so does d)
    shared vector   u = release by the previous worker; fetching and storing are communication
    server          u = t + max(f - t, 0) + (r - b): the server finished earlier requests at f, took this one up at b,
                        and at r the one upon which its rule released the reply; its own work is communication

All times must be of one clock, so of one host. Virtual workers wait by the same rule
(docs/records.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalebench.comm.base import BETWEEN_STAGES
from scalebench.comm.control import ObjectGroup
from scalebench.comm.counters import EventLog, Numbers, Served
from scalebench.system.clock import DeviceClock, Task, WallClock
from scalebench.training.outcome import Lap, Outcome
from scalebench.training.pacing import PacedClock

Moments = NDArray[np.float64]
Waits = NDArray[np.float64]
"""(n, 2) in the order of time: begin and end of each wait of a worker."""
# exchanges, of which the quickest counts
_ROUNDS = 10


def waits(
    event_logs: Sequence[EventLog], served: Sequence[Served] = ()
) -> list[Waits] | None:
    """The waits of each worker; `served` are the servers' event logs, of which the slowest server counts.

    None if unknown: a synchronisation went past the event logs, or the logs are
    inconsistent.
    """
    if not all(event_log.complete for event_log in event_logs):
        return None
    # A worker that never waits has a table too, of no rows.
    found: list[list[Waits]] = [[np.empty((0, 2))] for _ in event_logs]
    try:
        _at_collectives(event_logs, found)
        _for_messages(event_logs, found)
        _for_shared_vectors(event_logs, found)
        _at_servers(event_logs, served, found)
    except _InconsistentLogsError:
        return None
    return [_in_order(np.concatenate(each)) for each in found]


def bubbles(event_logs: Sequence[EventLog]) -> list[float]:
    """Seconds that each worker waited for other stages of its replica, by event logs whose `waits` are known."""
    senders = {
        mail: event_log.sent[mail]
        for event_log in event_logs
        for mail in event_log.sent
    }
    found = []
    for event_log in event_logs:
        seconds = 0.0
        for mail, book in event_log.received.items():
            if mail[3] in BETWEEN_STAGES:
                sent, received = _table(senders[mail], 2), _table(book, 2)
                waited = _waits(received[:, 0], received[:, 1], sent[:, 0])
                seconds += float(np.diff(waited).sum())
        found.append(seconds)
    return found


def by_epoch(waited: Waits, ends: Sequence[float]) -> list[float]:
    """Seconds waited in each epoch, by the times `ends`; a wait after the last one (a barrier) is left out."""
    places = np.searchsorted(ends, waited[:, 0], side="right")
    seconds: list[float] = np.bincount(places, waited[:, 1] - waited[:, 0], len(ends))[
        : len(ends)
    ].tolist()
    return seconds


class _InconsistentLogsError(Exception):
    """Two event logs record different operations."""


def _at_collectives(event_logs: Sequence[EventLog], found: list[list[Waits]]) -> None:
    for group in {
        group: None for event_log in event_logs for group in event_log.collectives
    }:
        members = [
            worker
            for worker, event_log in enumerate(event_logs)
            if group in event_log.collectives
        ]
        meters = [
            _table(event_logs[worker].collectives[group], 3) for worker in members
        ]
        if len({len(book) for book in meters}) > 1:
            raise _InconsistentLogsError
        last = np.max([book[:, 0] for book in meters], axis=0)
        for worker, book in zip(members, meters, strict=True):
            found[worker].append(_waits(book[:, 1], book[:, 2], last))


def _for_messages(event_logs: Sequence[EventLog], found: list[list[Waits]]) -> None:
    senders = {
        mail: worker
        for worker, event_log in enumerate(event_logs)
        for mail in event_log.sent
    }
    receivers = {
        mail: worker
        for worker, event_log in enumerate(event_logs)
        for mail in event_log.received
    }
    if senders.keys() != receivers.keys():
        raise _InconsistentLogsError
    for mail, sender in senders.items():
        receiver = receivers[mail]
        sent, received = (
            _table(event_logs[sender].sent[mail], 2),
            _table(event_logs[receiver].received[mail], 2),
        )
        if len(sent) != len(received):
            raise _InconsistentLogsError
        found[sender].append(_waits(sent[:, 0], sent[:, 1], received[:, 0]))
        found[receiver].append(_waits(received[:, 0], received[:, 1], sent[:, 0]))


def _for_shared_vectors(
    event_logs: Sequence[EventLog], found: list[list[Waits]]
) -> None:
    for meters in zip(*(event_log.accesses for event_log in event_logs), strict=True):
        tables = [_table(book, 4) for book in meters]
        owner = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        accesses = np.concatenate(tables)
        # By the counter beside the vector: moments of two workers may be equal.
        order = np.argsort(accesses[:, 3])
        accesses, owner = accesses[order], owner[order]
        # No worker held the vector before the first access.
        before = np.concatenate(([-np.inf], accesses[:-1, 2]))
        waited = _waits(accesses[:, 0], accesses[:, 1], before)
        for worker, each in enumerate(found):
            each.append(waited[owner == worker])


def _at_servers(
    event_logs: Sequence[EventLog], served: Sequence[Served], found: list[list[Waits]]
) -> None:
    for worker, event_log in enumerate(event_logs):
        asked = _table(event_log.requests, 3)
        if not len(asked):
            continue
        meters = [_table(book[worker], 3)[asked[:, 0].astype(int)] for book in served]
        since = asked[:, 1]
        # All servers are asked at once, so that the slowest decides.
        seconds = np.max(
            [
                np.maximum(book[:, 0] - since, 0) + book[:, 2] - book[:, 1]
                for book in meters
            ],
            axis=0,
        )
        found[worker].append(_waits(since, asked[:, 2], since + seconds))


def _table(numbers: Numbers, columns: int) -> Moments:
    return np.frombuffer(numbers, dtype=np.float64).reshape(-1, columns)


def _waits(since: Moments, until: Moments, there: Moments) -> Waits:
    return np.stack((since, np.clip(there, since, np.maximum(since, until))), axis=1)


def _in_order(waited: Waits) -> Waits:
    some = waited[waited[:, 1] > waited[:, 0]]
    return some[np.argsort(some[:, 0], kind="stable")]


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
        # All offsets of a round have one error, but rank 0's own, which is zero.
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
    """A wall clock that keeps every lap, between two of its marks; only traced runs use it."""

    laps: list[Lap]

    def start(self) -> None:
        super().start()
        self.laps = []

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        # Read first: ending the lap moves the mark.
        before, running = self.mark, self.running
        super().did(task, samples, share)
        if running:
            activity = "communication" if task == Task.COMM else task.name.lower()
            self.laps.append(Lap(activity, before, self.mark))

    def timed_laps(self) -> list[Lap]:
        """Return the laps with moments for marks, once training is over."""
        return [
            Lap(lap.activity, *self.moments((lap.begin_s, lap.end_s)))
            for lap in self.laps
        ]


class TracedPacedClock(TracedClock, PacedClock):
    """A paced clock that keeps every lap, as stretched."""


class TracedDeviceClock(TracedClock, DeviceClock):
    """A device's clock that keeps every lap."""


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
    # Laps are of a clock without a date: counted back from the present of both clocks.
    outcome.add_facts(began_unix_s=time.time() - (time.perf_counter() - zero))
    if busy:
        # Servers are asked before training, too, and by the evaluation after it.
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
            # The rest of this wait lies in the next lap.
            if left[0][1] > lap.end_s:
                break
            left.popleft()
        if lap.end_s > begin:
            found.append(Lap(lap.activity, begin, lap.end_s))
    return found
