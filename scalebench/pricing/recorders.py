"""Clock, communicator, shared state and server that write a worker's operations into its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from scalebench.cluster.operation import Kind, Operation
from scalebench.comm.base import Overlap
from scalebench.comm.simulated import Effect, SimulatedCommunicator
from scalebench.comm.wire import wire_bytes
from scalebench.pricing.machine import name_of
from scalebench.pricing.schedule import Event, RankGroups, Schedule
from scalebench.strategies.server_weights import Message, Reply
from scalebench.system.clock import Ledger, Task

_T = TypeVar("_T")
_EXCHANGES = (Task.COMM, Task.OTHER)  # written where they happen
_SERVER = 0  # worker on whose node the server is


class RecordingClock:
    """Implements `system.clock.Clock`: writes each lap into a schedule and takes no time."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ledger = Ledger()
        self.running = False
        self.watching = True  # until the program has ended
        self._results: dict[
            tuple[Callable[..., object], tuple[object, ...]], object
        ] = {}

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
        return self.execute(operation, *arguments)

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        """Return what `operation` returns, which is remembered on tensors that have no data.

        Their shapes are all there is of them, and those of a result follow from those
        of the arguments. Torch computes on them in Python: a message of many small
        parts takes a second.
        """
        forms = tuple(map(_form, arguments))
        if None in forms:
            return operation(*arguments)
        if (operation, forms) not in self._results:
            self._results[operation, forms] = operation(*arguments)
        return self._results[operation, forms]  # type: ignore[return-value]

    def charge(self, operation: Callable[..., Any], members: int = 2) -> None:
        """Write an operation on the messages of so many workers."""
        self.wrote(Event("other", members, name=name_of(operation)))

    def rehearse(
        self, operation: Callable[..., object], *arguments: object, times: int = 1
    ) -> None:
        """Nothing is measured."""

    def wrote(self, event: Event) -> None:
        # Before the start, in pauses and behind the end no clock counts.
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
    return "return" in (said := getattr(operation, "__annotations__", {})) and said[
        "return"
    ] in ("None", None)


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
    return (
        None if task in _EXCHANGES else Event(task.name.lower(), samples, share=share)
    )


class Recorded(NamedTuple):
    """Implements `comm.simulated.Begun`; `position` is the place in the schedule of an operation that is waited for."""

    position: int | None
    payloads: None = None
    result: None = None


class RecordingCommunicator(SimulatedCommunicator[Recorded]):
    """Implements `comm.base.Communicator`: writes each operation into the schedule and leaves tensors alone.

    Replicas of a model have `parts` workers each. A rank among the workers of one
    replica says which part a worker holds, and not which worker it is.
    """

    clock: RecordingClock

    def __init__(
        self,
        clock: RecordingClock,
        partition: RankGroups,
        worker: int,
        parent: RecordingCommunicator | None = None,
        *,
        parts: int = 1,
    ) -> None:
        members = partition.members(int(partition.labels[worker]))
        super().__init__(clock, members, members.index(worker), parent)
        self._partition, self._worker, self._parts = partition, worker, parts
        self._within_replica = parts > 1 and members[0] // parts == members[-1] // parts
        # Members split in the same order: by the number recordings find the groups of
        # each other.
        self._splits = count()

    @property
    def rank(self) -> int:
        self._read_rank()
        return self.place

    def _read_rank(self) -> None:
        if not self._within_replica:
            self.clock.reads("rank")

    def begin(
        self,
        operation: Operation,
        what: str,
        payload: Any,
        effect: Effect = lambda _: None,
        *,
        blocking: bool = True,
    ) -> Recorded:
        self.clock.wrote(Event.of(operation, self._partition, blocking=blocking))
        return Recorded(None if blocking else len(self.clock.schedule.events) - 1)

    def end(self, begun: Recorded) -> None:
        if begun.position is not None:
            self.clock.wrote(Event("wait", begun.position))

    def has_ended(self, begun: Recorded) -> bool:
        return True

    def overlapped_mean_(self, tensor: Tensor, overlap: Overlap) -> None:
        operation = self.operation(Kind.ALLREDUCE, wire_bytes(tensor, overlap.wire))
        self.count(operation)
        self.clock.wrote(Event.of(operation, self._partition, overlap=overlap))

    def cached(self, make: Callable[[], _T]) -> _T:
        return self.clock.work(make)

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        if self.size > 1:
            # a message to a partner at each of lg K distances
            sent = tensor.nbytes * (self.size.bit_length() - 1)
            self.count(self.operation(Kind.SEND, sent))
            operation = self.operation(Kind.MERGE, tensor.nbytes)
            self.clock.wrote(Event.of(operation, self._partition, name=name_of(merge)))

    def post(self, message: Operation, tensor: Tensor, to: int, tag: int) -> None:
        self.clock.wrote(Event.of(message, tag=tag))

    def recv_(
        self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False
    ) -> None:
        message = Operation(
            Kind.SEND, tensor.nbytes, (self.members[source], self.members[self.place])
        )
        self.clock.wrote(
            Event("receive", operation=message, name="add" if add else "", tag=tag)
        )

    def recv_like(self, like: Tensor, source: int, tag: int = 0) -> Tensor:
        self.recv_(like, source, tag)
        return like.clone()

    def split(self, color: Callable[[int], int]) -> RecordingCommunicator:
        self._read_rank()
        partition = self._partition.part(next(self._splits), color)
        return RecordingCommunicator(
            self.clock, partition, self._worker, self, parts=self._parts
        )


class RecordingShared:
    """Implements `comm.base.SharedState`: accesses of one worker, which meets no other."""

    __slots__ = (
        "_clock",
        "_comm",
        "_host",
        "merges",
        "vector",
    )  # of 65,536 workers each may have one

    def __init__(
        self,
        comm: RecordingCommunicator,
        clock: RecordingClock,
        initial: Tensor,
        host: int,
    ) -> None:
        self.merges = 0
        # only its host has memory for it
        self.vector = initial.clone() if host == comm.place else initial
        self._comm, self._clock, self._host = comm, clock, host

    @contextmanager
    def exclusive(self, *, counted: bool = True) -> Iterator[Tensor]:
        yield self.vector
        self.merges += 1
        access = Operation(
            Kind.ACCESS, self.vector.nbytes, (self._comm.place, self._host)
        )
        self._clock.wrote(Event.of(access))
        if counted:
            self._comm.count(access)


class RecordingServer:
    """Implements `comm.base.Server`: releases every push at once."""

    in_process = True

    def __init__(
        self, comm: RecordingCommunicator, clock: RecordingClock, weights: Tensor
    ) -> None:
        self._comm, self._clock, self._weights = comm, clock, weights
        self._pushes = 0

    def request(self, payload: Any) -> Any:
        members = (self._comm.place, _SERVER)
        served = Operation(Kind.SERVE, payload.nbytes, members)
        self._comm.count(served)
        self._clock.wrote(Event.of(served))
        self._pushes += isinstance(payload, Message) and payload.vector.numel() > 0
        return Message(self._weights, Reply(0, True, 0, 0, self._pushes, 0))
