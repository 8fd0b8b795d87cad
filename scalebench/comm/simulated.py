"""Communicator of simulated workers: every communication is an `Operation` with an effect on the tensors of all.

How an operation ends is left to two classes: in virtual time, when all members have
come (`virtual/communicator.py`), or at once, as an entry of a schedule
(`pricing/recorders.py`). A lone worker, with which nothing is exchanged, has one of its
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from scalebench.cluster.operation import Kind, Members, Operation
from scalebench.comm.base import Communicator
from scalebench.comm.wire import divide_, there_and_back, wire_bytes
from scalebench.system.clock import Clock

_T = TypeVar("_T")
_ELEMENTWISE = {"max": torch.maximum, "min": torch.minimum}
# on what the members hand over, by rank; it may return what all of them get
Effect = Callable[[list[Any]], Any]


class SimulatedClock(Clock, Protocol):
    """A clock by which a strategy's operation takes time whether or not it is executed."""

    def charge(self, operation: Callable[..., Any], members: int = 2) -> None:
        """Charge this worker for `operation` on the messages of so many workers."""

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        """Call `operation` without charging it: once for all workers that do."""

    def rehearse(
        self, operation: Callable[..., object], *arguments: object, times: int = 1
    ) -> None:
        """Call the side-effect free `operation` on a multiple `times` of the messages, only on a measuring clock."""


class Begun(Protocol):
    """An operation that has begun; a recording, in which there are no others, has neither payloads nor result."""

    @property
    def payloads(self) -> list[Any] | None:
        """What the members hand over, by rank."""

    @property
    def result(self) -> Any:
        """What the effect returned."""


_Begun = TypeVar("_Begun", bound=Begun)


