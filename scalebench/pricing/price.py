"""Time of recorded schedules on a machine, by arrays over the workers.

Between exchanges a worker's time adds up; a collective completes at the arrival of its last member plus its cost. This
holds in any order of evaluation, so that workers with equal programs are evaluated together, each time a number of an
array. The result equals that of the event engine, which also prices programs whose order depends on time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from scalebench.errors import RunError, ScalebenchError
from scalebench.pricing.charges import Charges, Floats
from scalebench.pricing.overlap import Stream
from scalebench.pricing.schedule import Event, Ints, Partition, Schedule
from scalebench.system.clock import Task

COMPUTE = {task.name.lower(): task for task in (Task.DATA, Task.SHUFFLE, Task.FORWARD, Task.BACKWARD, Task.UPDATE)}
_TIMED = ("access", "request", "alltoallv")  # their order, or their size, depends on time


class NotLockStepError(ScalebenchError):
    """The order of a program's operations depends on time: the event engine prices it."""


@dataclass
class Ledger:
    """Seconds of each worker, (workers,) or (tasks, workers): its time, by task, and waiting for others.

    `transfer` is the cost of its collectives, of which only `seconds[Task.COMM]` less `wait` is exposed.
    """

    now: Floats
    seconds: Floats
    wait: Floats
    transfer: Floats

    @classmethod
    def empty(cls, workers: int) -> Ledger:
        return cls(np.zeros(workers), np.zeros((len(Task), workers)), np.zeros(workers), np.zeros(workers))

    def of(self, worker: int) -> dict[str, float]:
        """Return the columns that the records have of one worker."""
        seconds = self.seconds[:, worker].tolist()
        return {
            "compute_s": seconds[Task.FORWARD] + seconds[Task.BACKWARD] + seconds[Task.UPDATE],
            "comm_s": seconds[Task.COMM],
            "wait_s": float(self.wait[worker]),
            "data_s": seconds[Task.DATA] + seconds[Task.SHUFFLE],
            "other_s": seconds[Task.OTHER],
        }

    def copy(self) -> Ledger:
        return Ledger(self.now.copy(), self.seconds.copy(), self.wait.copy(), self.transfer.copy())


@dataclass
class Priced:
    """Ledgers of a training at its end and at the end of each epoch."""

    end: Ledger
    epochs: list[Ledger] = field(default_factory=list)

    @property
    def train_s(self) -> float:
        """Seconds until the last worker has finished."""
        return float(self.end.now.max())


def is_lock_step(schedule: Schedule) -> bool:
    """Return True if the order of the program's operations does not depend on time."""
    return not any(event.kind in _TIMED for event in schedule.events)


def price(schedules: Sequence[Schedule], charges: Charges, workers: int | None = None) -> Priced:
    """Return the times of `workers` (default: one for each schedule); worker i follows schedule i modulo their number.

    With fewer schedules than workers a message takes as long as the worker's own last one to that peer would.

    Raises:
        NotLockStepError: a program asks a server, shares a model, or exchanges amounts that depend on others.
        RunError: workers wait for operations that others do not call.
    """
    workers = len(schedules) if workers is None else workers
    programs = _programs(schedules, workers)
    pricing = _Pricing(charges, workers, every_schedule=len(schedules) == workers)
    waiting = [pricing.walk(ranks, events) for ranks, events in programs]
    while waiting:
        before = pricing.progress
        waiting = [walk for walk in waiting if next(walk, "ended") != "ended"]
        if waiting and pricing.progress == before:
            raise RunError(f"{len(waiting)} programs wait for operations that others do not call")
    return Priced(pricing.ledger, [pricing.epochs[epoch] for epoch in sorted(pricing.epochs)])


@dataclass
class _Step:
    """An event of all workers with the same program; `amounts` (workers,) or one number for all."""

    event: Event
    amounts: Ints | int


