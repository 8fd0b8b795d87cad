"""Ends of exchanges by arrays (machines, workers): of collectives, and of those with a server or a shared model.

A collective ends at the arrival of a group's last member plus its cost. Servers and
shared models are closed queues of equal workers in their steady state: a round is the
longer one of a worker's own cycle and of serving all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.operation import Kind, Members, Operation
from scalebench.pricing.charges import Machines
from scalebench.pricing.costs import Costs, Prices
from scalebench.pricing.overlap import Stream, buckets_end
from scalebench.pricing.program import Program, Step
from scalebench.pricing.schedule import Event, Ints, RankGroups

Floats = NDArray[np.float64]


class Groups:
    """Groups of a partition, as far as the workers in the arrays are their members.

    `labels` (workers,) number the group of each. `alike` are pairs of labels whose
    groups cost the same, and the members of one of them.
    """

    def __init__(self, partition: RankGroups, workers: int, costs: Costs) -> None:
        self.partition = partition
        first, self.labels = np.unique(partition.labels[:workers], return_inverse=True)
        self.sizes = np.bincount(self.labels)
        self.order = np.argsort(self.labels, kind="stable")
        self.starts = np.cumsum(self.sizes) - self.sizes
        # A program joins the collectives of a partition in every step.
        self._of_programs: dict[Program, tuple[Ints, Ints]] = {}
        self.members = [partition.members(label) for label in first.tolist()]
        kinds: dict[object, list[int]] = defaultdict(list)
        for label, members in enumerate(self.members):
            # Groups of one shape cost the same, unless single links are slow: then each
            # group is a case of its own.
            kinds[
                members
                if costs.network.cluster.links.slow
                else costs.network.shape_of(members)
            ].append(label)
        self.alike = [
            (np.array(labels), self.members[labels[0]]) for labels in kinds.values()
        ]

    def of(self, program: Program) -> tuple[Ints, Ints]:
        """Return the labels of the workers of `program`, and the number of them in each group."""
        if program not in self._of_programs:
            labels = self.labels[program.ranks]
            self._of_programs[program] = (
                labels,
                np.bincount(labels, minlength=len(self.sizes)),
            )
        return self._of_programs[program]


class Rendezvous:
    """One collective of every group of a partition: arrivals, ends and costs by worker, state by group."""

    def __init__(
        self,
        event: Event,
        key: tuple[RankGroups, int],
        groups: Groups,
        shape: tuple[int, int],
    ) -> None:
        self.event, self.key, self.groups = event, key, groups
        # of groups whose collective of this number is another one
        self.others: dict[int, Event] = {}
        self.missing, self.awaited = groups.sizes.copy(), int(groups.sizes.sum())
        self.settled = np.zeros(len(self.missing), dtype=bool)
        self.arrivals = np.empty(shape)
        # variance of the slowest member, (groups, M)
        self.late = np.zeros((len(self.missing), shape[0]))
        self.passes: Floats | None = None  # seconds of the last backward passes
        # The same array stands for not settled yet: `settle` replaces it.
        self.latest = self.ends = self.costs = self.arrivals

    def kinds(self, labels: Ints) -> list[tuple[Event, Ints]]:
        """Return the collectives of the groups `labels`, each with its groups."""
        found: dict[object, tuple[Event, list[int]]] = {}
        for label in labels.tolist() if self.others else []:
            event = self.others.get(label, self.event)
            found.setdefault(_cost_key(event), (event, []))[1].append(label)
        return [(event, np.array(own)) for event, own in found.values()] or [
            (self.event, labels)
        ]

    def is_complete(self, program: Program) -> bool:
        """Return True if all members of the groups of its workers have joined."""
        return self.awaited == 0 or not self.missing[self.groups.of(program)[0]].any()


class Collectives:
    """The collectives of one training; where jitter is expected, the slowest member of a group is late by it."""

    def __init__(self, machines: Machines, shape: tuple[int, int]) -> None:
        self.prices, self.shape, self._machines = machines.prices, shape, machines
        self._expects = machines.spread is not None
        self._pending: dict[tuple[RankGroups, int], Rendezvous] = {}
        self._groups: dict[RankGroups, Groups] = {}
        self._streams: dict[tuple[Groups, int], list[Stream]] = {}

    def join(
        self,
        event: Event,
        call: int,
        program: Program,
        now: Floats,
        variance: Floats,
        passes: Floats | None,
    ) -> Rendezvous:
        """Return the `call`-th collective of the event's partition, which the workers of `program` join `now`.

        `variance` is that of their compute before, `passes` are the seconds of their
        last backward passes.
        """
        partition = event.partition
        assert partition is not None
        key = (partition, call)
        rendezvous = self._pending.get(key)
        if rendezvous is None:
            if partition not in self._groups:
                self._groups[partition] = Groups(
                    partition, self.shape[1], self.prices.distinct[0]
                )
            groups = self._groups[partition]
            rendezvous = self._pending[key] = Rendezvous(event, key, groups, self.shape)
        at = program.places
        labels, counts = rendezvous.groups.of(program)
        # Groups of a split may differ in their n-th collective, as the devices of DASO,
        # which take turns.
        if event is not rendezvous.event and _cost_key(event) != _cost_key(
            rendezvous.event
        ):
            rendezvous.others |= dict.fromkeys(labels.tolist(), event)
        rendezvous.arrivals[:, at] = now[:, at]
        # Members of one group may come with different programs.
        rendezvous.missing -= counts
        rendezvous.awaited -= len(program.ranks)
        if passes is not None:
            if rendezvous.passes is None:
                rendezvous.passes = np.empty(self.shape)
            rendezvous.passes[:, at] = passes
        if self._expects:
            np.maximum.at(rendezvous.late, labels, variance[:, at].T)
        return rendezvous

    def settle(self, rendezvous: Rendezvous) -> Ints | slice | None:
        """Set the ends of groups that are complete, and return their members that wait in it."""
        # Another program has settled it for all.
        if rendezvous.key not in self._pending:
            return None
        ready = (rendezvous.missing == 0) & ~rendezvous.settled
        if not ready.any():
            return None
        rendezvous.settled |= ready
        if rendezvous.settled.all():  # all members have joined and hold it
            self._pending.pop(rendezvous.key, None)
        groups, event = rendezvous.groups, rendezvous.event
        # Merging goes on in pairs, whose arrivals differ: where all workers are in the
        # arrays, each is followed.
        if event.kind == Kind.MERGE and self.shape[1] == len(groups.partition.labels):
            self._merge(rendezvous)
            return slice(None)
        latest, ends, cost = self._ends(rendezvous, ready)
        if len(ready) == 1:
            rendezvous.latest, rendezvous.ends, rendezvous.costs = (
                each.repeat(self.shape[1], axis=1) for each in (latest, ends, cost)
            )
            return slice(None) if event.blocking else None
        if rendezvous.ends is rendezvous.arrivals:
            rendezvous.latest, rendezvous.ends, rendezvous.costs = np.empty(
                (3, *self.shape)
            )
        # Only what has settled now: others of the same number are still awaited.
        here = ready[groups.labels]
        for kept, found in (
            (rendezvous.latest, latest),
            (rendezvous.ends, ends),
            (rendezvous.costs, cost),
        ):
            kept[:, here] = found[:, groups.labels[here]]
        waiting = ready & event.blocking
        for label, other in rendezvous.others.items():
            waiting[label] = ready[label] and other.blocking
        if waiting.all():
            return slice(None)
        return np.flatnonzero(waiting[groups.labels]) if waiting.any() else None

    def _ends(
        self, rendezvous: Rendezvous, ready: NDArray[np.bool_]
    ) -> tuple[Floats, Floats, Floats]:
        """Return the latest arrival, end and cost of each group, (M, groups); they hold for those that are `ready`."""
        groups, event = rendezvous.groups, rendezvous.event
        # One group of all, the usual case: a maximum without sorting by group.
        if len(ready) == 1:
            latest = rendezvous.arrivals.max(axis=1, keepdims=True)
        else:
            latest = np.maximum.reduceat(
                rendezvous.arrivals[:, groups.order], groups.starts, axis=1
            )
        cost = np.empty_like(latest)
        ends = np.empty_like(latest)
        for labels, members in groups.alike:
            if self._expects:
                latest[:, labels] += np.sqrt(
                    rendezvous.late[labels].T
                ) * expected_largest(len(members))
            # Averages begin during the backward pass, so that the latest arrival does
            # not say when.
            if event.overlap is not None and len(members) > 1:
                for label in labels[ready[labels]].tolist():
                    ends[:, label], cost[:, label] = self._overlapped(
                        rendezvous, label, latest[:, label]
                    )
                continue
            for each, own in rendezvous.kinds(labels):
                seconds = self._cost(each, members)[:, None]
                cost[:, own] = seconds
                ends[:, own] = latest[:, own] + seconds
        return latest, ends, cost

    def ends_together(
        self, steps: Sequence[Step], taken: Floats, latest: Floats, seconds: Floats
    ) -> tuple[Floats, Floats]:
        """Return the ends and costs of collectives of all workers, (steps, M), from the end of the one before each.

        `taken` (steps, M, workers) is the compute before each, which lasts until
        `latest` (steps, M) on the last one; `seconds` are those of the events of the
        epoch.
        """
        ends, costs = np.empty_like(latest), np.empty_like(latest)
        kinds: dict[object, list[int]] = defaultdict(list)
        for place, (event, *_) in enumerate(steps):
            assert event is not None
            kinds[_cost_key(event)].append(place)
        # Equal collectives are priced in one call.
        for places in kinds.values():
            event = steps[places[0]].event
            assert event is not None
            members = event.operation.members
            ends[places], costs[places] = latest[places], self._cost(event, members)
            if event.overlap is not None and event.exchanges:
                backward = seconds[[steps[place].backward for place in places]]
                begins = (
                    taken[places]
                    # The expected jitter of the slowest shifts the passes of all.
                    + (latest[places] - taken[places].max(axis=2))[:, :, None]
                    - backward
                )
                end, costs[places] = buckets_end(
                    (begins, backward),
                    event.overlap,
                    self.prices,
                    event.operation.members,
                )
                ends[places] = np.maximum(latest[places], end)
            else:
                ends[places] += costs[places]
        return ends, costs

    def _cost(self, event: Event, members: Members) -> Floats:
        """Return the seconds of a collective among `members`, (M,)."""
        if event.overlap is not None:  # a lone worker: hooks and copies of the engine
            return self.prices.of_engine(event.overlap.engine, "alone_s")
        if event.kind == Kind.MERGE:
            return self._doubling(event)
        return self.prices.time(event.operation._replace(members=members))

    def _overlapped(
        self, rendezvous: Rendezvous, label: int, latest: Floats
    ) -> tuple[Floats, Floats]:
        """Return the end of the averages that begin during the backward pass, and the cost of all of them, (M,)."""
        overlap, members = rendezvous.event.overlap, rendezvous.groups.members[label]
        assert overlap is not None
        assert rendezvous.passes is not None
        own = np.flatnonzero(rendezvous.groups.labels == label)
        arrivals, seconds = rendezvous.arrivals[:, own], rendezvous.passes[:, own]
        late = latest - arrivals.max(axis=1)  # by the expected jitter
        begins = arrivals - seconds + late[:, None]
        # DDP's stream begins anew with each pass; Horovod's loop goes on and remembers its
        # turns.
        if overlap.cycle_s == 0:
            end, cost = buckets_end((begins, seconds), overlap, self.prices, members)
            return np.maximum(latest, end), cost
        key = (rendezvous.groups, label)
        # A loop for each machine, as cycles of different networks drift apart.
        streams = self._streams.setdefault(key, [Stream() for _ in self.prices.costs])
        before = np.array([stream.transferred_s for stream in streams])
        passes = zip(begins, seconds, streams, self.prices.costs, strict=True)
        ends = np.array(
            [
                stream.end((b, s), overlap, costs, members)
                for b, s, stream, costs in passes
            ]
        )
        return np.maximum(latest, ends), np.array(
            [stream.transferred_s for stream in streams]
        ) - before

    def _merge(self, rendezvous: Rendezvous) -> None:
        """Exchange in pairs at doubling distances: a message to the higher rank, a merge there, and its answer."""
        merging = self._machines.operation_s(rendezvous.event.name, 2)[:, None]
        now, waits = rendezvous.arrivals.copy(), np.zeros(self.shape)
        costs, ranks, stride = np.zeros(self.shape), np.arange(self.shape[1]), 1
        # At distances 1, 2, 4, ...: pairs of a hypercube.
        while stride < len(ranks):
            low = ranks[(ranks & stride) == 0]
            high = low | stride
            for source, rank, adding in ((low, high, merging), (high, low, 0.0)):
                message = self.messages(rendezvous.event.operation.nbytes, source, rank)
                waits[:, rank] += np.maximum(0.0, now[:, source] - now[:, rank])
                now[:, rank] = (
                    np.maximum(now[:, rank], now[:, source] + message) + adding
                )
                costs[:, rank] += message
            stride *= 2
        rendezvous.ends, rendezvous.costs = now, costs
        # so that waiting is the sum over the exchanges
        rendezvous.latest = rendezvous.arrivals + waits

    def _doubling(self, event: Event) -> Floats:
        """Return the seconds of these exchanges between equal workers, of which a few stand for all, (M,)."""
        assert event.partition is not None
        # A pair at distance 2^k of equal workers costs what any such pair costs.
        levels = range((len(event.partition.labels) - 1).bit_length())
        messages = [
            self._message(event.operation.nbytes, 0, 1 << power) for power in levels
        ]
        merging = len(levels) * self._machines.operation_s(event.name, 2)
        return np.asarray(2 * np.sum(messages, axis=0) + merging)

    def _message(self, nbytes: float, source: int, to: int) -> Floats:
        return self.prices.time(Operation(Kind.SEND, nbytes, (source, to)))

    def messages(self, nbytes: float, sources: Ints, ranks: Ints) -> Floats:
        """Return the seconds of a message for each pair (M, pairs), equal for all on one node and for all others."""
        network = self.prices.distinct[0].network
        if network.cluster.links.slow:
            pairs = zip(sources.tolist(), ranks.tolist(), strict=True)
            return np.stack([self._message(nbytes, *pair) for pair in pairs], axis=1)
        # Ranks fill one node after the other.
        inside = sources // network.ranks_per_node == ranks // network.ranks_per_node
        seconds = np.empty((self.shape[0], len(sources)))
        for same in np.unique(inside):
            first = int(np.flatnonzero(inside == same)[0])
            message = self._message(nbytes, int(sources[first]), int(ranks[first]))
            seconds[:, inside == same] = message[:, None]
        return seconds


def _cost_key(event: Event) -> object:
    return event.operation._replace(members=()), event.overlap, event.blocking


@lru_cache
def expected_largest(count: int) -> float:
    """Return the expected largest of `count` standard normal numbers, by Blom's approximation (within 1 %)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


