"""Communicator of virtual workers: real arithmetic, modelled time.

A collective completes at max(arrival) + cost. A non-blocking one overlaps with compute
and is charged at its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from scalebench.cluster.operation import Kind, Operation, busiest
from scalebench.comm.base import BETWEEN_STAGES, Overlap
from scalebench.comm.simulated import Effect, SimulatedCommunicator, reduce_tensors
from scalebench.comm.wire import wire_bytes
from scalebench.errors import RunError
from scalebench.pricing.costs import Costs
from scalebench.virtual.scheduler import Group, Rendezvous, Scheduler
from scalebench.virtual.virtual_clock import VirtualClock

_T = TypeVar("_T")
# (end, seconds of waiting, those of the message) of an exchange
ExchangeLap = tuple[float, float, float]


class VirtualCommunicator(SimulatedCommunicator[Rendezvous]):
    """Implements `comm.base.Communicator` for one virtual worker."""

    clock: VirtualClock

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
        """Create the communicator of `rank`; with `arithmetic=False` operations take time and change no tensors."""
        super().__init__(clock, group.ranks, rank, parent)
        self.scheduler, self.costs = scheduler, costs
        self.world_rank = group.ranks[rank]
        self._group = group
        self._arithmetic = arithmetic
        self._calls = 0
        self._splits = 0
        self._made = 0

    # --- rendezvous -------------------------------------------------------------------------------------------

    def begin(
        self,
        operation: Operation,
        what: str,
        payload: Any,
        effect: Effect = lambda _: None,
        *,
        blocking: bool = True,
    ) -> Rendezvous:
        rendezvous = self._meet(what, payload, effect)
        if rendezvous.end is not None and self.clock.running and self.size > 1:
            if operation.kind == Kind.ALLTOALL:
                # Each member knows its own row only; the busiest one sets the time.
                sizes = [
                    [tensor.nbytes for tensor in row] for row in rendezvous.payloads
                ]
                operation = operation._replace(nbytes=busiest(sizes))
            rendezvous.cost = self.costs.time(operation)
            rendezvous.end += rendezvous.cost
        return rendezvous

    def _meet(self, what: str, payload: Any, effect: Effect) -> Rendezvous:
        """Meet the others in `what`; it ends, without the time of its messages, when the last one comes."""
        # All members call in one order: equal numbers are one operation.
        call, self._calls = self._calls, self._calls + 1
        rendezvous = self._group.pending.get(call)
        if rendezvous is None:
            rendezvous = self._group.pending[call] = Rendezvous(what, self.size)
        if rendezvous.what != what:
            # Real ranks would hang here, or exchange what does not belong together.
            raise RunError(
                f"worker {self.rank} calls {what} while others call {rendezvous.what}"
            )
        rendezvous.join(self.rank, self.clock.now, payload)
        if not rendezvous.missing:
            # Members that have not ended it hold it themselves.
            del self._group.pending[call]
            if self._arithmetic:
                rendezvous.result = effect(rendezvous.payloads)
            rendezvous.end = rendezvous.latest
        return rendezvous

    def end(self, begun: Rendezvous) -> None:
        self._sleep_through(begun)
        assert begun.end is not None
        if self.clock.running:
            now = self.clock.now
            waited = max(0.0, min(begun.latest, begun.end) - now)
            self.clock.communicated(max(now, begun.end), waited, begun.cost)

    def has_ended(self, begun: Rendezvous) -> bool:
        # Members that are behind in virtual time may still come before this moment.
        self.scheduler.turn(self.world_rank, self.clock.now)
        return begun.end is not None and begun.end <= self.clock.now

    def _sleep_through(self, rendezvous: Rendezvous) -> None:
        """Sleep until its end is known and has come; the last member to come wakes the others."""
        if rendezvous.end is None:
            rendezvous.sleepers.append((self.world_rank, self.clock.now))
            self.scheduler.block(self.world_rank, rendezvous.what)
            return
        for rank, since in rendezvous.sleepers:
            self.scheduler.wake(
                rank, max(since, rendezvous.end) if self.clock.running else since
            )
        rendezvous.sleepers.clear()

    # --- other exchanges of all members -----------------------------------------------------------------------

    def cached(self, make: Callable[[], _T]) -> _T:
        call, self._made = self._made, self._made + 1
        if call not in self._group.results:
            self._group.results[call] = [self.clock.execute(make), self.size]
        result = self._group.results[call]
        result[1] -= 1
        if result[1] == 0:
            # The last member has it: a run makes as many as it takes steps.
            del self._group.results[call]
        made: _T = result[0]
        self.clock.charge(make)
        return made

    def by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        own: Sequence[Tensor],
        *equal: Any,
    ) -> Sequence[Tensor]:
        """Sleep until the last one comes, and computes; clocks do not wait."""

        def effect(payloads: list[Any]) -> list[Sequence[Tensor]]:
            return self.clock.execute_by_rows(compute, payloads, *equal)

        if not self._arithmetic or self.size == 1:
            return super().by_rows(compute, own, *equal)
        rendezvous = self._meet("rows", own, effect)
        if rendezvous.missing:
            rendezvous.sleepers.append((self.world_rank, self.clock.now))
            self.scheduler.block(self.world_rank, rendezvous.what)
        else:
            for rank, since in rendezvous.sleepers:
                self.scheduler.wake_untied(rank, since)
        self.clock.charge(compute)
        row: Sequence[Tensor] = rendezvous.result[self.rank]
        return row

    def overlapped_mean_(self, tensor: Tensor, overlap: Overlap) -> None:
        """Average `tensor` (the gradients), charged as bucketed allreduces overlapped with the last backward pass.

        The pass ended now; the release share of each bucket is calibrated.
        """

        def effect(payloads: list[Any]) -> None:
            tensors = [payload[0] for payload in payloads]
            result = reduce_tensors(
                tensors, "mean", [None] * len(tensors), overlap.wire
            )
            torch._foreach_copy_(tensors, [result] * len(tensors))

        if self.size == 1:
            self._charge_engine(overlap)
            return
        self.count(self.operation(Kind.ALLREDUCE, wire_bytes(tensor, overlap.wire)))
        # Buckets leave while the pass goes on, which has been charged as a whole.
        start = self.clock.now - self.clock.backward_s
        payload = (tensor, start, self.clock.backward_s)
        rendezvous = self._meet(f"overlapped mean ({overlap.engine})", payload, effect)
        if rendezvous.end is not None and self.clock.running:
            passes = np.array(
                [(start, seconds) for _, start, seconds in rendezvous.payloads]
            ).T
            stream = self._group.stream
            before = stream.transferred_s
            end = stream.end(
                (passes[0], passes[1]), overlap, self.costs, self._group.ranks
            )
            rendezvous.end, rendezvous.cost = (
                max(rendezvous.end, end),
                stream.transferred_s - before,
            )
        self.end(rendezvous)

    def _charge_engine(self, overlap: Overlap) -> None:
        """Charge hooks, wrappers and copies of the engine on a single worker."""
        cost = self.costs.cost_of(overlap.engine)
        if cost is not None and self.clock.running:
            self.clock.communicated(self.clock.now + cost.alone_s, 0.0)

    def merge_(self, tensor: Tensor, merge: Callable[[Tensor, Tensor], None]) -> None:
        """Merge all in pairs; each different merge is computed once, each message charged at both ends."""

        def cached(a: Tensor, b: Tensor) -> None:
            self.clock.execute(merge, a, b)

        def effect(payloads: list[Any]) -> None:
            merge_pairs_([payload[0] for payload in payloads], cached)

        def message(source: int, to: int) -> Operation:
            members = (self.members[source], self.members[to])
            return Operation(Kind.SEND, tensor.nbytes, members)

        def seconds(source: int, to: int) -> float:
            return self.costs.time(message(source, to))

        if self.size == 1:
            return
        laps: list[ExchangeLap] = []
        rendezvous = self._meet("merge", (tensor, self.clock.now, laps), effect)
        if rendezvous.end is not None and self.clock.running:
            came, merging = (
                [payload[1] for payload in rendezvous.payloads],
                self.clock.price(merge),
            )
            of_ranks = exchange_laps(came, seconds, merging)
            for payload, of_rank in zip(rendezvous.payloads, of_ranks, strict=True):
                payload[2].extend(of_rank)
        self._sleep_through(rendezvous)
        sent = message(self.place, self.place)
        for until, waited, cost in laps:
            self.count(sent)
            self.clock.communicated(until, waited, cost)

    # --- point to point ---------------------------------------------------------------------------------------

    def post(self, message: Operation, tensor: Tensor, to: int, tag: int) -> None:
        key = (self.rank, to, tag)
        # The message occupies no time of the sender, who goes on at once.
        sent = self.clock.now
        arrival = sent + self.costs.time(message)
        # A copy: the sender may change its tensor before the receiver takes it.
        self._group.mail.setdefault(key, []).append((sent, arrival, tensor.clone()))
        if key in self._group.receivers:
            self.scheduler.wake(self._group.receivers.pop(key), arrival)

    def recv_(
        self, tensor: Tensor, source: int, tag: int = 0, *, add: bool = False
    ) -> None:
        message = self._receive(source, tag, add=add)
        if add:
            tensor.add_(message)
        else:
            tensor.copy_(message)

    def recv_like(self, like: Tensor, source: int, tag: int = 0) -> Tensor:
        return self._receive(source, tag)

    def _receive(self, source: int, tag: int, *, add: bool = False) -> Tensor:
        """Wait for a message and return it, the copy that was made when it was sent."""
        key = (source, self.rank, tag)
        if not self._group.mail.get(key):
            self._group.receivers[key] = self.world_rank
            self.scheduler.block(self.world_rank, f"recv from {source}")
        # In the order of sending, as MPI keeps it between two ranks.
        sent, arrival, message = self._group.mail[key].pop(0)
        if self.clock.running:
            now = self.clock.now
            # Until it is sent the receiver waits; from then on the message travels.
            received, waited = max(now, arrival), max(0.0, sent - now)
            until = received + (self.costs.adding(message.nbytes) if add else 0.0)
            self.clock.communicated(until, waited, received - now - waited)
            if tag in BETWEEN_STAGES:
                self.clock.ledger.bubble += waited
        return message

    def split(self, color: Callable[[int], int]) -> VirtualCommunicator:
        group = self._group.part(self._splits, color, self.rank)
        self._splits += 1
        place = group.ranks.index(self.world_rank)
        return VirtualCommunicator(
            self.scheduler, group, place, self.clock, self.costs, self._arithmetic, self
        )


def merge_pairs_(
    vectors: Sequence[Tensor], merge: Callable[[Tensor, Tensor], None]
) -> None:
    """Replace each vector by the merge of all; each different merge is computed once."""
    stride = 1
    while stride < len(vectors):
        for rank in range(0, len(vectors), 2 * stride):
            merge(vectors[rank], vectors[rank + stride])
        stride *= 2
    torch._foreach_copy_(list(vectors[1:]), [vectors[0]] * (len(vectors) - 1))


def exchange_laps(
    starts: Sequence[float], seconds: Callable[[int, int], float], merging: float = 0.0
) -> list[list[ExchangeLap]]:
    """Return the exchanges of each rank arriving at `starts`: a message to the higher rank and its answer.

    `seconds(a, b)` is the time of a message from rank a to b, `merging` that of the
    merge before the answer.
    """
    now = list(starts)
    laps: list[list[ExchangeLap]] = [[] for _ in now]
    for low, high in _partners(len(now)):
        for source, rank in ((low, high), (high, low)):
            message = seconds(source, rank)
            until = max(now[rank], now[source] + message) + (
                merging if rank == high else 0.0
            )
            # transfer is not waiting
            laps[rank].append((until, max(0.0, now[source] - now[rank]), message))
            now[rank] = until
    return laps


def _partners(size: int) -> Iterator[tuple[int, int]]:
    stride = 1
    while stride < size:
        yield from ((low, low | stride) for low in range(size) if not low & stride)
        stride *= 2
