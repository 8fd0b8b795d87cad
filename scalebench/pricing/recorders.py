"""Clock, communicator, shared state and server that write a worker's operations into its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar

from torch import Tensor

from scalebench.cluster.operation import Kind, Operation
from scalebench.comm.base import Communicator, Overlap
from scalebench.comm.wire import there_and_back, wire_bytes
from scalebench.pricing.machine import name_of
from scalebench.pricing.schedule import Event, RankGroups, Schedule
from scalebench.strategies.server_weights import Message, Reply
from scalebench.system.clock import Ledger, Task

_T = TypeVar("_T")
_EXCHANGES = (Task.COMM, Task.OTHER)  # written where they happen


class RecordingClock:
    """Implements `system.clock.Clock`: writes each lap into a schedule and takes no time."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ledger = Ledger()
        self.running = False
        self.watching = True  # until the program has ended
        self._results: dict[tuple[Callable[..., object], tuple[object, ...]], object] = {}

    def reads(self, what: str) -> None:
        """Note that the program depends on `what` (loss, seed, placement, rank)."""
        if self.watching:
            setattr(self.schedule, f"reads_{what}", True)

    def start(self) -> None:
        self.running = True

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        if self.running and (lap := _lap(task, samples, share)) is not None:
            self.schedule.events.append(lap)

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        self.charge(operation)
        if only_changes_arguments(operation):
            return None  # type: ignore[return-value]
        return self.result_of(operation, *arguments)

    def result_of(self, operation: Callable[..., _T], *arguments: object) -> _T:
        """Return what `operation` returns, which is remembered on tensors that have no data.

        Their shapes are all there is of them, and those of a result follow from those of the arguments. Torch computes
        on them in Python: a message of many small parts takes a second.
        """
        forms = tuple(map(_form, arguments))
        if None in forms:
            return operation(*arguments)
        if (operation, forms) not in self._results:
            self._results[operation, forms] = operation(*arguments)
        return self._results[operation, forms]  # type: ignore[return-value]

    def charge(self, operation: Callable[..., Any], messages: int = 2) -> None:
        """Write an operation on the messages of so many workers."""
        self.wrote(Event("operation", messages, name=name_of(operation)))

    def wrote(self, event: Event) -> None:
        if self.running:
            self.schedule.events.append(event)

    def elapsed(self) -> float:
        return 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = was_running


def only_changes_arguments(operation: Callable[..., Any]) -> bool:
    """Return True if `operation` is declared to return None: without arithmetic it has nothing to do.

    Torch computes on meta tensors in Python, in milliseconds, and loads sympy for that.
    """
    return "return" in (said := getattr(operation, "__annotations__", {})) and said["return"] in ("None", None)


def _form(argument: object) -> object:
    """Return what the shape of a result depends on; None if that may be more than shapes, as of an object."""
    if isinstance(argument, Tensor):
        return (argument.shape, argument.dtype) if argument.is_meta else None
    if isinstance(argument, list):
        forms = tuple(map(_form, argument))
        return None if None in forms else forms
    return float if isinstance(argument, float) else None


@cache
def _lap(task: Task, samples: int, share: float) -> Event | None:
    return None if task in _EXCHANGES else Event(task.name.lower(), samples, share=share)


class RecordedRequest:
    """Implements `comm.base.Request` for an operation at `position` of the schedule."""

    def __init__(self, clock: RecordingClock, position: int) -> None:
        self._clock, self._position = clock, position

    def wait(self) -> None:
        self._clock.wrote(Event("wait", self._position))

    def done(self) -> bool:
        return True


