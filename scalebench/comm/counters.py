"""Counts of a real communicator, times of its operations, and delays of slow links.

To an allreduce, which runs at every step, this adds an `Operation`, a clock reading and
a few additions.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from scalebench.cluster.cluster_file import Cluster
from scalebench.cluster.network import Network
from scalebench.cluster.operation import Kind, Operation
from scalebench.study.heterogeneity import SlowLinks as SlowFactors
from scalebench.system.clock import Task, WallClock, sleep_until


class SlowLinks:
    """Delays (s) of real communication by `slow` links of `cluster`; worker i is on node i // workers_per_node.

    After the real transfer its users sleep for the difference of the model costs with
    and without slow links, n/B_slow - n/B along the path of the operation. Collectives
    are delayed on every member, messages at the receiver, accesses to a shared model
    while the lock is held, and requests at the server, whose link they occupy.
    Communication of Horovod and DDP overlapped with the backward pass is delayed after
    it.
    """

    def __init__(self, cluster: Cluster, slow: SlowFactors) -> None:
        self._plain = Network(cluster)
        self._slow = Network(cluster.with_slow_links(slow))

    def adds(self, operation: Operation) -> float:
        """Return the delay of an operation between workers."""
        return self._slow.time(operation) - self._plain.time(operation)


def linger(seconds: float) -> None:
    """Sleep for `seconds`."""
    if seconds > 0:
        sleep_until(time.perf_counter() + seconds)


class Counters:
    """Counts of the process `rank` in a group of `size` real processes; `clock` is this worker's.

    Traffic of a split counts for its `parent` too, so that a worker's communicator has
    its total. All communicators of a worker write into one `event_log` while its clock
    runs.
    """

    def __init__(
        self, rank: int, size: int, clock: WallClock, parent: Counters | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.clock = clock
        self.collectives = 0
        self.bytes_sent = 0
        self.calls: int | None = 0
        self.event_log: EventLog = (
            parent.event_log if parent is not None else EventLog()
        )
        self._parent = parent
        self._came = 0.0
        self.slow_links: SlowLinks | None = (
            parent.slow_links if parent is not None else None
        )
        # worker numbers of the ranks
        self.members: tuple[int, ...] = tuple(range(size))
        self._join(())

    def count(self, operation: Operation, calls: int | None = 0) -> None:
        if self.clock.running and self.size > 1:
            self._add(operation.synchronises, operation.payload(self.rank), calls)

    def called(self, more: int | None) -> None:
        if self.clock.running and self.size > 1:
            self._add(0, 0, more)

    def overlapped(self, operation: Operation, calls: int | None = None) -> None:
        self.count(operation, calls)
        # A message is delayed at its receiver.
        if operation.synchronises and self.slow_links and self.clock.running:
            self.linger(operation)
            self.clock.did(Task.COMM)
        # The waits of all workers are unknown, too.
        if self.clock.running and self.size > 1:
            self.event_log.complete = False

    def carried(self, operation: Operation, calls: int | None = None) -> None:
        clock = self.clock
        came = clock.mark
        self.linger(operation)
        clock.did(Task.COMM)
        self.count(operation, calls)
        if clock.running and self.size > 1:
            group = (*self._group, "carried", operation.members)
            self.event_log.collectives[group].extend((came, came, clock.mark))

    def operation(
        self, kind: Kind, nbytes: int, root: int = 0, linear: bool = False
    ) -> Operation:
        return Operation(kind, nbytes, self.members, root, linear)

    def operation_among(self, consecutive: int, kind: Kind, nbytes: int) -> Operation:
        first = self.rank // consecutive * consecutive
        return Operation(kind, nbytes, self.members[first : first + consecutive])

    def message(self, source: int, to: int, nbytes: int) -> Operation:
        """Return a message from rank `source` to rank `to`."""
        return Operation(Kind.SEND, nbytes, (self.members[source], self.members[to]))

    def linger(self, operation: Operation, times: int = 1) -> None:
        """Sleep for the delay of slow links in `operation`, made so many times."""
        linger(times * self._slowed(operation))

    def _slowed(self, operation: Operation) -> float:
        """Return the delay of slow links in an operation."""
        if (
            self.slow_links is None
            or not operation.nbytes
            or not self.clock.running
            or self.size == 1
        ):
            return 0.0
        return self.slow_links.adds(operation)

    def _add(self, collectives: int, nbytes: int, calls: int | None) -> None:
        # Those that it was split from count the same bytes.
        comm: Counters | None = self
        while comm is not None:
            comm.collectives += collectives
            comm.bytes_sent += nbytes
            comm.calls = (
                None if calls is None or comm.calls is None else comm.calls + calls
            )
            comm = comm._parent

    def _enter(self, operation: Operation, calls: int = 1) -> None:
        """Count an operation and begin its lap."""
        clock = self.clock
        if clock.running:
            self.count(operation, calls)
            clock.did(Task.OTHER)
            self._came = clock.mark

    def _leave(self, operation: Operation) -> None:
        clock = self.clock
        if clock.running:
            if self.slow_links is not None:
                self.linger(operation)
            clock.did(Task.COMM)
            self._log.extend((self._came, self._came, clock.mark))

    def _join(self, group: Group) -> None:
        self._group = group
        self._log = self.event_log.collectives[group]


_Key = TypeVar("_Key")
# communicator: () is the world, a split adds its number and color
Group = tuple[Hashable, ...]
# group, source, destination (ranks of the group), tag
Mail = tuple[Group, int, int, int]
# entry after entry, 8 bytes a number: a long run has millions
Numbers: TypeAlias = "array[float]"


def numbers() -> Numbers:
    """An empty list of entries."""
    return array("d")


@dataclass
class EventLog:
    """Event log of one worker. Entries are in order of time, equal for all members of a group, mail or vector."""

    collectives: defaultdict[Group, Numbers] = field(
        default_factory=lambda: defaultdict(numbers)
    )
    """Collectives: arrival; begin of waiting (later if non-blocking); end."""
    sent: defaultdict[Mail, Numbers] = field(
        default_factory=lambda: defaultdict(numbers)
    )
    """Messages: begin and end of sending."""
    received: defaultdict[Mail, Numbers] = field(
        default_factory=lambda: defaultdict(numbers)
    )
    """Messages: begin and end of receiving."""
    accesses: list[Numbers] = field(default_factory=list)
    """Accesses to each shared vector: request; lock; end; number of previous accesses by all workers."""
    requests: Numbers = field(default_factory=numbers)
    """Requests to the server: number from 0; request; reply."""
    complete: bool = True
    """False after a synchronisation outside the communicator, at an unknown moment."""

    def dated(self, moments: Callable[[Numbers], Numbers]) -> EventLog:
        """Return a copy with moments for the marks of a clock, where collectives and messages began and ended."""
        return EventLog(
            _dated(self.collectives, moments),
            _dated(self.sent, moments),
            _dated(self.received, moments),
            [array("d", each) for each in self.accesses],
            array("d", self.requests),
            self.complete,
        )


def _dated(
    log: Mapping[_Key, Numbers], moments: Callable[[Numbers], Numbers]
) -> defaultdict[_Key, Numbers]:
    return defaultdict(numbers, {key: moments(each) for key, each in log.items()})


Served = dict[int, Numbers]
"""Requests at a server by worker, in order: end of the previous request; begin of this one; begin of the request upon
which the rule released the reply."""
