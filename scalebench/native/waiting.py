"""Waiting times, computed after a run from the event logs of all workers and servers.

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

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scalebench.comm.base import BETWEEN_STAGES
from scalebench.comm.counters import EventLog, Numbers, Served

Moments = NDArray[np.float64]
Waits = NDArray[np.float64]
"""(n, 2) in the order of time: begin and end of each wait of a worker."""


def waits(
    event_logs: Sequence[EventLog], served: Sequence[Served] = ()
) -> list[Waits] | None:
    """The waits of each worker; `served` are the servers' event logs, of which the slowest server counts.

    None if unknown: a synchronisation went past the event logs, or the logs are
    inconsistent.
    """
    if not all(event_log.complete for event_log in event_logs):
        return None
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
        order = np.argsort(accesses[:, 3])
        accesses, owner = accesses[order], owner[order]
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
