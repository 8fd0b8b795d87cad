"""Communicator of virtual workers: real arithmetic, modelled time.

A collective completes at max(arrival) + cost. A non-blocking one overlaps with compute and is charged at its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from scalebench.cluster.operation import Kind, Operation, busiest
from scalebench.comm.base import BETWEEN_STAGES, Overlap
from scalebench.comm.wire import there_and_back, wire_bytes
from scalebench.errors import RunError
from scalebench.pricing.costs import Costs
from scalebench.virtual.clock import VirtualClock
from scalebench.virtual.reduction import ExchangeLap, exchange_laps, merge_pairs_, reduce_tensors
from scalebench.virtual.scheduler import Group, Rendezvous, Scheduler

_T = TypeVar("_T")


class VirtualRequest:
    """An allreduce in flight."""

    def __init__(self, comm: VirtualCommunicator, rendezvous: Rendezvous) -> None:
        self._comm, self._rendezvous = comm, rendezvous

    def wait(self) -> None:
        self._comm.await_end(self._rendezvous)

    def done(self) -> bool:
        self._comm.scheduler.turn(self._comm.world_rank, self._comm.clock.now)
        return self._rendezvous.end is not None and self._rendezvous.end <= self._comm.clock.now


class VirtualGathering:
    """An allgather in flight, whose messages are combined once for all workers."""

    def __init__(
        self,
        comm: VirtualCommunicator,
        rendezvous: Rendezvous,
        tensor: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._comm, self._rendezvous, self._tensor, self._combine = comm, rendezvous, tensor, combine

    def result(self) -> Tensor:
        self._comm.await_end(self._rendezvous)
        self._comm.clock.charge(self._combine, self._comm.size)
        result: Tensor | None = self._rendezvous.result
        return self._combine([self._tensor]) if result is None else result  # None without arithmetic


class SentRequest:
    """Request of a message, which waits at the receiver."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        return True


