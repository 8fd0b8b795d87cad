"""Who waited for whom: all workers' journals, and their servers', laid over one another after the run.

A worker waits while it stands still because another has not done its part yet. With t: when it began to stand still,
d: when it could go on, and u: when what it stood still for was there, that is min(max(u - t, 0), d - t) seconds, where

    collective      u = max_j a_j            all members' arrivals; one that does not block is waited for later than a_i
    receiving       u = when the other began to send; the way is communication
    sending         u = when the other began to receive (a message that is buffered is over at once, and so is d)
    shared vector   u = when the one before it had left; fetching and storing are communication
    server          u = t + max(f - t, 0) + (r - b): the server was done with earlier requests at f, took this one up at
                        b, and at r the one upon which its rule let the reply go; its own work is communication

All moments must be of one clock, so all of one host. Virtual workers wait by the same rule (docs/records.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scalebench.comm.event_log import EventLog, Numbers, Served

Moments = NDArray[np.float64]
Waits = NDArray[np.float64]
"""(n, 2) in the order of time: from when, and until when, a worker waited."""


def waits(event_logs: Sequence[EventLog], served: Sequence[Served] = ()) -> list[Waits] | None:
    """Each worker's waits; `served` are the servers' event logs, of which the slowest server counts.

    None where it cannot be known: something else carried a synchronisation, or the journals tell different stories.
    """
    if not all(event_log.complete for event_log in event_logs):
        return None
    found: list[list[Waits]] = [[np.empty((0, 2))] for _ in event_logs]
    try:
        _at_meetings(event_logs, found)
        _for_messages(event_logs, found)
        _for_shared_vectors(event_logs, found)
        _at_servers(event_logs, served, found)
    except _DifferentStoriesError:
        return None
    return [_in_order(np.concatenate(each)) for each in found]


def by_epoch(waited: Waits, ends: Sequence[float]) -> list[float]:
    """Seconds waited in each epoch, which ended at `ends`; what begins after the last one (a barrier) is in none."""
    places = np.searchsorted(ends, waited[:, 0], side="right")
    return np.bincount(places, waited[:, 1] - waited[:, 0], len(ends))[: len(ends)].tolist()  # type: ignore[no-any-return]


class _DifferentStoriesError(Exception):
    """Two journals do not tell of the same operations."""


def _at_meetings(event_logs: Sequence[EventLog], found: list[list[Waits]]) -> None:
    for group in {group: None for event_log in event_logs for group in event_log.meetings}:
        members = [worker for worker, event_log in enumerate(event_logs) if group in event_log.meetings]
        meters = [_table(event_logs[worker].meetings[group], 3) for worker in members]
        if len({len(book) for book in meters}) > 1:
            raise _DifferentStoriesError
        last = np.max([book[:, 0] for book in meters], axis=0)
        for worker, book in zip(members, meters, strict=True):
            found[worker].append(_waits(book[:, 1], book[:, 2], last))


def _for_messages(event_logs: Sequence[EventLog], found: list[list[Waits]]) -> None:
    senders = {mail: worker for worker, event_log in enumerate(event_logs) for mail in event_log.sent}
    receivers = {mail: worker for worker, event_log in enumerate(event_logs) for mail in event_log.received}
    if senders.keys() != receivers.keys():
        raise _DifferentStoriesError
    for mail, sender in senders.items():
        receiver = receivers[mail]
        sent, received = _table(event_logs[sender].sent[mail], 2), _table(event_logs[receiver].received[mail], 2)
        if len(sent) != len(received):
            raise _DifferentStoriesError
        found[sender].append(_waits(sent[:, 0], sent[:, 1], received[:, 0]))
        found[receiver].append(_waits(received[:, 0], received[:, 1], sent[:, 0]))


def _for_shared_vectors(event_logs: Sequence[EventLog], found: list[list[Waits]]) -> None:
    for meters in zip(*(event_log.visits for event_log in event_logs), strict=True):
        tables = [_table(book, 4) for book in meters]
        owner = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        visits = np.concatenate(tables)
        order = np.argsort(visits[:, 3])
        visits, owner = visits[order], owner[order]
        before = np.concatenate(([-np.inf], visits[:-1, 2]))
        waited = _waits(visits[:, 0], visits[:, 1], before)
        for worker, each in enumerate(found):
            each.append(waited[owner == worker])


def _at_servers(event_logs: Sequence[EventLog], served: Sequence[Served], found: list[list[Waits]]) -> None:
    for worker, event_log in enumerate(event_logs):
        asked = _table(event_log.requests, 3)
        if not len(asked):
            continue
        meters = [_table(book[worker], 3)[asked[:, 0].astype(int)] for book in served]
        since = asked[:, 1]
        seconds = np.max([np.maximum(book[:, 0] - since, 0) + book[:, 2] - book[:, 1] for book in meters], axis=0)
        found[worker].append(_waits(since, asked[:, 2], since + seconds))


def _table(numbers: Numbers, columns: int) -> Moments:
    return np.frombuffer(numbers, dtype=np.float64).reshape(-1, columns)


def _waits(since: Moments, until: Moments, there: Moments) -> Waits:
    return np.stack((since, np.clip(there, since, np.maximum(since, until))), axis=1)


def _in_order(waited: Waits) -> Waits:
    some = waited[waited[:, 1] > waited[:, 0]]
    return some[np.argsort(some[:, 0], kind="stable")]
