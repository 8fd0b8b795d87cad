"""Time of a program of equal workers on many machines at once, by arrays over the machines.

Where workers do not differ, those of the first node stand for all: a collective completes when its members among them
have arrived, plus its cost among all members. The result equals that of `price` without differences. Jitter enters by
the expected wait for the slowest of p workers; servers and shared models by the steady state of a closed queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from scalebench.errors import RunError
from scalebench.pricing.costs import Costs
from scalebench.pricing.overlap import Stream, bucket_plan
from scalebench.pricing.price import COMPUTE
from scalebench.pricing.schedule import Event, Schedule
from scalebench.system.clock import Task

Floats = NDArray[np.float64]
COLUMNS = ("time", "compute", "data", "comm", "wait", "transfer")  # of a ledger; wait is part of comm
_TIME, _COMPUTE, _DATA, _COMM, _WAIT, _TRANSFER = range(len(COLUMNS))


class Machines(NamedTuple):
    """Prices of M machines: costs of communication, and seconds of a worker's step, each (M,).

    `data` are seconds of a step in which the worker waits for its batch, `jitter` the standard deviation of a step's
    time relative to its mean.
    """

    costs: Sequence[Costs]
    forward: Floats
    backward: Floats
    update: Floats
    data: Floats
    jitter: Floats

    def with_joined(self, steps: Floats) -> Machines:
        """Return the machines on which a step takes the time of `steps` (M,)."""
        whole = {name: getattr(self, name) * steps for name in ("forward", "backward", "update", "data")}
        return self._replace(**whole, jitter=self.jitter / np.sqrt(steps))


class Serving(NamedTuple):
    """Parameter server: `shards` answer side by side, after each push or, `in_rounds`, when all pushes have come."""

    shards: int
    in_rounds: bool


class _Operation(NamedTuple):
    """Consecutive compute of `counts` of tasks, or one further event."""

    event: Event | None
    counts: dict[Task, int]
    place: int  # of the event in the schedule


@dataclass
class Program:
    """Schedules of the first workers of a run among `workers` equal ones, compute joined."""

    workers: int
    operations: list[list[_Operation]]
    epochs: int
    serving: Serving | None = None
    shared_hosts: int = 0  # vectors that workers merge into: one for all, or one at each worker

    @classmethod
    def of(cls, schedules: Sequence[Schedule], workers: int, serving: Serving | None = None) -> Program:
        """Join the compute of `schedules`."""
        operations = [list(_joined(schedule)) for schedule in schedules]
        events = [operation.event for own in operations for operation in own if operation.event is not None]
        hosts = {event.members[0] for event in events if event.kind == "access"}
        epochs = sum(event.kind == "epoch" for event in schedules[0].events)
        return cls(workers, operations, epochs, serving, shared_hosts=len(hosts))

    @property
    def is_queue(self) -> bool:
        """True if workers queue for a server or a shared model: its steady state is priced."""
        return any(op.event is not None and op.event.kind in ("access", "request") for op in self.operations[0])


def _joined(schedule: Schedule) -> Iterator[_Operation]:
    counts: dict[Task, int] = defaultdict(int)
    for place, event in enumerate(schedule.events):
        if (task := COMPUTE.get(event.kind)) is not None:
            counts[task] += 1
        elif event.kind not in ("operation", "send"):  # neither is charged: not measured, or by its receiver
            if counts:
                yield _Operation(None, dict(counts), place)
                counts = defaultdict(int)
            yield _Operation(event, {}, place)
    if counts:
        yield _Operation(None, dict(counts), len(schedule.events))


def walk(program: Program, machines: Machines) -> tuple[Floats, NDArray[np.bool_]]:
    """Return cumulative ledgers after each epoch and after the end, (epochs + 1, columns, M), and where a queue binds.

    Times are those of the last worker, the other columns means over the workers that stand for all.
    """
    walking = _Walk(program, machines)
    waiting = [walking.worker(own) for own in range(len(program.operations))]
    while waiting:
        before = walking.progress
        waiting = [each for each in waiting if next(each, "ended") != "ended"]
        if waiting and walking.progress == before:
            raise RunError(f"{len(waiting)} workers wait for operations that others do not call")
    marks = np.array(walking.marks)  # (workers, epochs + 1, columns, M)
    ledgers = marks.mean(axis=0)
    ledgers[:, _TIME] = marks[:, :, _TIME].max(axis=0)
    return ledgers, walking.queued


@lru_cache
def expected_largest(count: int) -> float:
    """Return the expected largest of `count` standard normal numbers, by Blom's approximation (within 1 %)."""
    return float(ndtri((count - 0.375) / (count + 0.25))) if count > 1 else 0.0