class VirtualCommunicator:
    """Implements `comm.base.Communicator` for one virtual worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: Group,
        rank: int,
        clock: VirtualClock,
        costs: Costs,
        arithmetic: bool = True,
        parent: VirtualCommunicator | None = None,
    ) -> None:
        """Create the communicator of `rank`; with `arithmetic=False` operations take time and change no tensors.

        Traffic of a split counts for its `parent` too, so that a worker's communicator has its total.
        """
        self.scheduler, self.clock, self.costs = scheduler, clock, costs
        self.rank, self.size = rank, len(group.ranks)
        self.world_rank = group.ranks[rank]
        self.collectives = 0
        self.bytes_sent = 0
        self.calls: int | None = None
        self._group = group
        self._arithmetic = arithmetic
        self._parent = parent
        self._calls = 0
        self._splits = 0
        self._made = 0

    # --- collectives ------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        barrier = self._operation(Kind.BARRIER, 0)
        self.await_end(self._start("barrier", None, lambda payloads: None, barrier))

    def allreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> None:
        self.await_end(self._start_allreduce(tensor, op, weight, wire))

    def mean_(self, tensors: Sequence[Tensor], weight: float | None = None) -> None:
        if len(tensors) == 1:
            self.allreduce_(tensors[0], "mean", weight=weight)
            return
        nbytes = sum(tensor.nbytes for tensor in tensors)

        def effect(payloads: list[Any]) -> None:
            weights = [payload[1] for payload in payloads]
            for same in zip(*(payload[0] for payload in payloads), strict=True):
                torch._foreach_copy_(list(same), [reduce_tensors(same, "mean", weights)] * len(same))

        self._collective(self._operation(Kind.ALLREDUCE, nbytes), "mean", (tensors, weight), effect)

    def iallreduce_(
        self, tensor: Tensor, op: str = "sum", *, weight: float | None = None, wire: str | None = None
    ) -> VirtualRequest:
        return VirtualRequest(self, self._start_allreduce(tensor, op, weight, wire))

    def _start_allreduce(self, tensor: Tensor, op: str, weight: float | None, wire: str | None) -> Rendezvous:
        nbytes = wire_bytes(tensor, wire)
        if wire is not None and self.size > 1:
            self.clock.rehearse(there_and_back, tensor, wire)
            self.clock.charge(there_and_back)

        def effect(payloads: list[Any]) -> None:
            tensors = [payload[0] for payload in payloads]
            result = reduce_tensors(tensors, op, [payload[1] for payload in payloads], wire)
            torch._foreach_copy_(tensors, [result] * len(tensors))

        return self._begin(self._operation(Kind.ALLREDUCE, nbytes), f"allreduce({op})", (tensor, weight), effect)

    def reduce_(self, tensor: Tensor, root: int = 0, op: str = "sum", *, linear: bool = False) -> None:
        def effect(payloads: list[Any]) -> None:
            payloads[root].copy_(reduce_tensors(payloads, op, [None] * len(payloads)))

        self._collective(self._operation(Kind.REDUCE, tensor.nbytes, root, linear), f"reduce({op})", tensor, effect)

    def reduce_scatter_(self, own: Tensor, tensor: Tensor, op: str = "sum") -> None:
        def effect(payloads: list[Any]) -> None:
            tensors = [payload[1] for payload in payloads]
            result = reduce_tensors(tensors, op, [None] * len(tensors)).view(len(payloads), -1)
            for (part, _), value in zip(payloads, result, strict=True):
                part.copy_(value.view_as(part))

        operation = self._operation(Kind.REDUCE_SCATTER, tensor.nbytes)
        self._collective(operation, f"reduce_scatter({op})", (own, tensor), effect)

    def broadcast_(self, tensor: Tensor, root: int = 0, *, linear: bool = False) -> None:
        def effect(payloads: list[Any]) -> None:
            for rank, each in enumerate(payloads):
                if rank != root:
                    each.copy_(payloads[root])

        self._collective(self._operation(Kind.BROADCAST, tensor.nbytes, root, linear), "broadcast", tensor, effect)

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        operation = self._operation(Kind.ALLGATHER, tensor.nbytes)
        rendezvous = self._collective(operation, "allgather", tensor.clone(), lambda payloads: None)
        return list(rendezvous.payloads)

    def allgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        return self.iallgather_combined(tensor, combine).result()

    def iallgather_combined(self, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> VirtualGathering:
        def effect(payloads: list[Any]) -> Tensor:
            self.clock.rehearse(combine, payloads * 2, times=2)  # for the cost of each further message
            return self.clock.execute(combine, payloads)

        rendezvous = self._begin(self._operation(Kind.ALLGATHER, tensor.nbytes), "allgather", tensor, effect)
        return VirtualGathering(self, rendezvous, tensor, combine)

    def cached(self, make: Callable[[], _T]) -> _T:
        call, self._made = self._made, self._made + 1
        if call not in self._group.results:
            self._group.results[call] = [self.clock.execute(make), self.size]
        result = self._group.results[call]
        result[1] -= 1
        if result[1] == 0:
            del self._group.results[call]
        made: _T = result[0]
        self.clock.charge(make)
        return made

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.count(sum(tensor.nbytes for rank, tensor in enumerate(tensors) if rank != self.rank))
        rendezvous = self._start("alltoallv", list(tensors), lambda payloads: None)
        if rendezvous.end is not None and self.clock.running:
            sizes = [[tensor.nbytes for tensor in row] for row in rendezvous.payloads]
            rendezvous.cost = self.costs.time(self._operation(Kind.ALLTOALL, busiest(sizes)))
            rendezvous.end += rendezvous.cost
        self.await_end(rendezvous)
        return [row[self.rank] for row in rendezvous.payloads]

    def overlapped_mean_(self, tensor: Tensor, overlap: Overlap) -> None:
        """Average `tensor` (the gradients), charged as bucketed allreduces overlapped with the last backward pass.

        The pass ended now; the release share of each bucket is calibrated.
        """

        def effect(payloads: list[Any]) -> None:
            tensors = [payload[0] for payload in payloads]
            result = reduce_tensors(tensors, "mean", [None] * len(tensors), overlap.wire)
            torch._foreach_copy_(tensors, [result] * len(tensors))

        if self.size == 1:
            self._charge_engine(overlap)
            return
        self.count(wire_bytes(tensor, overlap.wire))
        start = self.clock.now - self.clock.backward_s
        payload = (tensor, start, self.clock.backward_s)
        rendezvous = self._start(f"overlapped mean ({overlap.engine})", payload, effect)
        if rendezvous.end is not None and self.clock.running:
            passes = np.array([(start, seconds) for _, start, seconds in rendezvous.payloads]).T
            stream = self._group.stream
            before = stream.transferred_s
            end = stream.end((passes[0], passes[1]), overlap, self.costs, self._group.ranks)
            rendezvous.end, rendezvous.cost = max(rendezvous.end, end), stream.transferred_s - before
        self.await_end(rendezvous)

    def _charge_engine(self, overlap: Overlap) -> None:
        """Charge hooks, wrappers and copies of the engine on a single worker."""
        cost = self.costs.cost_of(overlap.engine)
        if cost is not None and self.clock.running:
            self.clock.communicated(self.clock.now + cost.alone_s, 0.0)

    # --- point to point ---------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        key = (self.rank, to, tag)
        if self.clock.running:
            self._tally(0, tensor.nbytes)
        sent = self.clock.now
        arrival = sent + self._message_s(tensor, self.rank, to)
        self._group.mail.setdefault(key, []).append((sent, arrival, tensor.clone()))
        if key in self._group.receivers:
            self.scheduler.wake(self._group.receivers.pop(key), arrival)

    def _message_s(self, tensor: Tensor, source: int, to: int) -> float:
        ends = (self._group.ranks[source], self._group.ranks[to])
        return self.costs.time(Operation(Kind.SEND, tensor.nbytes, ends))

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> SentRequest:
        self.send(tensor, to, tag)
        return SentRequest()

    def recv_(self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False) -> None:
        key = (source, self.rank, tag)
        if not self._group.mail.get(key):
            self._group.receivers[key] = self.world_rank
            self.scheduler.block(self.world_rank, f"recv from {source}")
        sent, arrival, message = self._group.mail[key].pop(0)
        if self.clock.running:
            now = self.clock.now
            received, waited = max(now, arrival), max(0.0, sent - now)
            until = received + (self.costs.adding(message.nbytes) if add else 0.0)
            self.clock.communicated(until, waited, received - now - waited)
            if tag in BETWEEN_STAGES:
                self.clock.ledger.bubble += waited
        if add:
            tensor.add_(message)
        else:
            tensor.copy_(message)

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        """Merge all in pairs; each different merge is computed once, each message charged at both ends."""

        def cached(a: Tensor, b: Tensor) -> None:
            self.clock.execute(merge, a, b)

        def effect(payloads: list[Any]) -> None:
            merge_pairs_([payload[0] for payload in payloads], cached)

        def seconds(source: int, to: int) -> float:
            return self._message_s(tensor, source, to)

        if self.size == 1:
            return
        laps: list[ExchangeLap] = []
        rendezvous = self._start("merge", (tensor, self.clock.now, laps), effect)
        if rendezvous.end is not None and self.clock.running:
            came, merging = [payload[1] for payload in rendezvous.payloads], self.clock.price(merge)
            of_ranks = exchange_laps(came, seconds, merging)
            for payload, of_rank in zip(rendezvous.payloads, of_ranks, strict=True):
                payload[2].extend(of_rank)
        self._sleep_through(rendezvous)
        for until, waited, cost in laps:
            self._tally(0, tensor.nbytes)
            self.clock.communicated(until, waited, cost)

    def split(self, color: Callable[[int], int]) -> VirtualCommunicator:
        group = self._group.part(self._splits, color, self.rank)
        self._splits += 1
        place = group.ranks.index(self.world_rank)
        return VirtualCommunicator(self.scheduler, group, place, self.clock, self.costs, self._arithmetic, self)

    # --- rendezvous -------------------------------------------------------------------------------------------

    def count(self, nbytes: int, calls: int | None = None) -> None:
        if self.clock.running and self.size > 1:
            self._tally(1, nbytes)

    def carried(self, nbytes: int, among: int | None = None, calls: int | None = None) -> None:
        """Unsupported: only this communicator carries a virtual worker's bytes."""
        raise NotImplementedError

    def _tally(self, collectives: int, nbytes: int) -> None:
        comm: VirtualCommunicator | None = self
        while comm is not None:
            comm.collectives += collectives
            comm.bytes_sent += nbytes
            comm = comm._parent

    def _operation(self, kind: Kind, nbytes: int, root: int = 0, linear: bool = False) -> Operation:
        return Operation(kind, nbytes, self._group.ranks, root, linear)

    def _collective(
        self, operation: Operation, what: str, payload: Any, effect: Callable[[list[Any]], Any]
    ) -> Rendezvous:
        rendezvous = self._begin(operation, what, payload, effect)
        self.await_end(rendezvous)
        return rendezvous

    def _begin(self, operation: Operation, what: str, payload: Any, effect: Callable[[list[Any]], Any]) -> Rendezvous:
        """Count a synchronisation and begin it."""
        self.count(operation.payload(self.rank))
        return self._start(what, payload, effect, operation)

    def _start(
        self, what: str, payload: Any, effect: Callable[[list[Any]], Any], operation: Operation | None = None
    ) -> Rendezvous:
        """Meet the others in `what`; without `operation` its caller charges it."""
        call, self._calls = self._calls, self._calls + 1
        rendezvous = self._group.pending.get(call)
        if rendezvous is None:
            rendezvous = self._group.pending[call] = Rendezvous(what, self.size)
        if rendezvous.what != what:
            raise RunError(f"worker {self.rank} calls {what} while others call {rendezvous.what}")
        rendezvous.join(self.rank, self.clock.now, payload)
        if not rendezvous.missing:
            del self._group.pending[call]
            if self._arithmetic:
                rendezvous.result = effect(rendezvous.payloads)
            if operation is not None and self.clock.running and self.size > 1:
                rendezvous.cost = self.costs.time(operation)
            rendezvous.end = rendezvous.latest + rendezvous.cost
        return rendezvous

    def await_end(self, rendezvous: Rendezvous) -> None:
        """Wait for the end of a rendezvous and record the time."""
        self._sleep_through(rendezvous)
        assert rendezvous.end is not None
        if self.clock.running:
            now = self.clock.now
            waited = max(0.0, min(rendezvous.latest, rendezvous.end) - now)
            self.clock.communicated(max(now, rendezvous.end), waited, rendezvous.cost)

    def _sleep_through(self, rendezvous: Rendezvous) -> None:
        if rendezvous.end is None:
            rendezvous.sleepers.append((self.world_rank, self.clock.now))
            self.scheduler.block(self.world_rank, rendezvous.what)
        else:
            self._wake_sleepers(rendezvous)

    def _wake_sleepers(self, rendezvous: Rendezvous) -> None:
        assert rendezvous.end is not None
        for rank, since in rendezvous.sleepers:
            self.scheduler.wake(rank, max(since, rendezvous.end) if self.clock.running else since)
        rendezvous.sleepers.clear()