class RecordedGathering:
    """Implements `comm.base.Gathering` for an allgather at `position` of the schedule."""

    def __init__(
        self,
        clock: RecordingClock,
        position: int,
        tensor: Tensor,
        members: int,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._clock, self._position, self._tensor = clock, position, tensor
        self._members, self._combine = members, combine

    def result(self) -> Tensor:
        self._clock.wrote(Event("wait", self._position))
        self._clock.charge(self._combine, self._members)
        return self._clock.result_of(self._combine, [self._tensor])


class SentRequest:
    """Implements `comm.base.Request` for a message, which nothing waits for."""

    def wait(self) -> None:
        """The sender goes on at once."""

    def done(self) -> bool:
        return True


class RecordingCommunicator:
    """Implements `comm.base.Communicator`: writes each operation into the schedule and leaves tensors alone."""

    def __init__(
        self, clock: RecordingClock, partition: RankGroups, worker: int, parent: RecordingCommunicator | None = None
    ) -> None:
        self._clock, self._partition, self._worker, self._parent = clock, partition, worker, parent
        self._ranks = partition.members(int(partition.labels[worker]))
        self.place, self.size = self._ranks.index(worker), len(self._ranks)  # `rank` is noted as read
        self.collectives = self.bytes_sent = 0
        self.calls: int | None = None
        self._splits = count()

    @property
    def rank(self) -> int:
        self._clock.reads("rank")
        return self.place

    def barrier(self) -> None:
        self._write(Kind.BARRIER, 0)

    def allreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> None:
        self._cast(wire)
        self._collective(Kind.ALLREDUCE, wire_bytes(tensor, wire))

    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        self._collective(Kind.ALLREDUCE, sum(tensor.nbytes for tensor in tensors))

    def iallreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> RecordedRequest:
        self._cast(wire)
        self._collective(Kind.ALLREDUCE, wire_bytes(tensor, wire), blocking=False)
        return RecordedRequest(self._clock, len(self._clock.schedule.events) - 1)

    def overlapped_mean_(self, tensor: Tensor, overlap: Overlap) -> None:
        if self.size > 1:
            self._tally(1, wire_bytes(tensor, overlap.wire))
        self._write("overlapped allreduce", wire_bytes(tensor, overlap.wire), overlap=overlap)

    def reduce_(self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False) -> None:
        self._collective(Kind.REDUCE, tensor.nbytes, root=root, linear=linear)

    def reduce_scatter_(self, own: Tensor, tensor: Tensor, op: str = "sum") -> None:
        self._collective(Kind.REDUCE_SCATTER, tensor.nbytes)

    def broadcast_(self, tensor: Tensor, root: int = 0, *, linear: bool = False) -> None:
        self._collective(Kind.BROADCAST, tensor.nbytes, root=root, linear=linear)

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        self._collective(Kind.ALLGATHER, tensor.nbytes)
        return [tensor] * self.size

    def allgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._collective(Kind.ALLGATHER, tensor.nbytes)
        self._clock.charge(combine, self.size)
        return self._clock.result_of(combine, [tensor])

    def iallgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> RecordedGathering:
        self._collective(Kind.ALLGATHER, tensor.nbytes, blocking=False)
        place = len(self._clock.schedule.events) - 1
        return RecordedGathering(self._clock, place, tensor, self.size, combine)

    def cached(self, make: Callable[[], _T]) -> _T:
        return self._clock.work(make)

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        if self.size > 1:
            self._tally(0, tensor.nbytes * (self.size.bit_length() - 1))
            self._write("merge", tensor.nbytes, name=name_of(merge))

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._collective(Kind.ALLTOALL, sum(tensor.nbytes for to, tensor in enumerate(tensors) if to != self.rank))
        return list(tensors)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self._tally(0, tensor.nbytes)
        self._clock.wrote(Event(Kind.SEND, tensor.nbytes, self._ranks[to : to + 1], root=tag))

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> SentRequest:
        self.send(tensor, to, tag)
        return SentRequest()

    def recv_(self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False) -> None:
        peer, what = self._ranks[source : source + 1], "add" if add else ""
        self._clock.wrote(Event("receive", tensor.nbytes, peer, name=what, root=tag))

    def split(self, color: Callable[[int], int]) -> Communicator:
        self._clock.reads("rank")
        return RecordingCommunicator(self._clock, self._partition.part(next(self._splits), color), self._worker, self)

    def count(self, nbytes: int, calls: int | None = None) -> None:
        self._tally(1, nbytes)

    def carried(self, nbytes: int, among: int | None = None, calls: int | None = None) -> None:
        self._tally(1, nbytes)

    def _collective(
        self, kind: Kind, nbytes: int, *, root: int = 0, linear: bool = False, blocking: bool = True
    ) -> None:
        operation = Operation(kind, nbytes, self._ranks, root, linear)
        if operation.depends_on_place:
            self._clock.reads("rank")
        self._tally(1, operation.payload(self.place))
        self._write(kind, nbytes, root=root, linear=linear, blocking=blocking)

    def _cast(self, wire: str | None) -> None:
        if wire is not None and self.size > 1:
            self._clock.charge(there_and_back)

    def _write(self, kind: str, nbytes: int, **how: Any) -> None:
        self._clock.wrote(Event(kind, nbytes, self._ranks, partition=self._partition, **how))

    def _tally(self, collectives: int, nbytes: int) -> None:
        comm: RecordingCommunicator | None = self
        while comm is not None and self._clock.running and self.size > 1:
            comm.collectives += collectives
            comm.bytes_sent += nbytes
            comm = comm._parent


class RecordingShared:
    """Implements `comm.base.SharedState`: accesses of one worker, which meets no other."""

    __slots__ = ("_clock", "_comm", "_host", "merges", "vector")  # of 65,536 workers each may have one

    def __init__(self, comm: RecordingCommunicator, clock: RecordingClock, initial: Tensor, host: int) -> None:
        self.merges = 0
        self.vector = initial.clone() if host == comm.place else initial  # only its host has memory for it
        self._comm, self._clock, self._host = comm, clock, host

    @contextmanager
    def exclusive(self, *, counted: bool = True) -> Iterator[Tensor]:
        yield self.vector
        self.merges += 1
        self._clock.wrote(Event(Kind.ACCESS, self.vector.nbytes, (self._host,)))
        if counted:
            self._comm.count(self.vector.nbytes)


class RecordingServer:
    """Implements `comm.base.Server`: releases every push at once."""

    in_process = True

    def __init__(self, comm: RecordingCommunicator, clock: RecordingClock, weights: Tensor) -> None:
        self._comm, self._clock, self._weights = comm, clock, weights
        self._pushes = 0

    def request(self, payload: Any) -> Any:
        self._comm.count(payload.nbytes)
        self._clock.wrote(Event("request", payload.nbytes))
        self._pushes += isinstance(payload, Message) and payload.vector.numel() > 0
        return Message(self._weights, Reply(0, True, 0, 0, self._pushes, 0))