def _programs(schedules: Sequence[Schedule], workers: int) -> list[tuple[Ints, list[_Step]]]:
    """Return the workers of each program, and its events: schedules that differ in amounts only are one program."""
    if not is_lock_step(schedules[0]):
        raise NotLockStepError("the order of its operations depends on time")
    alike: dict[object, list[int]] = defaultdict(list)
    for place, schedule in enumerate(schedules):
        messages = any(event.kind == "send" for event in schedule.events)
        key = [(e.kind, e.blocking, e.name, id(e.partition), e.root) for e in schedule.events]
        alike[place if messages else tuple(key)].append(place)
    found = []
    for places in alike.values():
        columns = zip(*(schedules[place].events for place in places), strict=True)
        rounds = [np.arange(place, workers, len(schedules)) for place in places]
        times = [len(each) for each in rounds]
        steps = []
        for column in columns:
            amounts = [event.amount for event in column]
            same = amounts.count(amounts[0]) == len(amounts)
            steps.append(_Step(column[0], amounts[0] if same else np.repeat(amounts, times)))
        found.append((np.concatenate(rounds), steps))
    return found


class _Meeting:
    """One collective of every group of a partition: arrivals and ends by worker."""

    def __init__(self, partition: Partition) -> None:
        workers = len(partition.labels)
        self.missing = partition.sizes.copy()
        self.arrivals, self.begins, self.backwards = np.zeros((3, workers))
        self.latest, self.ends, self.costs = np.full((3, workers), np.nan)