class Serving(NamedTuple):
    """Parameter server: `shards` answer side by side, after each push or, `in_rounds`, when all pushes have come."""

    shards: int = 1
    in_rounds: bool = False


class Queue:
    """The queue of `workers` for one server, or for shared models; `update` (M,) are seconds of an optimizer's step."""

    def __init__(
        self,
        prices: Prices,
        programs: Sequence[Program],
        workers: int,
        update: Floats,
        serving: Serving | None,
    ) -> None:
        self._prices, self._workers, self._serving = (
            prices,
            workers,
            serving or Serving(),
        )
        events = [
            step.event
            for program in programs
            for epoch in program.epochs
            for step in epoch.steps
        ]
        hosts = {
            event.operation.members[1]
            for event in events
            if event is not None and event.kind == Kind.ACCESS
        }
        self._one_host = len(hosts) == 1  # one for all, or one at each worker
        # end of the exchange before, by first worker of a program
        self._served: dict[int, Floats] = {}
        self._update = update[:, None]
        # where workers wait for one another
        self.bound = np.zeros(len(prices), dtype=bool)

    def exchange(self, event: Event, now: Floats, ranks: Ints) -> tuple[Floats, Floats]:
        """Return the end of an exchange that `ranks` begin `now`, and its seconds without others."""
        before = self._served.get(int(ranks[0]))
        until, alone = (self._access if event.kind == Kind.ACCESS else self._request)(
            event.operation, now, before
        )
        self._served[int(ranks[0])] = until
        return until, alone

    def _access(
        self, access: Operation, now: Floats, before: Floats | None
    ) -> tuple[Floats, Floats]:
        """Exclusive access to a shared model; where one host serves all, between two of a worker lie those of all."""
        # The last worker is on another node than the host, if any is.
        access = access._replace(members=(self._workers - 1, access.members[1]))
        alone = everyone = self._prices.time(access)[:, None]
        if self._one_host:
            everyone = self._of_all(access)
        return self._queued(now, before, alone, everyone), alone

    def _request(
        self, request: Operation, now: Floats, before: Floats | None
    ) -> tuple[Floats, Floats]:
        """Push to a server and its reply."""
        shards, ends = self._serving.shards, (self._workers - 1, request.members[1])
        # Each shard steps its part of the parameters, beside the others.
        served = self._update / shards
        serve = request._replace(nbytes=request.nbytes / shards, members=ends)
        travel = 2 * self._prices.time(serve._replace(kind=Kind.TRAVEL))[:, None]
        busy, all_busy = self._prices.time(serve)[:, None], self._of_all(serve)
        alone = travel + 2 * busy
        if not self._serving.in_rounds:
            # Every push is answered alone: all of them pass the server between two of
            # one worker.
            everyone = 2 * all_busy + self._workers * served
            return self._queued(now, before, alone + served, everyone), alone + served
        # The first round: all pushes come at once.
        if before is None:
            return now + travel + 2 * all_busy + served, alone
        # One reply after another: so come the next pushes, each served while others
        # compute.
        self.bound |= (all_busy > now - before).any(axis=1)
        after = np.maximum(
            now + travel + busy + served + all_busy, before + 2 * all_busy + served
        )
        return after, alone

    def _queued(
        self, now: Floats, before: Floats | None, alone: Floats, everyone: Floats
    ) -> Floats:
        """Return the end of an exchange of `alone` seconds, at least `everyone` after the worker's one before."""
        # The first exchange: all workers come at once.
        if before is None:
            return now + everyone
        after = np.maximum(now + alone, before + everyone)
        # Beyond rounding, a worker waits for others.
        self.bound |= (after > (now + alone) * (1 + 1e-12)).any(axis=1)
        return after

    def _of_all(self, farthest: Operation) -> Floats:
        """Return the sum over all workers of an operation, which differ by node only, from that of the last worker."""
        host = farthest.members[1]

        def total(costs: Costs) -> float:
            # Workers on the host's node, as ranks fill nodes in order and the host is
            # on the first.
            inside = min(costs.network.ranks_per_node, self._workers)
            near = sum(
                costs.time(farthest._replace(members=(rank, host)))
                for rank in range(inside)
            )
            outside = self._workers - inside
            return near + (outside * costs.time(farthest) if outside else 0.0)

        return self._prices.each(total, "of all", farthest)[:, None]