class SimulatedCommunicator(ABC, Generic[_Begun]):
    """Implements `comm.base.Communicator`, apart from what subclasses add: how operations begin and end.

    Traffic of a split counts for its `parent` too, so that a worker's communicator has
    its total.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        members: Members,
        place: int,
        parent: SimulatedCommunicator[_Begun] | None = None,
    ) -> None:
        self.members = members
        self.place = place
        self.size = len(members)
        self.collectives = self.bytes_sent = 0
        self.calls: int | None = None
        self.clock, self._parent = clock, parent

    @property
    def rank(self) -> int:
        return self.place

    # --- what subclasses add ----------------------------------------------------------------------------------

    @abstractmethod
    def begin(
        self,
        operation: Operation,
        what: str,
        payload: Any,
        effect: Effect = lambda _: None,
        *,
        blocking: bool = True,
    ) -> _Begun:
        """Take part in `operation`, of which members that call `what` have one; it is `blocking` if `end` follows."""

    @abstractmethod
    def end(self, begun: _Begun) -> None:
        """Wait for the end of an operation."""

    @abstractmethod
    def has_ended(self, begun: _Begun) -> bool:
        """Return True if `end` would return at once."""

    @abstractmethod
    def post(self, message: Operation, tensor: Tensor, to: int, tag: int) -> None:
        """Send `tensor` to the rank `to`."""

    # --- collectives ------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        self.end(self.begin(self.operation(Kind.BARRIER, 0), "barrier", None))

    def allreduce_(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        weight: float | None = None,
        wire: str | None = None,
    ) -> None:
        self.end(self._begin_allreduce(tensor, op, weight, wire))

    def iallreduce_(
        self,
        tensor: Tensor,
        op: str = "sum",
        *,
        weight: float | None = None,
        wire: str | None = None,
    ) -> SimulatedRequest:
        return SimulatedRequest(
            self, self._begin_allreduce(tensor, op, weight, wire, blocking=False)
        )

    def _begin_allreduce(
        self,
        tensor: Tensor,
        op: str,
        weight: float | None,
        wire: str | None,
        *,
        blocking: bool = True,
    ) -> _Begun:
        if wire is not None and self.size > 1:
            # Real communicators cast on both sides of the wire, which takes time.
            self.clock.rehearse(there_and_back, tensor, wire)
            self.clock.charge(there_and_back)

        def effect(payloads: list[Any]) -> None:
            tensors = [payload[0] for payload in payloads]
            result = reduce_tensors(
                tensors, op, [payload[1] for payload in payloads], wire
            )
            # One call for all workers: a thousand small copies would take longer than
            # the sum.
            torch._foreach_copy_(tensors, [result] * len(tensors))

        operation = self.operation(Kind.ALLREDUCE, wire_bytes(tensor, wire))
        return self._begin_counted(
            operation, f"allreduce({op})", (tensor, weight), effect, blocking=blocking
        )

    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        if len(tensors) == 1:
            self.allreduce_(tensors[0], "mean", weight=weight)
            return

        def effect(payloads: list[Any]) -> None:
            weights = [payload[1] for payload in payloads]
            for same in zip(*(payload[0] for payload in payloads), strict=True):
                torch._foreach_copy_(
                    list(same), [reduce_tensors(same, "mean", weights)] * len(same)
                )

        operation = self.operation(
            Kind.ALLREDUCE, sum(tensor.nbytes for tensor in tensors)
        )
        self._carry_out(operation, "mean", (tensors, weight), effect)

    def reduce_(
        self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False
    ) -> None:
        def effect(payloads: list[Any]) -> None:
            payloads[root].copy_(reduce_tensors(payloads, op, [None] * len(payloads)))

        self._carry_out(
            self.operation(Kind.REDUCE, tensor.nbytes, root, linear),
            f"reduce({op})",
            tensor,
            effect,
        )

    def reduce_scatter_(self, own: Tensor, tensor: Tensor, op: str = "sum") -> None:
        def effect(payloads: list[Any]) -> None:
            tensors = [payload[1] for payload in payloads]
            result = reduce_tensors(tensors, op, [None] * len(tensors)).view(
                len(payloads), -1
            )
            for (part, _), value in zip(payloads, result, strict=True):
                part.copy_(value.view_as(part))

        operation = self.operation(Kind.REDUCE_SCATTER, tensor.nbytes)
        self._carry_out(operation, f"reduce_scatter({op})", (own, tensor), effect)

    def broadcast_(
        self, tensor: Tensor, root: int = 0, *, linear: bool = False
    ) -> None:
        def effect(payloads: list[Any]) -> None:
            others = [each for rank, each in enumerate(payloads) if rank != root]
            if others:  # one call, as above
                torch._foreach_copy_(others, [payloads[root]] * len(others))

        self._carry_out(
            self.operation(Kind.BROADCAST, tensor.nbytes, root, linear),
            "broadcast",
            tensor,
            effect,
        )

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        # A copy, as the sender may change its tensor while others still read what it
        # sent.
        begun = self._carry_out(
            self.operation(Kind.ALLGATHER, tensor.nbytes), "allgather", tensor.clone()
        )
        return [tensor] * self.size if begun.payloads is None else list(begun.payloads)

    def allgather_combined(
        self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> Tensor:
        return self._begin_gathering(tensor, combine).result()

    def iallgather_combined(
        self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> SimulatedGathering:
        return self._begin_gathering(tensor, combine, blocking=False)

    def _begin_gathering(
        self,
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
        *,
        blocking: bool = True,
    ) -> SimulatedGathering:
        def effect(payloads: list[Any]) -> Tensor:
            # for the cost of each further message
            self.clock.rehearse(combine, payloads * 2, times=2)
            return self.clock.execute(combine, payloads)

        operation = self.operation(Kind.ALLGATHER, tensor.nbytes)
        begun = self._begin_counted(
            operation, "allgather", tensor, effect, blocking=blocking
        )
        return SimulatedGathering(self, begun, tensor, combine)

    def by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        own: Sequence[Tensor],
        *equal: Any,
    ) -> Sequence[Tensor]:
        made = self.clock.work(compute, *(row[None] for row in own), *equal)
        return [each[0] for each in made]

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sent = sum(
            tensor.nbytes for to, tensor in enumerate(tensors) if to != self.rank
        )
        begun = self._carry_out(
            self.operation(Kind.ALLTOALL, sent), "alltoallv", list(tensors)
        )
        return (
            list(tensors)
            if begun.payloads is None
            else [row[self.rank] for row in begun.payloads]
        )

    # --- point to point ---------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        message = Operation(
            Kind.SEND, tensor.nbytes, (self.members[self.place], self.members[to])
        )
        self.count(message)
        self.post(message, tensor, to, tag)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> SentRequest:
        self.send(tensor, to, tag)
        return SentRequest()

    # --- counts -----------------------------------------------------------------------------------------------

    def count(self, operation: Operation, calls: int | None = 0) -> None:
        if not self.clock.running or self.size == 1:
            return
        place = self.rank if operation.depends_on_place else self.place
        collectives, nbytes = operation.synchronises, operation.payload(place)
        # Those that it was split from count the same bytes.
        comm: SimulatedCommunicator[_Begun] | None = self
        while comm is not None:
            comm.collectives += collectives
            comm.bytes_sent += nbytes
            comm = comm._parent

    def operation(
        self, kind: Kind, nbytes: int, root: int = 0, linear: bool = False
    ) -> Operation:
        return Operation(kind, nbytes, self.members, root, linear)

    def _carry_out(
        self,
        operation: Operation,
        what: str,
        payload: Any,
        effect: Effect = lambda _: None,
    ) -> _Begun:
        begun = self._begin_counted(operation, what, payload, effect)
        self.end(begun)
        return begun

    def _begin_counted(
        self,
        operation: Operation,
        what: str,
        payload: Any,
        effect: Effect,
        *,
        blocking: bool = True,
    ) -> _Begun:
        """Count a synchronisation and begin it."""
        self.count(operation)
        return self.begin(operation, what, payload, effect, blocking=blocking)


class SimulatedRequest:
    """Implements `comm.base.Request` for an operation that has begun."""

    def __init__(self, comm: SimulatedCommunicator[_Begun], begun: _Begun) -> None:
        self._comm: SimulatedCommunicator[Any] = comm
        self._begun = begun

    def wait(self) -> None:
        self._comm.end(self._begun)

    def done(self) -> bool:
        return self._comm.has_ended(self._begun)


class SimulatedGathering:
    """Implements `comm.base.Gathering` for an allgather that has begun, whose messages are combined once for all."""

    def __init__(
        self,
        comm: SimulatedCommunicator[_Begun],
        begun: _Begun,
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._comm: SimulatedCommunicator[Any] = comm
        self._begun = begun
        self._tensor = tensor
        self._combine = combine

    def result(self) -> Tensor:
        comm = self._comm
        comm.end(self._begun)
        comm.clock.charge(self._combine, comm.size)
        result: Tensor | None = self._begun.result
        return (
            comm.clock.execute(self._combine, [self._tensor])
            if result is None
            else result
        )


class SentRequest:
    """Implements `comm.base.Request` for a message, which waits at the receiver: the sender goes on at once."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        return True


