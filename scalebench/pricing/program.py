"""Programs: schedules of workers that do the same, by epoch, with the compute between two exchanges joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scalebench.pricing.schedule import Event, Ints, Schedule
from scalebench.system.clock import Task

COMPUTE = {task.name.lower(): task for task in (Task.DATA, Task.SHUFFLE, Task.FORWARD, Task.BACKWARD, Task.UPDATE)}
COMPUTE["operation"] = Task.OTHER
TIMED = ("access", "request", "alltoallv")  # their order, or their size, depends on time


class Compute(NamedTuple):
    """Compute of an epoch in order.

    `amounts` (events, workers) or (events, 1) are samples, of an operation of the strategy with this name messages;
    `steps` (events,) number the local step, `starts` the first event of each uninterrupted stretch.
    """

    tasks: Ints
    amounts: Ints
    steps: Ints
    names: tuple[str, ...]
    starts: Ints

    def of_task(self, task: Task) -> Ints:
        """Return the places of the events of `task`."""
        return np.flatnonzero(self.tasks == task)


class Step(NamedTuple):
    """Compute `low` to `high` of the epoch, the `stretch`-th one, then an exchange that is at `place` of the schedule.

    A stretch is -1 where there is no compute; `backward` is the last backward pass before the exchange.
    """

    event: Event | None
    place: int
    low: int
    high: int
    stretch: int
    forwards: int
    backward: int


class Epoch(NamedTuple):
    """Part of a program up to the end of epoch `number`; None for what follows the last one.

    `together` is True if every exchange is a collective of all workers that they wait for and leave at the same time,
    which does not depend on the time before.
    """

    number: int | None
    compute: Compute
    steps: list[Step]
    together: bool


@dataclass(frozen=True)
class Program:
    """Operations of the workers `ranks`, in order."""

    ranks: Ints
    epochs: list[Epoch]


def is_lock_step(schedule: Schedule) -> bool:
    """Return True if the order of the program's operations does not depend on time."""
    return not any(event.kind in TIMED for event in schedule.events)


def programs_of(schedules: Sequence[Schedule]) -> list[Program]:
    """Return the programs of the workers of `schedules`: those that differ in amounts only have one together.

    Worker i has the i-th schedule.
    """
    keys: dict[int, object] = {}  # of lists of events, which workers share
    alike: dict[object, list[int]] = defaultdict(list)
    for rank, schedule in enumerate(schedules):
        events = schedule.events
        if id(events) not in keys:
            sends = any(event.kind == "send" for event in events)
            operations = [(e.kind, e.blocking, e.name, id(e.partition), e.root) for e in events]
            keys[id(events)] = rank if sends else tuple(operations)
        alike[keys[id(events)]].append(rank)
    return [Program(np.array(ranks), list(_epochs([schedules[rank] for rank in ranks]))) for ranks in alike.values()]


def _epochs(schedules: Sequence[Schedule]) -> Iterator[Epoch]:
    events = schedules[0].events
    distinct = {id(schedule.events): schedule.events for schedule in schedules}
    rows = {key: np.array([event.amount for event in own]) for key, own in distinct.items()}
    if len(rows) == 1:
        amounts = rows[id(events)][:, None]
    else:
        amounts = np.stack([rows[id(schedule.events)] for schedule in schedules], axis=1)
    step, begin = 0, 0
    seen_data = False
    ends = [place for place, event in enumerate(events) if event.kind == "epoch"]
    for end in [*ends, len(events)]:
        numbers = []
        for event in events[begin:end]:
            if event.kind == "data":
                step, seen_data = step + seen_data, True
            if event.kind in COMPUTE:
                numbers.append(step)
        last = events[end].amount if end < len(events) else None
        yield _epoch(last, events, range(begin, end), amounts, np.array(numbers, dtype=np.int64))
        begin = end + 1


def _epoch(number: int | None, events: Sequence[Event], places: range, amounts: Ints, numbers: Ints) -> Epoch:
    steps: list[Step] = []
    tasks: list[Task] = []
    names: list[str] = []
    own: list[int] = []
    starts: list[int] = []
    low, forwards, backward = 0, 0, -1

    def close(event: Event | None, place: int) -> None:
        nonlocal low, forwards
        high = len(tasks)
        if high > low:
            starts.append(low)
        if event is not None or high > low:
            steps.append(Step(event, place, low, high, len(starts) - 1 if high > low else -1, forwards, backward))
        low, forwards = high, 0

    for place in places:
        event = events[place]
        task = COMPUTE.get(event.kind)
        if task is not None:
            forwards += task == Task.FORWARD
            backward = len(tasks) if task == Task.BACKWARD else backward
            tasks.append(task)
            names.append(event.name)
            own.append(place)
        elif event.partition is None or len(event.members) > 1 or event.overlap is not None:
            close(event, place)  # a lone worker exchanges nothing
    close(None, places.stop)
    stretches = np.array(starts, dtype=np.int64)
    compute = Compute(np.array(tasks, dtype=np.int64), amounts[own], numbers, tuple(names), stretches)
    return Epoch(number, compute, steps, all(step.event is None or _together(step.event) for step in steps))


def _together(event: Event) -> bool:
    everyone = event.partition is not None and len(event.partition.sizes) == 1
    in_cycles = event.overlap is not None and event.overlap.cycle_s > 0 and len(event.members) > 1
    return everyone and event.blocking and event.kind != "merge" and not in_cycles
