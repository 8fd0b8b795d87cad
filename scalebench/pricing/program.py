"""Programs: schedules of workers that do the same, by epoch, with the compute between two exchanges joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scalebench.pricing.schedule import Event, Ints, Schedule
from scalebench.system.clock import Task

COMPUTE = {task.name.lower(): task for task in (Task.DATA, Task.SHUFFLE, Task.FORWARD, Task.BACKWARD, Task.UPDATE)}
COMPUTE["operation"] = Task.OTHER
TIMED = ("access", "request", "alltoallv")  # their order, or their size, depends on time


class Compute(NamedTuple):
    """Compute of an epoch in order.

    `places` are those of the events of each task that occurs; `amounts` (events, workers) or (events, 1) are samples,
    of an operation of the strategy with this name messages; `steps` (events,) number the local step, `starts` the first
    event of each uninterrupted stretch.
    """

    tasks: Ints
    places: Mapping[Task, Ints]
    amounts: Ints
    steps: Ints
    names: tuple[str, ...]
    starts: Ints


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
            operations = ((e.kind, e.blocking, e.name, id(e.partition), e.root) for e in events)
            keys[id(events)] = rank if sends or len(schedules) == 1 else tuple(operations)
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
    tasks = np.array([COMPUTE.get(event.kind, -1) for event in events], dtype=np.int64)
    numbers = np.maximum(np.cumsum(tasks == Task.DATA) - 1, 0)  # of the local step
    begin = 0
    for end in [*(place for place, event in enumerate(events) if event.kind == "epoch"), len(events)]:
        last = events[end].amount if end < len(events) else None
        here = slice(begin, end)
        yield _epoch(last, events, begin, tasks[here], amounts[here], numbers[here])
        begin = end + 1


def _epoch(number: int | None, events: Sequence[Event], begin: int, tasks: Ints, amounts: Ints, numbers: Ints) -> Epoch:
    """Return the epoch of the events from `begin` on; `tasks` are -1 where there is no compute."""
    own = np.flatnonzero(tasks >= 0)
    computes = tasks[own]
    order = np.argsort(computes, kind="stable")
    bounds = np.searchsorted(computes[order], np.arange(len(Task) + 1)).tolist()
    places = {task: order[low:high] for task, (low, high) in zip(Task, pairwise(bounds), strict=True) if low < high}
    exchanges = [at for at in np.flatnonzero(tasks < 0).tolist() if _exchanges(events[begin + at])]
    ends = np.append(np.searchsorted(own, exchanges), len(own))  # of the compute before each, and after the last
    forwards = np.searchsorted(places.get(Task.FORWARD, own[:0]), ends)
    backwards = places.get(Task.BACKWARD, own[:0])
    latest = np.append(backwards, -1)[np.searchsorted(backwards, ends) - 1]
    steps: list[Step] = []
    starts: list[int] = []
    low = passed = 0
    for at, high, after, backward in zip(
        [*exchanges, None], ends.tolist(), forwards.tolist(), latest.tolist(), strict=True
    ):
        stretch = len(starts) if high > low else -1
        if high > low:
            starts.append(low)
        if at is not None:
            steps.append(Step(events[begin + at], begin + at, low, high, stretch, after - passed, backward))
        elif high > low:
            steps.append(Step(None, begin + len(tasks), low, high, stretch, after - passed, backward))
        low, passed = high, after
    names = tuple(events[begin + at].name for at in own.tolist())
    compute = Compute(computes, places, amounts[own], numbers[own], names, np.array(starts, dtype=np.int64))
    return Epoch(number, compute, steps, all(step.event is None or _together(step.event) for step in steps))


def _exchanges(event: Event) -> bool:
    """Return False for a collective of a lone worker, which exchanges nothing."""
    return event.partition is None or len(event.members) > 1 or event.overlap is not None


def _together(event: Event) -> bool:
    everyone = event.partition is not None and len(event.partition.sizes) == 1
    in_cycles = event.overlap is not None and event.overlap.cycle_s > 0 and len(event.members) > 1
    return everyone and event.blocking and event.kind != "merge" and not in_cycles