class _Pricing:
    """The times of one training while its programs are walked through."""

    def __init__(self, charges: Charges, workers: int, *, every_schedule: bool) -> None:
        self.charges, self.workers, self.every_schedule = charges, workers, every_schedule
        self.ledger = Ledger.empty(workers)
        self.epochs: dict[int, Ledger] = {}
        self.progress = 0
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._streams: dict[tuple[int, int], Stream] = defaultdict(Stream)
        self._examples: dict[int, list[tuple[Ints, Sequence[int]]]] = {}
        self._mail: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
        nodes = np.arange(workers) // charges.costs.network.ranks_per_node
        self._nodes: Ints = nodes

    def walk(self, ranks: Ints, steps: Sequence[_Step]) -> Iterator[str]:
        """Advance the workers `ranks` through their program; pauses where it waits for others."""
        charges = self.charges
        times, everyone = charges.times, len(ranks) == self.workers
        workers = slice(None) if everyone else ranks  # a view where possible
        step, factor, backward = -1, charges.factors(ranks, 0), np.zeros(len(ranks))
        calls: dict[int, int] = defaultdict(int)
        started: dict[int, _Meeting] = {}
        for place, (event, amounts) in enumerate((each.event, each.amounts) for each in steps):
            self.progress += 1
            if (task := COMPUTE.get(event.kind)) is not None:
                if task == Task.DATA:
                    step += 1
                    if charges.jitter is not None:
                        factor = charges.factors(ranks, step)
                if isinstance(amounts, int):
                    seconds = times.task_seconds(task, amounts) * factor
                else:
                    seconds = np.array([times.task_seconds(task, amount) for amount in amounts.tolist()]) * factor
                seconds = self._compute(ranks, workers, task, seconds)
                if task == Task.BACKWARD:
                    backward = seconds
            elif event.kind == "operation":
                assert isinstance(amounts, int)
                each = charges.operation_s(event.name, amounts)
                if each:
                    self._compute(ranks, workers, Task.OTHER, each * factor)
            elif event.kind == "epoch":
                self._close_epoch(event.amount, workers)
            elif event.kind == "send":
                self._send(ranks, event)
            elif event.kind == "receive":
                while not self._receive(ranks, event):
                    yield "waits"
            elif event.kind == "wait":
                assert isinstance(amounts, int)
                meeting = started.pop(amounts)
                yield from self._until_met(meeting, steps[amounts].event, ranks)
                self._communicated(workers, meeting)
            else:
                assert event.partition is not None
                call = calls[id(event.partition)]
                calls[id(event.partition)] += 1
                meeting = self._join(event, call, ranks, backward)
                if not event.blocking:
                    started[place] = meeting
                    continue
                yield from self._until_met(meeting, event, ranks)
                self._communicated(workers, meeting)

    def _compute(self, ranks: Ints, workers: Ints | slice, task: Task, seconds: Floats) -> Floats:
        if self.charges.slowness:
            now = self.ledger.now
            slow = [self.charges.slowness[r](now[r]) if r in self.charges.slowness else 1.0 for r in ranks.tolist()]
            seconds = seconds * np.array(slow)
        self.ledger.now[workers] += seconds
        self.ledger.seconds[task, workers] += seconds
        return seconds

    def _close_epoch(self, epoch: int, workers: Ints | slice) -> None:
        if epoch not in self.epochs:
            self.epochs[epoch] = self.ledger.copy()
        for kept, running in zip(vars(self.epochs[epoch]).values(), vars(self.ledger).values(), strict=True):
            kept[..., workers] = running[..., workers]

    # --- collectives --------------------------------------------------------------------------------------------

    def _join(self, event: Event, call: int, ranks: Ints, backward: Floats) -> _Meeting:
        partition = event.partition
        assert partition is not None
        meeting = self._meetings.get((id(partition), call))
        if meeting is None:
            meeting = self._meetings[id(partition), call] = _Meeting(partition)
        now = self.ledger.now[ranks]
        meeting.arrivals[ranks] = now
        if event.overlap is not None:
            meeting.begins[ranks], meeting.backwards[ranks] = now - backward, backward
        np.subtract.at(meeting.missing, partition.labels[ranks], 1)
        return meeting

    def _until_met(self, meeting: _Meeting, event: Event, ranks: Ints) -> Iterator[str]:
        """Wait until all members of the groups of `ranks` have arrived, and set their ends."""
        partition = event.partition
        assert partition is not None
        labels = partition.labels[ranks]
        while meeting.missing[labels].any():
            yield "waits"
        if np.isnan(meeting.ends[ranks]).any():
            self._settle(meeting, event, partition)

    def _settle(self, meeting: _Meeting, event: Event, partition: Partition) -> None:
        """Set the ends of the groups that are complete: the last arrival plus the cost."""
        if event.kind == "merge":
            self._merge(meeting, event)
            return
        latest = np.full(len(partition.sizes), -np.inf)
        np.maximum.at(latest, partition.labels, meeting.arrivals)
        for labels, members in self._alike(partition):
            ready = labels[(meeting.missing[labels] == 0)]
            if event.overlap is not None and len(members) > 1:
                for label in ready.tolist():
                    self._overlapped(meeting, event, partition, label)
                continue
            cost = self._cost(event, members)
            for label in ready.tolist() if len(ready) < len(partition.sizes) else [slice(None)]:
                here = partition.labels == label if isinstance(label, int) else slice(None)
                meeting.latest[here] = latest[partition.labels[here]]
                meeting.ends[here] = meeting.latest[here] + cost
                meeting.costs[here] = cost

    def _overlapped(self, meeting: _Meeting, event: Event, partition: Partition, label: int) -> None:
        assert event.overlap is not None
        members = partition.members(label)
        ranks = np.asarray(members)
        stream = self._streams[id(partition), label]
        before = stream.transferred_s
        passes = meeting.begins[ranks], meeting.backwards[ranks]
        end = stream.end(passes, event.overlap, self.charges.costs, members)
        meeting.latest[ranks] = meeting.arrivals[ranks].max()
        meeting.ends[ranks] = np.maximum(meeting.latest[ranks], end)
        meeting.costs[ranks] = stream.transferred_s - before

    def _cost(self, event: Event, members: Sequence[int]) -> float:
        """Return the seconds of a collective among `members`."""
        costs, nbytes = self.charges.costs, event.amount
        if event.overlap is not None:  # a lone worker: hooks and copies of the engine
            engine = costs.cost_of(event.overlap.engine)
            return engine.alone_s if engine is not None else 0.0
        if len(members) == 1:
            return 0.0
        if event.kind == "barrier":
            return costs.barrier(members)
        if event.root:
            members = (members[event.root], *members[: event.root], *members[event.root + 1 :])
        cost: float = getattr(costs, event.kind)(nbytes, members)
        return cost

    def _alike(self, partition: Partition) -> list[tuple[Ints, Sequence[int]]]:
        """Return labels of groups with equal cost, and the members of one of them."""
        if id(partition) not in self._examples:
            labels = np.arange(len(partition.sizes))
            if not self.charges.costs.network.cluster.links.slow:
                pairs = np.unique(np.stack([partition.labels, self._nodes]), axis=1, return_counts=True)
                held, per_node = pairs[0][0], pairs[1]
                fullest = np.zeros(len(labels), dtype=np.int64)
                np.maximum.at(fullest, held, per_node)
                shape = np.stack([partition.sizes, np.bincount(held), fullest], axis=1)
                _, first, of = np.unique(shape, axis=0, return_index=True, return_inverse=True)
                groups = [(np.flatnonzero(of.ravel() == k), int(label)) for k, label in enumerate(first)]
            else:
                groups = [(labels[label : label + 1], label) for label in labels.tolist()]
            self._examples[id(partition)] = [(same, partition.members(label)) for same, label in groups]
        return self._examples[id(partition)]

    def _communicated(self, workers: Ints | slice, meeting: _Meeting) -> None:
        """Record the time up to the end of a collective as communication."""
        now = self.ledger.now[workers]
        until = np.maximum(now, meeting.ends[workers])
        waited = np.maximum(0.0, np.minimum(meeting.latest[workers], meeting.ends[workers]) - now)
        self._record(workers, until, waited, meeting.costs[workers])

    def _record(self, workers: Ints | slice, until: Floats, waited: Floats, cost: Floats | float) -> None:
        ledger = self.ledger
        ledger.seconds[Task.COMM, workers] += until - ledger.now[workers]
        ledger.wait[workers] += waited
        ledger.transfer[workers] += cost
        ledger.now[workers] = until

    # --- messages -----------------------------------------------------------------------------------------------

    def _merge(self, meeting: _Meeting, event: Event) -> None:
        """Exchange in pairs at doubling distances: a message to the higher rank, a merge there, and its answer."""
        costs = self.charges.costs
        merging = self.charges.operation_s(event.name, 2)
        now, ranks = meeting.arrivals.copy(), np.arange(self.workers)
        waits = np.zeros(self.workers)
        meeting.costs[:] = 0.0
        stride = 1
        while stride < self.workers:
            low = ranks[(ranks & stride) == 0]
            high = low | stride
            for source, rank, adding in ((low, high, merging), (high, low, 0.0)):
                inside = self._nodes[source] == self._nodes[rank]
                if costs.network.cluster.links.slow:
                    pairs = zip(source.tolist(), rank.tolist(), strict=True)
                    message = np.array([costs.message(event.amount, *pair) for pair in pairs])
                else:
                    message = np.empty(len(source))
                    for same in np.unique(inside):
                        first = int(np.flatnonzero(inside == same)[0])
                        message[inside == same] = costs.message(event.amount, int(source[first]), int(rank[first]))
                waits[rank] += np.maximum(0.0, now[source] - now[rank])
                now[rank] = np.maximum(now[rank], now[source] + message) + adding
                meeting.costs[rank] += message
            stride *= 2
        meeting.ends = now
        meeting.latest = meeting.arrivals + waits  # so that waiting comes out as the sum over the exchanges

    def _send(self, ranks: Ints, event: Event) -> None:
        if self.every_schedule:
            rank, (to,) = int(ranks[0]), event.members
            sent = float(self.ledger.now[rank])
            arrival = sent + self.charges.costs.message(event.amount, rank, to)
            self._mail[rank, to, event.root].append((sent, arrival))

    def _receive(self, ranks: Ints, event: Event) -> bool:
        """Take a message if it was sent."""
        rank, (source,) = int(ranks[0]), event.members
        now = self.ledger.now[ranks]
        until, waited = now + self.charges.costs.message(event.amount, source, rank), np.zeros(len(ranks))
        if self.every_schedule:
            if not self._mail[source, rank, event.root]:
                return False
            sent, arrival = self._mail[source, rank, event.root].pop(0)
            until, waited = np.maximum(now, arrival), np.maximum(0.0, sent - now)
        adding = self.charges.costs.adding(event.amount) if event.name == "add" else 0.0
        self._record(ranks, until + adding, waited, until - now)
        return True