# --- arithmetic -------------------------------------------------------------------------------------------------------


def reduce_tensors(
    tensors: Sequence[Tensor],
    op: str,
    weights: Sequence[float | None],
    wire: str | None = None,
) -> Tensor:
    """Return sum_i w_i x_i, sum_i w_i x_i / sum_i w_i (`mean`), elementwise `max` or `min`; weights default to 1.

    With `wire` contributions and their sum are rounded to that dtype; sums and
    quotients have the tensors' dtype.
    """
    if op in _ELEMENTWISE:
        result = tensors[0].clone()
        for tensor in tensors[1:]:
            result = _ELEMENTWISE[op](result, tensor)
        return result
    # Added in the order of the ranks, so that the sum does not depend on who came
    # first.
    result = _contribution(tensors[0], weights[0], wire).clone()
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        result.add_(_contribution(tensor, weight, wire))
    result = _rounded(result, wire)
    if op == "mean":
        divide_(result, sum(1.0 if weight is None else weight for weight in weights))
    return result


def _contribution(tensor: Tensor, weight: float | None, wire: str | None) -> Tensor:
    return _rounded(tensor if weight is None else tensor * weight, wire)


def _rounded(tensor: Tensor, wire: str | None) -> Tensor:
    return tensor if wire is None else tensor.to(getattr(torch, wire)).to(tensor.dtype)


# --- a lone worker ----------------------------------------------------------------------------------------------------


class _Alone:
    """A worker of `size` that trains by itself; what it would receive from others is what it sends."""

    collectives, bytes_sent = 0, 0
    calls = None

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def barrier(self) -> None:
        """Nothing to wait for."""

    def alltoallv(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors)


def lone_communicator(size: int = 1, rank: int = 0) -> Communicator:
    """Return the communicator of a worker of `size` that trains by itself; it has what such a training calls, only."""
    return cast("Communicator", _Alone(size, rank))
