"""Base class of real communicators: means, weights and wire dtypes around the raw operations of an engine.

Non-blocking operations are pending (`Pending`, `InFlight`) until they are waited for.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from scalebench.cluster.operation import Kind
from scalebench.comm.base import Request
from scalebench.comm.counters import Counters, Numbers
from scalebench.comm.wire import divide_, pack, sum_of_weights, unpack
from scalebench.errors import EngineError
from scalebench.system.clock import Task, WallClock, sleep_until

_T = TypeVar("_T")
LINEAR = 0x711  # tag of the messages of linear collectives


class NativeCommunicator(Counters, ABC):
    """A group of real processes."""

    engine: str
    linear_calls = 0  # engine collectives of a linear reduce or broadcast
    share_bytes = 8 << 20  # bytes per rank above which a mean is computed in pieces
    _splits = 0

    def split(self, color: Callable[[int], int]) -> NativeCommunicator:
        self.clock.did(Task.OTHER)
        self._splits += 1
        mine = color(self.rank)
        ranks = [rank for rank in range(self.size) if color(rank) == mine]
        part = self._split(mine, ranks)
        # The same name on all members, by which their logs are compared after the run.
        part._join((*self._group, self._splits, mine))
        # Slow links are those of workers, whatever their ranks in a group.
        part.members = tuple(self.members[rank] for rank in ranks)
        self.clock.did(Task.COMM)
        return part

    def barrier(self) -> None:
        operation = self.operation(Kind.BARRIER, 0)
        self._enter(operation, calls=0)
        self._barrier()
        self._leave(operation)

    def allreduce_(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        weight: float | None = None,
        wire: str | None = None,
    ) -> None:
        if op == "mean" and wire is None:
            self.mean_((tensor,), weight)
            return
        packed = self._packed(tensor, op, weight, wire)
        operation = self.operation(
            Kind.ALLREDUCE, tensor.numel() * packed.element_size()
        )
        self._enter(operation)
        if self.size > 1:  # without the overhead of the engine on a single worker
            self._allreduce(packed, "sum" if op == "mean" else op)
        unpack(packed, tensor, self._divisor(weight, op))
        self._leave(operation)

    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        nbytes = (
            tensors[0].nbytes
            if len(tensors) == 1
            else sum(tensor.nbytes for tensor in tensors)
        )
        operation = self.operation(Kind.ALLREDUCE, nbytes)
        self._enter(operation)
        if self.size > 1:
            # One small tensor takes neither pieces nor a sum of weights.
            if (
                len(tensors) > 1
                or nbytes > self.share_bytes * self.size
                or weight is not None
            ):
                self._mean_of_many(tensors, weight)
            else:
                self._allreduce(tensors[0], "sum")
                divide_(tensors[0], self.size)
        self._leave(operation)

    def iallreduce_(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        weight: float | None = None,
        wire: str | None = None,
    ) -> Request:
        packed = self._packed(tensor, op, weight, wire)
        operation = self.operation(
            Kind.ALLREDUCE, tensor.numel() * packed.element_size()
        )
        self._enter(operation)
        came = self.clock.mark
        raw = self._start_allreduce(packed, "sum" if op == "mean" else op)
        self.clock.did(Task.COMM)
        divisor = self._divisor(weight, op)
        return InFlight(
            raw,
            packed,
            tensor,
            divisor,
            self.clock,
            came,
            self._log,
            self._slowed(operation),
        )

    def reduce_(
        self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False
    ) -> None:
        operation = self.operation(Kind.REDUCE, tensor.nbytes, root, linear)
        self._enter(operation, self.linear_calls if linear else 1)
        if linear:
            self._reduce_linear(tensor, root)
        else:
            self._reduce(tensor, root, "sum" if op == "mean" else op)
        if op == "mean" and self.size > 1 and self.rank == root:
            divide_(tensor, self.size)
        self._leave(operation)

    def reduce_scatter_(self, own: Tensor, tensor: Tensor, op: str = "sum") -> None:
        operation = self.operation(Kind.REDUCE_SCATTER, tensor.nbytes)
        self._enter(operation)
        if self.size > 1:
            self._reduce_scatter(own, tensor, "sum" if op == "mean" else op)
        else:
            own.copy_(tensor)
        if op == "mean" and self.size > 1:
            divide_(own, self.size)
        self._leave(operation)

    def broadcast_(
        self, tensor: Tensor, root: int = 0, *, linear: bool = False
    ) -> None:
        operation = self.operation(Kind.BROADCAST, tensor.nbytes, root, linear)
        self._enter(operation, self.linear_calls if linear else 1)
        if linear:
            self._broadcast_linear(tensor, root)
        else:
            self._broadcast(tensor, root)
        self._leave(operation)

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        operation = self.operation(Kind.ALLGATHER, tensor.nbytes)
        self._enter(operation)
        gathered = self._allgather(tensor)
        self._leave(operation)
        return gathered

    def allgather_combined(
        self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        return combine(self.allgather(tensor))

    def iallgather_combined(
        self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Gathered:
        operation = self.operation(Kind.ALLGATHER, tensor.nbytes)
        self._enter(operation)
        came = self.clock.mark
        every = tensor.new_empty((self.size, *tensor.shape))
        raw = self._start_allgather(tensor, every)
        self.clock.did(Task.COMM)
        request = InFlight(
            raw,
            every,
            every,
            None,
            self.clock,
            came,
            self._log,
            self._slowed(operation),
        )
        return Gathered(request, tensor, every, combine)

    def cached(self, make: Callable[[], _T]) -> _T:
        return make()

    def by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        own: Sequence[Tensor],
        *equal: Any,
    ) -> Sequence[Tensor]:
        made = self.clock.work(compute, *(row[None] for row in own), *equal)
        return [each[0] for each in made]

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if len(tensors) != self.size:
            raise ValueError(
                f"alltoallv wants {self.size} tensors, one per rank; got {len(tensors)}"
            )
        # What it receives is known only afterwards, and may be more.
        operation = self.operation(Kind.ALLTOALL, self._of_others(tensors))
        self._enter(operation)
        received = self._alltoallv(tensors)
        self._leave(
            operation._replace(nbytes=max(operation.nbytes, self._of_others(received)))
        )
        return received

    def _of_others(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of tensors that go to other ranks, or come from them."""
        return sum(
            tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank
        )

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.clock.did(Task.OTHER)
        began = self.clock.mark
        self._send(tensor, to, tag)
        self._sent(tensor, to, tag, began)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Request:
        self.clock.did(Task.OTHER)
        began = self.clock.mark
        raw = self._start_send(tensor, to, tag)
        self._sent(tensor, to, tag, began)
        return Sending(raw, tensor, self.clock)

    def _sent(self, tensor: Tensor, to: int, tag: int, began: float) -> None:
        """Count and log a message whose sending `began` at that moment and has returned."""
        clock = self.clock
        clock.did(Task.COMM)
        if clock.running:
            self.count(self.message(self.rank, to, tensor.nbytes))
            mail = (self._group, self.rank, to, tag)
            self.event_log.sent[mail].extend((began, clock.mark))

    def recv_(
        self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False
    ) -> None:
        clock = self.clock
        clock.did(Task.OTHER)
        began = clock.mark
        # MPI and gloo have no receive that adds.
        target = torch.empty_like(tensor) if add else tensor
        self._recv(target, source, tag)
        if add:
            tensor.add_(target)
        if self.slow_links is not None:
            self.linger(self.message(source, self.rank, tensor.nbytes))
        clock.did(Task.COMM)
        if clock.running:
            mail = (self._group, source, self.rank, tag)
            self.event_log.received[mail].extend((began, clock.mark))

    def recv_like(self, like: Tensor, source: int, tag: int = 0) -> Tensor:
        received = torch.empty_like(like)
        self.recv_(received, source, tag)
        return received

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        # Recursive doubling: partners differ in one bit of their ranks, the lowest
        # first.
        lower, stride = torch.empty_like(tensor), 1
        while stride < self.size:
            partner = self.rank ^ stride
            if self.rank < partner:
                self.send(tensor, partner)
                self.recv_(tensor, partner)
            else:
                self.recv_(lower, partner)
                # The higher partner merges for both, so that both hold the same bits.
                merge(lower, tensor)
                self.send(lower, partner)
                tensor.copy_(lower)
            stride *= 2

    def _reduce_linear(self, tensor: Tensor, root: int) -> None:
        if self.rank != root:
            self._send(tensor, root, LINEAR)
            return
        # The sum begins with the part of rank 0: another root keeps its own until its
        # turn.
        mine = tensor.clone() if root else tensor
        coming = torch.empty_like(tensor)
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
        """Average piece by piece; the first piece also sums the weights of all workers."""
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
        """Return the pieces summed at once; they grow with the ranks, which bounds the share of latency."""
        limit = self.share_bytes * self.size
        if tensor.nbytes <= limit or tensor.is_cuda:
            return (tensor,)
        return torch.split(tensor.view(-1), limit // tensor.element_size())

    def _mean_of_pieces(
        self, pieces: Sequence[Tensor], weight: float | None, divisor: float
    ) -> None:
        """Average pieces; each is divided while it is in the cache, which saves a tenth of the time."""
        for piece in pieces:
            if weight is not None:
                piece.mul_(weight)
            self._allreduce(piece, "sum")
            divide_(piece, divisor)

    def _packed(
        self, tensor: Tensor, op: str, weight: float | None, wire: str | None
    ) -> Tensor:
        """Return the tensor for the wire; for a weighted mean with the weight of this rank."""
        if op == "mean" and weight is not None:
            return pack(
                tensor,
                weight if self.size > 1 else None,
                wire,
                places=self.size,
                place=self.rank,
            )
        return pack(tensor, weight, wire)

    def _divisor(self, weight: float | None, op: str) -> float | None:
        """Return the divisor of an unweighted mean; None for other operations and weighted means."""
        return (
            float(self.size)
            if op == "mean" and weight is None and self.size > 1
            else None
        )

    def _lacks(self, what: str) -> NoReturn:
        raise EngineError(
            f"engine {self.engine} has no {what}; choose another with --engine (mpi, gloo)"
        )

    # -- raw operations of an engine, neither timed nor counted; `op` is sum, max or min --

    @abstractmethod
    def _allreduce(self, tensor: Tensor, op: str) -> None: ...
    @abstractmethod
    def _start_allreduce(self, tensor: Tensor, op: str) -> Pending: ...
    @abstractmethod
    def _reduce(self, tensor: Tensor, root: int, op: str) -> None: ...
    def _reduce_scatter(self, own: Tensor, tensor: Tensor, op: str) -> None:
        """Reduce everything and keep a part, where an engine has nothing better."""
        self._allreduce(tensor, op)
        own.copy_(tensor.view(self.size, -1)[self.rank].view_as(own))

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None: ...
    @abstractmethod
    def _allgather(self, tensor: Tensor) -> list[Tensor]: ...
    @abstractmethod
    def _start_allgather(self, tensor: Tensor, every: Tensor) -> Pending: ...
    @abstractmethod
    def _alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...
    @abstractmethod
    def _barrier(self) -> None: ...

    def _split(self, color: int, ranks: list[int]) -> NativeCommunicator:
        """Return the communicator of `ranks`, those of this rank's color."""
        self._lacks("sub-communicators")

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        self._lacks("point-to-point messages")

    def _start_send(self, tensor: Tensor, to: int, tag: int) -> Pending:
        self._lacks("point-to-point messages")

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        self._lacks("point-to-point messages")


def add_in_order_(total: Tensor, part: Tensor, rank: int) -> None:
    """Add `part` of `rank` to `total`, or begin `total` with the part of rank 0."""
    if rank > 0:
        total.add_(part)
    elif part is not total:
        total.copy_(part)


class Pending(NamedTuple):
    """A pending operation of an engine."""

    wait: Callable[[], object]
    done: Callable[[], object]

    def then(self, finish: Callable[[], object]) -> Pending:
        """Return the operation with `finish` called at the end of its `wait`."""

        def wait() -> None:
            self.wait()
            finish()

        return Pending(wait, self.done)


class InFlight:
    """Request with the engine's request `raw`, whose result in `packed` is divided by `total` into `target`.

    Its entry in the group's `log` is made at the begin `came`, as all members begin
    operations in the same order, but may wait in another. It lasts `slowed` seconds
    longer than the engine: from its observed end, or from `came` if it had ended before
    the wait.
    """

    def __init__(
        self,
        raw: Pending,
        packed: Tensor,
        target: Tensor,
        total: float | None,
        clock: WallClock,
        came: float,
        log: Numbers,
        slowed: float = 0.0,
    ) -> None:
        self._raw = raw
        self._packed = packed
        self._target = target
        self._total = total
        self._clock, self._log = clock, log
        self._landed = False
        self._slowed, self._came = slowed, came
        # None: outside the training time
        self._place = len(log) if clock.running else None
        if clock.running:
            log.extend((came, came, came))

    def wait(self) -> None:
        if self._landed:
            return
        clock = self._clock
        clock.did(Task.OTHER)
        since = clock.mark
        # What is done already was hidden by compute, and so is the delay of slow links,
        # from its begin on.
        was_done = self._raw.done()
        self._raw.wait()
        if self._slowed:
            sleep_until(
                (self._came if was_done else time.perf_counter()) + self._slowed
            )
        unpack(self._packed, self._target, self._total)
        self._landed = True
        clock.did(Task.COMM)
        if clock.running and self._place is not None:
            self._log[self._place + 1], self._log[self._place + 2] = since, clock.mark

    def done(self) -> bool:
        if self._landed or not self._raw.done():
            return self._landed
        # Only a paced run has slow links, whose clock gives seconds.
        return not self._slowed or time.perf_counter() >= self._came + self._slowed


class Gathered:
    """An allgather under way, which keeps the `tensor` that is sent; `every` (K, ...) becomes those of all ranks."""

    def __init__(
        self,
        request: InFlight,
        tensor: Tensor,
        every: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._request = request
        self._tensor = tensor
        self._every = every
        self._combine = combine

    def result(self) -> Tensor:
        self._request.wait()
        return self._combine(list(self._every.unbind()))


class Sending:
    """Request of a message under way, which keeps its tensor; it is logged as sent when it began."""

    def __init__(self, raw: Pending, tensor: Tensor, clock: WallClock) -> None:
        self._raw = raw
        self._tensor = tensor
        self._clock = clock
        self._left = False

    def wait(self) -> None:
        if self._left:
            return
        self._clock.did(Task.OTHER)
        self._raw.wait()
        self._left = True
        self._clock.did(Task.COMM)

    def done(self) -> bool:
        return self._left or bool(self._raw.done())
