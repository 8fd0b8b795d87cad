"""Clock, communicator, shared state and server that write a worker's operations into its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from greenlet import getcurrent
from torch import Tensor

from scalebench.comm.base import Communicator, Overlap
from scalebench.comm.wire import wire_bytes
from scalebench.pricing.schedule import Event, Schedule
from scalebench.strategies.server_weights import Answer, Push, Reply
from scalebench.system.clock import Ledger, Task

_T = TypeVar("_T")


class RecordingClock:
    """Implements `system.clock.Clock`: writes each lap into a schedule and takes no time."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ledger = Ledger()
        self.running = False

    def start(self) -> None:
        self.running = True

    def did(self, task: Task, samples: int = 0) -> None:
        if self.running and task not in (Task.COMM, Task.OTHER):
            self.schedule.events.append(Event(task.name.lower(), samples))

    def work(self, operation: Callable[..., _T], *arguments: object) -> _T:
        if self.running:
            self.schedule.events.append(Event("operation", name=getattr(operation, "__qualname__", "")))
        return operation(*arguments)

    def communicated(self, kind: str, nbytes: int, members: Sequence[int], blocking: bool = True) -> None:
        if self.running:
            self.schedule.events.append(Event(kind, nbytes, tuple(members), blocking))

    def elapsed(self) -> float:
        return 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_running, self.running = self.running, False
        try:
            yield
        finally:
            self.running = was_running


class RecordedRequest:
    """Implements `comm.base.Request` for an operation at `position` of the schedule."""

    def __init__(self, clock: RecordingClock, position: int) -> None:
        self._clock, self._position = clock, position

    def wait(self) -> None:
        self._clock.communicated("wait", self._position, ())

    def done(self) -> bool:
        return True


class RecordingCommunicator:
    """Implements `comm.base.Communicator`: writes each operation into the schedule and leaves tensors alone."""

    def __init__(
        self,
        clock: RecordingClock,
        splits: dict[Any, dict[int, tuple[int, int, int]]],
        ranks: tuple[int, ...],
        rank: int,
        parent: RecordingCommunicator | None = None,
        path: tuple[Any, ...] = (),
    ) -> None:
        self.rank, self.size = rank, len(ranks)
        self.collectives = self.bytes_sent = 0
        self.calls: int | None = None
        self._clock, self._splits, self._ranks = clock, splits, ranks
        self._parent, self._path, self._split_calls = parent, path, count()

    def barrier(self) -> None:
        self._clock.communicated("barrier", 0, self._ranks)

    def allreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> None:
        self._collective("allreduce", wire_bytes(tensor, wire))

    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        self._collective("allreduce", sum(tensor.nbytes for tensor in tensors))

    def iallreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> RecordedRequest:
        self._collective("allreduce", wire_bytes(tensor, wire), blocking=False)
        return RecordedRequest(self._clock, len(self._clock.schedule.events) - 1)

    def overlapped_mean_(self, tensor: Tensor, overlap: Overlap) -> None:
        if self.size > 1:
            self._collective(f"overlapped allreduce ({overlap.engine})", wire_bytes(tensor, overlap.wire))

    def reduce_(self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False) -> None:
        nbytes = 0 if linear and self.rank == root else tensor.nbytes
        self._collective("linear reduce" if linear else "reduce", nbytes)

    def broadcast_(self, tensor: Tensor, root: int = 0, *, linear: bool = False) -> None:
        sent = tensor.nbytes * (self.size - 1 if linear else 1) if self.rank == root else 0
        self._collective("linear broadcast" if linear else "broadcast", sent)

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        self._collective("allgather", tensor.nbytes)
        return [tensor] * self.size

    def allgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._collective("allgather", tensor.nbytes)
        return self._clock.work(combine, [tensor] * self.size)

    def cached(self, make: Callable[[], _T]) -> _T:
        return self._clock.work(make)

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        for level in range(int(math.log2(self.size))):
            self.send(tensor, self.rank ^ (1 << level))

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._collective("alltoallv", sum(tensor.nbytes for to, tensor in enumerate(tensors) if to != self.rank))
        return list(tensors)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self._tally(0, tensor.nbytes)
        self._clock.communicated("send", tensor.nbytes, self._ranks[to : to + 1])

    def recv_(self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False) -> None:
        self._clock.communicated("receive", tensor.nbytes, self._ranks[source : source + 1])

    def split(self, color: int, key: int = 0) -> Communicator:
        path = (*self._path, next(self._split_calls))
        entries = self._splits.setdefault(path, {})
        entries[self.rank] = (color, key, self._ranks[self.rank])
        while len(entries) < self.size:
            recorder = getcurrent().parent
            assert recorder is not None
            recorder.switch()
        members = sorted((each[1], rank, each[2]) for rank, each in entries.items() if each[0] == color)
        ranks = tuple(world for _, _, world in members)
        rank = ranks.index(self._ranks[self.rank])
        return RecordingCommunicator(self._clock, self._splits, ranks, rank, self, (*path, color))

    def count(self, nbytes: int, calls: int | None = None) -> None:
        self._tally(1, nbytes)

    def carried(self, nbytes: int, among: int | None = None, calls: int | None = None) -> None:
        self._tally(1, nbytes)

    def _collective(self, kind: str, nbytes: int, *, blocking: bool = True) -> None:
        self._tally(1, nbytes)
        self._clock.communicated(kind, nbytes, self._ranks, blocking)

    def _tally(self, collectives: int, nbytes: int) -> None:
        comm: RecordingCommunicator | None = self
        while comm is not None and self._clock.running and self.size > 1:
            comm.collectives += collectives
            comm.bytes_sent += nbytes
            comm = comm._parent


class RecordingShared:
    """Implements `comm.base.SharedState`: accesses of one worker, which meets no other."""

    def __init__(self, comm: RecordingCommunicator, clock: RecordingClock, initial: Tensor, host: int) -> None:
        self.merges = 0
        self.vector = initial.clone()
        self._comm, self._clock, self._host = comm, clock, host

    @contextmanager
    def exclusive(self, *, counted: bool = True) -> Iterator[Tensor]:
        yield self.vector
        self.merges += 1
        self._clock.communicated("access", self.vector.nbytes, (self._host,))
        if counted:
            self._comm.count(self.vector.nbytes)


class RecordingServer:
    """Implements `comm.base.Server`: releases every push at once."""

    in_process = True

    def __init__(self, comm: RecordingCommunicator, clock: RecordingClock, weights: Tensor) -> None:
        self._comm, self._clock, self._weights = comm, clock, weights
        self._pushes = 0

    def request(self, payload: Any) -> Any:
        if payload is not None:
            self._comm.count(payload.nbytes)
            self._clock.communicated("request", payload.nbytes, ())
        self._pushes += isinstance(payload, Push) and payload.vector.numel() > 0
        return Answer(self._weights, Reply(0, True, 0, 0, self._pushes, 0))
