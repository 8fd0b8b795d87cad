"""One communication as a value, which networks, engines, counters and schedules are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

Members: TypeAlias = tuple[int, ...] | range


class Kind(StrEnum):
    """Kind of a communication, and what `Operation.nbytes` are of it."""

    ALLREDUCE = "allreduce"  # bytes summed over all members
    REDUCE = "reduce"  # bytes summed at the root
    # bytes summed, of which each member gets an equal part
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"  # bytes sent by the root
    ALLGATHER = "allgather"  # bytes sent by each member
    ALLTOALL = "alltoallv"  # bytes that the busiest member sends or receives
    MERGE = "merge"  # bytes of each member's vector, merged in pairs by messages
    BARRIER = "barrier"  # none
    SEND = "send"  # bytes of a message from the first member to the second
    # bytes of a shared vector at the second member, which the first one locks, fetches
    # and stores
    ACCESS = "access"
    # bytes of a request or reply that occupies the server at the second member
    SERVE = "serve"
    # bytes of such a request or reply, beside which the server may serve others
    TRAVEL = "travel"


_WITH_ROOT = (Kind.REDUCE, Kind.BROADCAST)


class Operation(NamedTuple):
    """One communication: equal ones cost the same, and cost the same to look up.

    `members` are worker numbers, `root` is a place among them. `linear`: the root
    exchanges a message with each other member, one after another. `engine` carries it
    in place of that of the run; `algorithm` is that of an allreduce, by default the one
    that the network takes.
    """

    kind: Kind
    nbytes: float
    members: Members
    root: int = 0
    linear: bool = False
    engine: str = ""
    algorithm: str = ""

    def root_first(self) -> Operation:
        """Return the operation with its root as the first member."""
        if not self.root:
            return self
        members = tuple(self.members)
        root = members[self.root]
        others = members[: self.root] + members[self.root + 1 :]
        return self._replace(members=(root, *others), root=0)

    @property
    def synchronises(self) -> bool:
        """True if rows count it as a synchronisation; messages hand over bytes only, a barrier nothing."""
        return self.kind not in (Kind.SEND, Kind.BARRIER)

    @property
    def depends_on_place(self) -> bool:
        """True if members hand over different numbers of bytes."""
        return self.kind == Kind.BROADCAST or (self.kind == Kind.REDUCE and self.linear)

    def payload(self, place: int) -> int:
        """Return the bytes that the member at `place` hands over, whatever the algorithm sends for it."""
        if self.kind not in _WITH_ROOT:
            return int(self.nbytes)
        is_root = place == self.root
        if self.kind == Kind.BROADCAST:
            messages = len(self.members) - 1 if self.linear else 1
            return int(self.nbytes) * messages if is_root else 0
        return 0 if self.linear and is_root else int(self.nbytes)


# a synchronisation that a strategy makes of messages, which count their own bytes
BY_MESSAGES = Operation(Kind.MERGE, 0, ())


def busiest(sizes: Sequence[Sequence[int]]) -> int:
    """Return the most bytes that a member sends or receives where i sends `sizes[i][j]` bytes to j."""
    sent = [sum(row) - row[i] for i, row in enumerate(sizes)]
    received = [
        sum(column) - column[j] for j, column in enumerate(zip(*sizes, strict=True))
    ]
    most: int = max([*sent, *received])
    return most
