"""Counts of a real communicator, the moments of its operations, and the delay of slow links.

The path of an allreduce is kept short, for it runs at every step: nothing is allocated, and a clock reading and a few
additions are all that is put around the engine's own call.
"""

from __future__ import annotations

from scalebench.comm.event_log import EventLog, Group
from scalebench.comm.slow_links import SlowLinks, linger
from scalebench.system.clock import Task, WallClock


class Counters:
    """Of a group of `size` real processes, as the one of `rank` keeps them; `clock` is this worker's.

    What is sent over a split counts for its `parent` too, so that a worker's communicator knows all that the worker
    sent. All of a worker's communicators write into one `event_log`, as long as its clock runs.
    """

    def __init__(self, rank: int, size: int, clock: WallClock, parent: Counters | None = None) -> None:
        self.rank = rank
        self.size = size
        self.clock = clock
        self.collectives = 0
        self.bytes_sent = 0
        self.calls: int | None = 0
        self.event_log: EventLog = parent.event_log if parent is not None else EventLog()
        self._parent = parent
        self._came = 0.0
        self.slow_links: SlowLinks | None = parent.slow_links if parent is not None else None
        self.members: tuple[int, ...] = tuple(range(size))  # worker numbers of the ranks
        self._join(())

    def count(self, nbytes: int, calls: int | None = None) -> None:
        self.tally(nbytes, calls if nbytes else 0)
        if self.slow_links is not None and nbytes and self.clock.running:
            self.linger("allreduce", nbytes)
            self.clock.did(Task.COMM)
        if nbytes and self.clock.running and self.size > 1:
            self.event_log.complete = False

    def tally(self, nbytes: int, calls: int | None = 0) -> None:
        """Count one synchronisation of `nbytes` that the event log holds."""
        if self.clock.running and self.size > 1:
            self._add(1, nbytes, calls)

    def called(self, more: int | None) -> None:
        """Count so many further collective calls for what is counted as a synchronisation; None: nobody knows."""
        if self.clock.running and self.size > 1:
            self._add(0, 0, more)

    def carried(self, nbytes: int, among: int | None = None, calls: int | None = None) -> None:
        clock, members = self.clock, among or self.size
        came = clock.mark
        if self.slow_links is not None:
            first = self.rank // members * members
            self.linger("allreduce", nbytes, self.members[first : first + members])
        clock.did(Task.COMM)
        if clock.running and self.size > 1:
            self._add(1, nbytes, calls)
            group = (*self._group, "placed", members, self.rank // members)
            self.event_log.meetings[group].extend((came, came, clock.mark))

    def linger(self, operation: str, nbytes: int, ranks: tuple[int, ...] | None = None) -> None:
        """Stay for what slow links add to a collective of `nbytes` among workers `ranks` (default: all members)."""
        linger(self._slowed(operation, nbytes, ranks))

    def linger_for_message(self, nbytes: int, other: int, times: int = 1) -> None:
        """Stay for what slow links add to so many messages of `nbytes` between this rank and `other`."""
        if self.slow_links is not None and self.clock.running:
            src, dst = self.members[other], self.members[self.rank]
            linger(times * self.slow_links.adds_to_message(nbytes, src, dst))

    def _with_first(self, root: int) -> tuple[int, ...] | None:
        """The members' worker numbers, the root's first; None where that is their order anyway."""
        return (self.members[root], *self.members[:root], *self.members[root + 1 :]) if root else None

    def _slowed(self, operation: str, nbytes: int, ranks: tuple[int, ...] | None = None) -> float:
        if self.slow_links is None or not self.clock.running or self.size == 1:
            return 0.0
        return self.slow_links.adds(operation, nbytes, ranks or self.members)

    def _add(self, collectives: int, nbytes: int, calls: int | None) -> None:
        comm: Counters | None = self
        while comm is not None:
            comm.collectives += collectives
            comm.bytes_sent += nbytes
            comm.calls = None if calls is None or comm.calls is None else comm.calls + calls
            comm = comm._parent

    def _enter(self, nbytes: int | None = None, calls: int = 1) -> None:
        clock = self.clock
        if clock.running:
            if nbytes is not None and self.size > 1:
                self._add(1, nbytes, calls)
            clock.did(Task.OTHER)
            self._came = clock.mark

    def _leave(self) -> None:
        clock = self.clock
        if clock.running:
            clock.did(Task.COMM)
            self._meetings.extend((self._came, self._came, clock.mark))

    def _join(self, group: Group) -> None:
        self._group = group
        self._meetings = self.event_log.meetings[group]