@dataclass
class _Meeting:
    """One collective of a group: its arrivals, and its end once all members that are walked have come."""

    missing: int
    arrivals: list[Floats] = field(default_factory=list)
    variance: list[Floats] = field(default_factory=list)
    latest: Floats | None = None
    end: Floats | None = None
    cost: Floats | None = None


class _Walk:
    """Ledgers of the workers that stand for all."""

    def __init__(self, program: Program, machines: Machines) -> None:
        self.program, self.machines = program, machines
        size, own = len(machines.forward), len(program.operations)
        self.ledgers = np.zeros((own, len(COLUMNS), size))
        self.marks: list[list[Floats]] = [[] for _ in range(own)]
        self.variance = np.zeros((own, size))  # of the compute since the last meeting
        self.queued = np.zeros(size, dtype=bool)
        self._served: list[Floats | None] = [None] * own
        self._meetings: dict[tuple[int, int, int], _Meeting] = {}
        self.progress = 0
        self._streams: dict[tuple[int, int], list[Stream]] = {}
        distinct = {id(costs): costs for costs in machines.costs}
        places = {key: place for place, key in enumerate(distinct)}
        self._costs = list(distinct.values())
        self._which = np.array([places[id(costs)] for costs in machines.costs])
        self._kept: dict[object, Floats] = {}

    def worker(self, own: int) -> Iterator[str]:
        """Advance a worker; pauses where it waits for others."""
        calls: dict[int, int] = defaultdict(int)
        started: dict[int, _Meeting] = {}
        ledger = self.ledgers[own]
        for event, counts, place in self.program.operations[own]:
            self.progress += 1
            if event is None:
                self._compute(own, counts)
            elif event.kind == "epoch":
                self.marks[own].append(ledger.copy())
            elif event.kind == "receive":
                self._receive(ledger, own, event)
            elif event.kind == "access":
                self._access(own, event)
            elif event.kind == "request":
                self._request(own, event)
            elif event.kind == "wait":
                meeting = started.pop(event.amount)
                while meeting.end is None:
                    yield "waits"
                self._communicated(ledger, meeting)
            else:
                call = calls[id(event.partition)]
                calls[id(event.partition)] += 1
                meeting = self._join(own, event, call)
                if not event.blocking:
                    started[place] = meeting
                    continue
                while meeting.end is None:
                    yield "waits"
                self._communicated(ledger, meeting)
        self.marks[own].append(ledger.copy())

    def _compute(self, own: int, counts: dict[Task, int]) -> None:
        machines, ledger = self.machines, self.ledgers[own]
        compute = (
            counts.get(Task.FORWARD, 0) * machines.forward
            + counts.get(Task.BACKWARD, 0) * machines.backward
            + counts.get(Task.UPDATE, 0) * machines.update
        )
        data = counts.get(Task.DATA, 0) * machines.data
        ledger[_TIME] += compute + data
        ledger[_COMPUTE] += compute
        ledger[_DATA] += data
        step = machines.forward + machines.backward + machines.update
        self.variance[own] += counts.get(Task.FORWARD, 0) * (machines.jitter * step) ** 2

    # --- collectives --------------------------------------------------------------------------------------------

    def _join(self, own: int, event: Event, call: int) -> _Meeting:
        partition = event.partition
        assert partition is not None
        label = int(partition.labels[own])
        key = (id(partition), call, label)
        meeting = self._meetings.get(key)
        if meeting is None:
            walked = partition.labels[: len(self.program.operations)]
            meeting = self._meetings[key] = _Meeting(int((walked == label).sum()))
        meeting.arrivals.append(self.ledgers[own, _TIME].copy())
        meeting.variance.append(self.variance[own].copy())
        self.variance[own] = 0.0
        meeting.missing -= 1
        if meeting.missing == 0:
            slowest = np.sqrt(np.max(meeting.variance, axis=0)) * expected_largest(len(event.members))
            meeting.latest = np.max(meeting.arrivals, axis=0) + slowest
            if event.overlap is not None and len(event.members) > 1:
                meeting.end, meeting.cost = self._overlapped(meeting.latest, event, (id(partition), label))
            else:
                meeting.cost = self._priced(event)
                meeting.end = meeting.latest + meeting.cost
            del self._meetings[key]
        return meeting

    def _communicated(self, ledger: Floats, meeting: _Meeting) -> None:
        assert meeting.end is not None
        assert meeting.latest is not None
        assert meeting.cost is not None
        until = np.maximum(ledger[_TIME], meeting.end)
        ledger[_WAIT] += np.maximum(0.0, np.minimum(meeting.latest, meeting.end) - ledger[_TIME])
        ledger[_COMM] += until - ledger[_TIME]
        ledger[_TRANSFER] += meeting.cost
        ledger[_TIME] = until

    def _priced(self, event: Event) -> Floats:
        """Return the seconds of a collective on each machine."""
        members, nbytes = event.members, event.amount
        if event.overlap is not None:
            engine = event.overlap.engine
            return self._each(("alone", engine), lambda costs: getattr(costs.cost_of(engine), "alone_s", 0.0))
        if len(members) == 1:
            return np.zeros(len(self._which))
        if event.kind == "barrier":
            return self._each(("barrier", members), lambda costs: costs.barrier(members))
        if event.kind == "merge":
            return self._each(("merge", nbytes), lambda costs: _doubling(costs, nbytes, self.program.workers))
        if event.root:
            members = (members[event.root], *members[: event.root], *members[event.root + 1 :])
        return self._each((event.kind, nbytes, members), lambda costs: getattr(costs, event.kind)(nbytes, members))

    def _each(self, key: object, seconds: Callable[[Costs], float]) -> Floats:
        """Return `seconds` of the costs of each machine, computed once for those that share them."""
        if key not in self._kept:
            self._kept[key] = np.array([seconds(costs) for costs in self._costs])[self._which]
        return self._kept[key]

    def _overlapped(self, arrival: Floats, event: Event, group: tuple[int, int]) -> tuple[Floats, Floats]:
        """Return the end of the averages that begin during the backward pass, and the cost of all of them."""
        overlap, members, backward = event.overlap, event.members, self.machines.backward
        assert overlap is not None
        begin = arrival - backward
        if overlap.cycle_s > 0:
            streams = self._streams.setdefault(group, [Stream() for _ in self.machines.costs])
            before = np.array([stream.transferred_s for stream in streams])
            passes = zip(begin, backward, streams, self.machines.costs, strict=True)
            ends = np.array([s.end((b.reshape(1), d.reshape(1)), overlap, c, members) for b, d, s, c in passes])
            return np.maximum(arrival, ends), np.array([stream.transferred_s for stream in streams]) - before
        free, cost = np.full_like(begin, -np.inf), np.zeros_like(begin)
        for place in range(len(bucket_plan(tuple(self._costs[0].gradients), overlap))):
            plans = [bucket_plan(tuple(costs.gradients), overlap)[place] for costs in self._costs]
            release = np.array([plan[1] for plan in plans])[self._which]
            nbytes = plans[0][0]
            price = partial(Costs.allreduce, nbytes=nbytes, ranks=members, engine=overlap.engine)
            seconds = self._each((overlap.engine, nbytes, members), price)
            free = np.maximum(free, begin + release * backward) + seconds
            cost = cost + seconds
        engine = overlap.engine
        per_step = self._each(("step", engine), lambda costs: getattr(costs.cost_of(engine), "per_step_s", 0.0))
        return np.maximum(arrival, np.maximum(free, arrival) + per_step), cost

    # --- messages, servers and shared models --------------------------------------------------------------------

    def _receive(self, ledger: Floats, own: int, event: Event) -> None:
        """Take a message in the time of the worker's own; a sender that is late is not waited for."""
        (source,) = event.members
        seconds = self._each(
            ("message", event.amount, source, own), lambda costs: costs.message(event.amount, source, own)
        )
        if event.name == "add":
            seconds = seconds + self._each(("add", event.amount), lambda costs: costs.adding(event.amount))
        for column in (_TIME, _COMM, _TRANSFER):
            ledger[column] += seconds

    def _access(self, own: int, event: Event) -> None:
        """Exclusive access to a shared model; where one host serves all, between two of a worker lie those of all."""
        (host,), nbytes = event.members, event.amount
        far = self.program.workers - 1
        alone = self._each(("access", nbytes, host), lambda costs: costs.exclusive(nbytes, far, host))
        everyone = alone
        if self.program.shared_hosts == 1:
            everyone = self._each(
                ("accesses", nbytes, host),
                lambda costs: self._of_all(costs, lambda r: costs.exclusive(nbytes, r, host)),
            )
        self._queue(own, alone, everyone)

    def _request(self, own: int, event: Event) -> None:
        """Push to a server and its reply."""
        serving, update = self.program.serving or Serving(1, in_rounds=False), self.machines.update
        part, far = event.amount / serving.shards, self.program.workers - 1
        travel = self._each(("travel", part), lambda costs: 2 * costs.under_way(part, far, 0))
        busy = self._each(("busy", part), lambda costs: costs.occupancy(part, far, 0))
        all_busy = self._each(
            ("all busy", part), lambda costs: self._of_all(costs, lambda r: costs.occupancy(part, r, 0))
        )
        if not serving.in_rounds:
            served = update / serving.shards
            self._queue(own, travel + 2 * busy + served, 2 * all_busy + self.program.workers * served)
            return
        self.variance[own] = 0.0  # one reply after another: so come the next pushes, each served while others compute
        now, before = self.ledgers[own, _TIME], self._served[own]
        after = now + travel + 2 * all_busy + update / serving.shards
        if before is not None:
            after = now + travel + busy + update / serving.shards + all_busy
            self.queued |= all_busy > now - before
            after = np.maximum(after, before + 2 * all_busy + update / serving.shards)
        self._pay(own, after, travel + 2 * busy)
        self._served[own] = after

    def _of_all(self, costs: Costs, seconds: Callable[[int], float]) -> float:
        """Return the sum over all workers of `seconds`, which differ by node only."""
        inside = min(costs.network.ranks_per_node, self.program.workers)
        near = sum(seconds(rank) for rank in range(inside))
        outside = self.program.workers - inside
        return near + (outside * seconds(self.program.workers - 1) if outside else 0.0)

    def _queue(self, own: int, alone: Floats, everyone: Floats) -> None:
        """End an exchange of `alone` seconds, at least `everyone` after the worker's one before."""
        now, before = self.ledgers[own, _TIME], self._served[own]
        after = now + everyone if before is None else np.maximum(now + alone, before + everyone)
        if before is not None:
            self.queued |= after > (now + alone) * (1 + 1e-12)
        self._pay(own, after, alone)
        self._served[own] = after

    def _pay(self, own: int, until: Floats, alone: Floats) -> None:
        ledger = self.ledgers[own]
        ledger[_WAIT] += np.maximum(0.0, until - ledger[_TIME] - alone)
        ledger[_COMM] += until - ledger[_TIME]
        ledger[_TRANSFER] += alone
        ledger[_TIME] = until


def _doubling(costs: Costs, nbytes: int, workers: int) -> float:
    """Return the seconds of messages there and back between pairs at doubling distances."""
    return sum(2 * costs.message(nbytes, 0, 1 << power) for power in range((workers - 1).bit_length()))
