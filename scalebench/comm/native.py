"""What every real communicator shares: booking, counting, means, weights and the dtype on the wire.

An engine adds the few raw operations that move bytes. The path of an allreduce is kept short, for it runs at every
step: nothing is allocated, and a clock reading and a few additions are all that is put around the engine's own call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from scalebench.clock import Task, WallClock
from scalebench.comm.base import Request
from scalebench.comm.in_flight import InFlight
from scalebench.comm.journal import Group, Journal
from scalebench.comm.slow_links import SlowLinks, linger
from scalebench.comm.wire import pack, sum_of_weights, unpack
from scalebench.errors import EngineError

_T = TypeVar("_T")
OPS = ("sum", "mean", "max", "min")
LINEAR = 0x711  # tag of the messages that a linear collective is made of


class NativeCommunicator(ABC):
    """A group of real processes; `clock` is this worker's.

    What is sent over a split counts for its parent too, so that a worker's communicator knows all that the worker
    sent. All of a worker's communicators write into one `journal`, as long as its clock runs.
    """

    engine: str
    linear_calls = 0  # collectives in a linear reduce or broadcast, which is messages
    share_bytes = 8 << 20  # the mean of more than this for each rank is taken in pieces

    def __init__(self, rank: int, size: int, clock: WallClock, parent: NativeCommunicator | None = None) -> None:
        self.rank = rank
        self.size = size
        self.clock = clock
        self.collectives = 0
        self.bytes_sent = 0
        self.calls: int | None = 0
        self.journal: Journal = parent.journal if parent is not None else Journal()
        self._parent = parent
        self._splits = 0
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
            self.journal.complete = False

    def tally(self, nbytes: int, calls: int | None = 0) -> None:
        """Count one synchronisation of `nbytes` that the journal knows of."""
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
            group = (*self._group, "elsewhere", members, self.rank // members)
            self.journal.meetings[group].extend((came, came, clock.mark))

    def split(self, color: int, key: int = 0) -> NativeCommunicator:
        self.clock.did(Task.OTHER)
        self._splits += 1
        part = self._split(color, key)
        part._join((*self._group, self._splits, color))
        if self.slow_links is not None:
            mine = torch.tensor([self.members[self.rank]], device="cuda" if self.engine == "nccl" else "cpu")
            joined = part._allgather(mine)
            part.members = tuple(int(member) for member in joined)
        self.clock.did(Task.COMM)
        return part

    def barrier(self) -> None:
        self._enter()
        self._barrier()
        self._leave()

    def allreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> None:
        if op == "mean" and wire is None:
            self.mean_((tensor,), weight)
        elif weight is None and wire is None:
            self._enter(tensor.nbytes)
            if self.size > 1:  # a lone worker has nobody to ask; engines would take their time all the same
                self._allreduce(tensor, op)
                if self.slow_links is not None:
                    self.linger("allreduce", tensor.nbytes)
            self._leave()
        else:
            packed = self._packed(tensor, op, weight, wire)
            self._enter(tensor.numel() * packed.element_size())
            if self.size > 1:
                self._allreduce(packed, "sum" if op == "mean" else op)
            unpack(packed, tensor, self._divisor(weight, op))
            self.linger("allreduce", packed.nbytes)
            self._leave()

    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        nbytes = tensors[0].nbytes if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors)
        self._enter(nbytes)
        if self.size > 1:
            if len(tensors) > 1 or nbytes > self.share_bytes * self.size or weight is not None:
                self._mean_of_many(tensors, weight)
            else:
                self._allreduce(tensors[0], "sum")
                tensors[0].div_(self.size)
            if self.slow_links is not None:
                self.linger("allreduce", nbytes)
        self._leave()

    def iallreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> Request:
        packed = self._packed(tensor, op, weight, wire)
        if self.clock.running and self.size > 1:
            self._add(1, tensor.numel() * packed.element_size(), 1)
        self.clock.did(Task.OTHER)
        came = self.clock.mark
        raw = self._start_allreduce(packed, "sum" if op == "mean" else op)
        self.clock.did(Task.COMM)
        slowed = self._slowed("allreduce", packed.nbytes)
        divisor = self._divisor(weight, op)
        return InFlight(raw, packed, tensor, divisor, self.clock, came, self._meetings, slowed)

    def reduce_(self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False) -> None:
        self._enter(0 if linear and self.rank == root else tensor.nbytes, self.linear_calls if linear else 1)
        if linear:
            self._reduce_linear(tensor, root)
        else:
            self._reduce(tensor, root, "sum" if op == "mean" else op)
        if op == "mean" and self.size > 1 and self.rank == root:
            tensor.div_(self.size)
        self.linger("linear_reduce" if linear else "reduce", tensor.nbytes, self._with_first(root))
        self._leave()

    def broadcast_(self, tensor: Tensor, root: int = 0, *, linear: bool = False) -> None:
        sent = tensor.nbytes * (self.size - 1 if linear else 1)
        self._enter(sent if self.rank == root else 0, self.linear_calls if linear else 1)
        if linear:
            self._broadcast_linear(tensor, root)
        else:
            self._broadcast(tensor, root)
        self.linger("linear_broadcast" if linear else "broadcast", tensor.nbytes, self._with_first(root))
        self._leave()

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        self._enter(tensor.numel() * tensor.element_size())
        gathered = self._allgather(tensor)
        self.linger("allgather", tensor.nbytes)
        self._leave()
        return gathered

    def allgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return combine(self.allgather(tensor))

    def once(self, make: Callable[[], _T]) -> _T:
        return make()

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if len(tensors) != self.size:
            raise ValueError(f"alltoallv wants {self.size} tensors, one per rank; got {len(tensors)}")
        sent = sum(t.nbytes for i, t in enumerate(tensors) if i != self.rank)
        self._enter(sent)
        received = self._alltoallv(tensors)
        self.linger("alltoallv", max(sent, sum(t.nbytes for i, t in enumerate(received) if i != self.rank)))
        self._leave()
        return received

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        clock = self.clock
        clock.did(Task.OTHER)
        began = clock.mark
        self._send(tensor, to, tag)
        clock.did(Task.COMM)
        if clock.running:
            self._add(0, tensor.numel() * tensor.element_size(), 0)
            mail = (self._group, self.rank, to, tag)
            self.journal.sent[mail].extend((began, clock.mark))

    def recv_(self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False) -> None:
        clock = self.clock
        clock.did(Task.OTHER)
        began = clock.mark
        target = torch.empty_like(tensor) if add else tensor
        self._recv(target, source, tag)
        if add:
            tensor.add_(target)
        self.linger_for_message(tensor.nbytes, source)
        clock.did(Task.COMM)
        if clock.running:
            mail = (self._group, source, self.rank, tag)
            self.journal.received[mail].extend((began, clock.mark))

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        lower, stride = torch.empty_like(tensor), 1
        while stride < self.size:
            partner = self.rank ^ stride
            if self.rank < partner:
                self.send(tensor, partner)
                self.recv_(tensor, partner)
            else:
                self.recv_(lower, partner)
                merge(lower, tensor)
                self.send(lower, partner)
                tensor.copy_(lower)
            stride *= 2

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
        comm: NativeCommunicator | None = self
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
        self._meetings = self.journal.meetings[group]

    def _reduce_linear(self, tensor: Tensor, root: int) -> None:
        if self.rank != root:
            self._send(tensor, root, LINEAR)
            return
        mine, coming = tensor.clone() if root else tensor, torch.empty_like(tensor)
        for rank in range(self.size):
            if rank != root:
                self._recv(coming, rank, LINEAR)
            add_in_order_(tensor, mine if rank == root else coming, rank)

    def _broadcast_linear(self, tensor: Tensor, root: int) -> None:
        if self.rank != root:
            self._recv(tensor, root, LINEAR)
            return
        for rank in range(self.size):
            if rank != root:
                self._send(tensor, rank, LINEAR)

    def _mean_of_many(self, tensors: Sequence[Tensor], weight: float | None) -> None:
        """Piece by piece; the first one takes this worker's weight along and brings the sum of all."""
        pieces = [piece for tensor in tensors for piece in self._pieces(tensor)]
        self.called(len(pieces) - 1)
        divisor = float(self.size)
        if weight is not None:
            first, *pieces = pieces
            message = self._packed(first, "mean", weight, None)
            self._allreduce(message, "sum")
            divisor = sum_of_weights(message, first)
            unpack(message, first, divisor)
        self._mean_of_pieces(pieces, weight, divisor)

    def _pieces(self, tensor: Tensor) -> Sequence[Tensor]:
        """What is summed at once. Pieces grow with the ranks, so that latency's part of the time does not."""
        limit = self.share_bytes * self.size
        if tensor.nbytes <= limit or tensor.is_cuda:
            return (tensor,)
        return torch.split(tensor.view(-1), limit // tensor.element_size())

    def _mean_of_pieces(self, pieces: Sequence[Tensor], weight: float | None, divisor: float) -> None:
        """Each is divided while it is still in the cache; reading all of it again would take a tenth more."""
        for piece in pieces:
            if weight is not None:
                piece.mul_(weight)
            self._allreduce(piece, "sum")
            piece.div_(divisor)

    def _packed(self, tensor: Tensor, op: str, weight: float | None, wire: str | None) -> Tensor:
        """What travels; of a weighted mean the weight too, in this rank's place where half precision would round it."""
        if op == "mean" and weight is not None:
            return pack(tensor, weight if self.size > 1 else None, wire, places=self.size, place=self.rank)
        return pack(tensor, weight, wire)

    def _divisor(self, weight: float | None, op: str) -> float | None:
        """By what a sum is divided to be the mean asked for; None: by nothing, or by the weights that come with it."""
        return float(self.size) if op == "mean" and weight is None and self.size > 1 else None

    def _lacks(self, what: str) -> NoReturn:
        raise EngineError(f"engine {self.engine} has no {what}; choose another with --engine (mpi, gloo)")

    # -- what an engine adds: `op` is sum, max or min; nothing here books or counts --

    @abstractmethod
    def _allreduce(self, tensor: Tensor, op: str) -> None: ...
    @abstractmethod
    def _start_allreduce(self, tensor: Tensor, op: str) -> Request: ...
    @abstractmethod
    def _reduce(self, tensor: Tensor, root: int, op: str) -> None: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None: ...
    @abstractmethod
    def _allgather(self, tensor: Tensor) -> list[Tensor]: ...
    @abstractmethod
    def _alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    @abstractmethod
    def _barrier(self) -> None: ...

    def _split(self, color: int, key: int) -> NativeCommunicator:
        self._lacks("sub-communicators")

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self._lacks("point-to-point messages")

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        self._lacks("point-to-point messages")


def add_in_order_(total: Tensor, part: Tensor, rank: int) -> None:
    """Make `part`, of the next `rank`, a summand of `total`, which the first one begins."""
    if rank > 0:
        total.add_(part)
    elif part is not total:
        total.copy_(part)
