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
from scalebench.pricing.collectives import Collectives, Meeting
from scalebench.pricing.schedule import Event, Ints, Schedule
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


def price(schedules: Sequence[Schedule], charges: Charges) -> Priced:
    """Return the times of the workers of `schedules`, all of a run.

    Raises:
        NotLockStepError: a program asks a server, shares a model, or exchanges amounts that depend on others.
        RunError: workers wait for operations that others do not call.
    """
    pricing = _Pricing(charges, len(schedules))
    waiting = [pricing.walk(ranks, events) for ranks, events in _programs(schedules)]
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


def _programs(schedules: Sequence[Schedule]) -> list[tuple[Ints, list[_Step]]]:
    """Return the workers of each program, and its events: schedules that differ in amounts only are one program."""
    if not is_lock_step(schedules[0]):
        raise NotLockStepError("the order of its operations depends on time")
    alike: dict[object, list[int]] = defaultdict(list)
    for place, schedule in enumerate(schedules) if len(schedules) > 1 else []:
        messages = any(event.kind == "send" for event in schedule.events)
        key = [(e.kind, e.blocking, e.name, id(e.partition), e.root) for e in schedule.events]
        alike[place if messages else tuple(key)].append(place)
    found = []
    for places in alike.values() or [[0]]:
        columns = zip(*(schedules[place].events for place in places), strict=True)
        steps = []
        for column in columns:
            amounts = [event.amount for event in column]
            same = amounts.count(amounts[0]) == len(amounts)
            steps.append(_Step(column[0], amounts[0] if same else np.array(amounts)))
        found.append((np.array(places), steps))
    return found


class _Pricing:
    """The times of one training while its programs are walked through."""

    def __init__(self, charges: Charges, workers: int) -> None:
        self.charges, self.workers = charges, workers
        self.ledger = Ledger.empty(workers)
        self.epochs: dict[int, Ledger] = {}
        self.progress = 0
        self.collectives = Collectives(charges, workers)
        self._mail: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)

    def walk(self, ranks: Ints, steps: Sequence[_Step]) -> Iterator[str]:
        """Advance the workers `ranks` through their program; pauses where it waits for others."""
        charges = self.charges
        times, everyone = charges.times, len(ranks) == self.workers
        workers = slice(None) if everyone else ranks  # a view where possible
        step, factor, backward = -1, charges.factors(ranks, 0), np.zeros(len(ranks))
        calls: dict[int, int] = defaultdict(int)
        started: dict[int, Meeting] = {}
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
                if (meeting := started.pop(amounts, None)) is None:
                    continue
                yield from self._until_met(meeting, ranks)
                self._communicated(workers, meeting)
            elif len(event.members) > 1 or event.overlap is not None:  # a lone worker exchanges nothing
                assert event.partition is not None
                call = calls[id(event.partition)]
                calls[id(event.partition)] += 1
                meeting = self.collectives.meeting(event, call)
                meeting.join(ranks, self.ledger.now[ranks], backward)
                if not event.blocking:
                    started[place] = meeting
                    continue
                yield from self._until_met(meeting, ranks)
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

    def _until_met(self, meeting: Meeting, ranks: Ints) -> Iterator[str]:
        """Wait until all members of the groups of `ranks` have arrived, and set their ends."""
        labels = meeting.partition.labels[ranks]
        while meeting.missing[labels].any():
            yield "waits"
        if not meeting.settled[labels].all():
            self.collectives.settle(meeting)

    def _communicated(self, workers: Ints | slice, meeting: Meeting) -> None:
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

    def _send(self, ranks: Ints, event: Event) -> None:
        rank, (to,) = int(ranks[0]), event.members
        sent = float(self.ledger.now[rank])
        arrival = sent + self.charges.costs.message(event.amount, rank, to)
        self._mail[rank, to, event.root].append((sent, arrival))

    def _receive(self, ranks: Ints, event: Event) -> bool:
        """Take a message if it was sent."""
        rank, (source,) = int(ranks[0]), event.members
        if not self._mail[source, rank, event.root]:
            return False
        sent, arrival = self._mail[source, rank, event.root].pop(0)
        now = self.ledger.now[ranks]
        until, waited = np.maximum(now, arrival), np.maximum(0.0, sent - now)
        adding = self.charges.costs.adding(event.amount) if event.name == "add" else 0.0
        self._record(ranks, until + adding, waited, until - now)
        return True
