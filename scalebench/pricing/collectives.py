"""Ends of collectives by arrays over the workers: the arrival of a group's last member plus the cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from scalebench.pricing.charges import Charges, Floats
from scalebench.pricing.overlap import Stream
from scalebench.pricing.schedule import Event, Ints, Partition


class Meeting:
    """One collective of every group of a partition: arrivals, ends and costs by worker, state by group."""

    def __init__(self, event: Event, call: int) -> None:
        assert event.partition is not None
        self.key = id(event.partition), call
        self.event, self.partition = event, event.partition
        self.missing = self.partition.sizes.copy()
        self.settled = np.zeros(len(self.missing), dtype=bool)
        workers = len(self.partition.labels)
        self.arrivals, self.backwards, self.latest, self.ends, self.costs = np.zeros((5, workers))

    def join(self, ranks: Ints, now: Floats, backward: Floats) -> None:
        """Add the arrivals of `ranks`, whose last backward pass took `backward` seconds."""
        self.arrivals[ranks], self.backwards[ranks] = now, backward
        np.subtract.at(self.missing, self.partition.labels[ranks], 1)


class Collectives:
    """The collectives of one training."""

    def __init__(self, charges: Charges, workers: int) -> None:
        self._charges, self._costs = charges, charges.costs
        self._nodes: Ints = np.arange(workers) // charges.costs.network.ranks_per_node
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._streams: dict[tuple[int, int], Stream] = defaultdict(Stream)
        self._examples: dict[int, list[tuple[Ints, Sequence[int]]]] = {}

    def meeting(self, event: Event, call: int) -> Meeting:
        """Return the `call`-th collective of the event's partition."""
        key = (id(event.partition), call)
        if key not in self._meetings:
            self._meetings[key] = Meeting(event, call)
        return self._meetings[key]

    def settle(self, meeting: Meeting) -> None:
        """Set the ends of groups that are complete."""
        ready = (meeting.missing == 0) & ~meeting.settled
        meeting.settled |= ready
        if meeting.settled.all():  # all members have joined and hold it
            del self._meetings[meeting.key]
        if meeting.event.kind == "merge":
            self._merge(meeting)
            return
        labels = meeting.partition.labels
        latest = np.zeros(len(ready))
        np.maximum.at(latest, labels, meeting.arrivals)
        for alike, members in self._alike(meeting.partition):
            if meeting.event.overlap is not None and len(members) > 1:
                for label in alike[ready[alike]].tolist():
                    self._overlap(meeting, label)
                continue
            now = np.zeros(len(ready), dtype=bool)
            now[alike] = ready[alike]
            here = now[labels]
            cost = self._cost(meeting.event, members)
            meeting.latest[here] = latest[labels[here]]
            meeting.ends[here] = meeting.latest[here] + cost
            meeting.costs[here] = cost

    def _overlap(self, meeting: Meeting, label: int) -> None:
        overlap, members = meeting.event.overlap, meeting.partition.members(label)
        assert overlap is not None
        stream = self._streams[id(meeting.partition), label]
        ranks, before = np.asarray(members), stream.transferred_s
        arrivals, backwards = meeting.arrivals[ranks], meeting.backwards[ranks]
        end = stream.end((arrivals - backwards, backwards), overlap, self._costs, members)
        meeting.latest[ranks] = arrivals.max()
        meeting.ends[ranks] = max(float(arrivals.max()), end)
        meeting.costs[ranks] = stream.transferred_s - before

    def _cost(self, event: Event, members: Sequence[int]) -> float:
        """Return the seconds of a collective among `members`."""
        if event.overlap is not None:  # a lone worker: hooks and copies of the engine
            engine = self._costs.cost_of(event.overlap.engine)
            return engine.alone_s if engine is not None else 0.0
        if len(members) == 1:
            return 0.0
        if event.kind == "barrier":
            return self._costs.barrier(members)
        if event.root:
            members = (members[event.root], *members[: event.root], *members[event.root + 1 :])
        cost: float = getattr(self._costs, event.kind)(event.amount, members)
        return cost

    def _alike(self, partition: Partition) -> list[tuple[Ints, Sequence[int]]]:
        """Return labels of groups with equal cost, and the members of one of them."""
        if id(partition) not in self._examples:
            groups = len(partition.sizes)
            shapes = np.arange(groups)[:, None]
            if not self._costs.network.cluster.links.slow:  # by size, number of nodes and members of the fullest node
                (held, _), per_node = np.unique(np.stack([partition.labels, self._nodes]), axis=1, return_counts=True)
                fullest = np.zeros(groups, dtype=np.int64)
                np.maximum.at(fullest, held, per_node)
                shapes = np.stack([partition.sizes, np.bincount(held), fullest], axis=1)
            _, first, shape = np.unique(shapes, axis=0, return_index=True, return_inverse=True)
            self._examples[id(partition)] = [
                (np.flatnonzero(shape.ravel() == place), partition.members(int(label)))
                for place, label in enumerate(first)
            ]
        return self._examples[id(partition)]

    def _merge(self, meeting: Meeting) -> None:
        """Exchange in pairs at doubling distances: a message to the higher rank, a merge there, and its answer."""
        merging = self._charges.operation_s(meeting.event.name, 2)
        now, waits = meeting.arrivals.copy(), np.zeros(len(meeting.arrivals))
        ranks, stride = np.arange(len(now)), 1
        while stride < len(now):
            low = ranks[(ranks & stride) == 0]
            high = low | stride
            for source, rank, adding in ((low, high, merging), (high, low, 0.0)):
                message = self._messages(meeting.event.amount, source, rank)
                waits[rank] += np.maximum(0.0, now[source] - now[rank])
                now[rank] = np.maximum(now[rank], now[source] + message) + adding
                meeting.costs[rank] += message
            stride *= 2
        meeting.ends = now
        meeting.latest = meeting.arrivals + waits  # so that waiting is the sum over the exchanges

    def _messages(self, nbytes: int, sources: Ints, ranks: Ints) -> Floats:
        """Return the seconds of a message for each pair, equal for all pairs on one node and for all others."""
        if self._costs.network.cluster.links.slow:
            pairs = zip(sources.tolist(), ranks.tolist(), strict=True)
            return np.array([self._costs.message(nbytes, *pair) for pair in pairs])
        inside = self._nodes[sources] == self._nodes[ranks]
        seconds = np.empty(len(sources))
        for same in np.unique(inside):
            first = int(np.flatnonzero(inside == same)[0])
            seconds[inside == same] = self._costs.message(nbytes, int(sources[first]), int(ranks[first]))
        return seconds
