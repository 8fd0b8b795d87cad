"""Programs: schedules of workers that do the same, by epoch, with the compute between two exchanges joined."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.operation import Kind
from scalebench.pricing.identity import Identity
from scalebench.pricing.schedule import Event, Ints, Schedule
from scalebench.system.clock import Task

COMPUTE = {task.name.lower(): task for task in Task if task != Task.COMM}


class Compute(NamedTuple):
    """Compute of an epoch in order.

    `places` are those of the events of each task that occurs, `order` all of them,
    `firsts` where each task begins there; `amounts` (events, workers) or (events, 1)
    are samples, of an operation of the strategy messages; `shares` (events,) are those
    of the model's work; `steps` (events,) number the local step, `starts` the first
    event of each uninterrupted stretch. `names` are those of the operations, of which
    there may be none.
    """

    tasks: Ints
    places: Mapping[Task, Ints]
    order: Ints
    firsts: Ints
    amounts: Ints
    shares: NDArray[np.float64]
    steps: Ints
    names: tuple[str, ...]
    starts: Ints


class Step(NamedTuple):
    """Compute `low` to `high` of the epoch, the `stretch`-th one, then an exchange that is at `place` of the schedule.

    A stretch is -1 where there is no compute; `backward` is the last backward pass
    before the exchange.
    """

    event: Event | None
    place: int
    low: int
    high: int
    stretch: int
    backward: int


class Epoch(NamedTuple):
    """Part of a program up to the end of epoch `number`; None for what follows the last one.

    `together` is True if every exchange is a collective of all workers that they wait
    for and leave at the same time, which does not depend on the time before.
    """

    number: int | None
    compute: Compute
    steps: list[Step]
    together: bool


@dataclass(frozen=True, eq=False)
class Program:
    """Operations of the workers `ranks`, in order.

    Messages are those of one worker: each other one's are between workers that are
    `moved` (workers,) further.
    """

    ranks: Ints
    epochs: list[Epoch]
    moved: Ints

    @cached_property
    def places(self) -> Ints | slice:
        """Index of the workers in an array of all: a slice, whose views are fast, where they are evenly spaced."""
        first, last = int(self.ranks[0]), int(self.ranks[-1])
        step = max(1, (last - first) // max(1, len(self.ranks) - 1))
        spaced = np.arange(first, last + 1, step)
        return (
            slice(first, last + 1, step)
            if np.array_equal(spaced, self.ranks)
            else self.ranks
        )


def programs_of(schedules: Sequence[Schedule]) -> list[Program]:
    """Return the programs of the workers of `schedules`: those that differ in amounts only have one together.

    Worker i has the i-th schedule. Workers that send messages have a program together
    where they share their events.
    """
    keys: dict[Identity, object] = {}  # by list of events, which workers share
    alike: dict[object, list[int]] = defaultdict(list)
    # to those with whom a worker exchanges messages
    distances: dict[object, set[int]] = {}
    for rank, schedule in enumerate(schedules):
        events = schedule.events
        own = Identity(events)
        if own not in keys:
            to_partners = _distances(schedule)
            keys[own] = (
                own
                if to_partners or len(schedules) == 1
                else tuple(map(_without_amounts, events))
            )
            if to_partners:
                distances[own] = to_partners
        alike[keys[own]].append(rank)
    if not _partners_are_alike(alike, distances):
        for key in distances:
            alike |= {(key, rank): [rank] for rank in alike.pop(key)}
    return [_program_of(ranks, schedules) for ranks in alike.values()]


def _distances(schedule: Schedule) -> set[int]:
    """Return how many workers further those are with whom the worker exchanges messages."""
    of_messages = {
        event.operation.members
        for event in schedule.events
        if event.operation.kind == Kind.SEND
    }
    recorded = schedule.rank - schedule.moved
    return {each - recorded for members in of_messages for each in members} - {0}


def _partners_are_alike(
    alike: Mapping[object, list[int]], distances: Mapping[object, set[int]]
) -> bool:
    """Return True if workers that have a program together exchange their messages with such workers."""
    of_rank = {rank: ranks for ranks in alike.values() for rank in ranks}
    return all(
        of_rank.get(ranks[0] + distance) == [rank + distance for rank in ranks]
        for key, own in distances.items()
        if len(ranks := alike[key]) > 1
        for distance in own
    )


def _program_of(ranks: list[int], schedules: Sequence[Schedule]) -> Program:
    own = [schedules[rank] for rank in ranks]
    return Program(
        np.array(ranks),
        list(_epochs(own)),
        np.array([schedule.moved for schedule in own]),
    )


def _without_amounts(event: Event) -> object:
    """Return what workers of one program have in common of an event."""
    operation = event.operation
    exchange = (
        event.partition,
        event.blocking,
        event.tag,
        operation.root,
        operation.linear,
    )
    return event.kind, event.name, event.share, exchange


def in_batches(schedule: Schedule, batch: int) -> Schedule:
    """Return a schedule whose passes of several workers' batches are larger shares of the work of one `batch`."""
    events = [
        event._replace(amount=batch, share=event.share * event.amount / batch)
        if event.kind in ("forward", "backward")
        else event
        for event in schedule.events
    ]
    return replace(schedule, events=events)


def _epochs(schedules: Sequence[Schedule]) -> Iterator[Epoch]:
    events = schedules[0].events
    amounts = _amounts(schedules)
    tasks = np.array([COMPUTE.get(event.kind, -1) for event in events], dtype=np.int64)
    shares = np.array([event.share for event in events])
    numbers = np.maximum(np.cumsum(tasks == Task.DATA) - 1, 0)  # of the local step
    begin = 0
    for end in [
        *(place for place, event in enumerate(events) if event.kind == "epoch"),
        len(events),
    ]:
        last = events[end].amount if end < len(events) else None
        here = slice(begin, end)
        yield _epoch(
            last, events, begin, tasks[here], amounts[here], shares[here], numbers[here]
        )
        begin = end + 1


def _amounts(schedules: Sequence[Schedule]) -> Ints:
    """Return the amounts of the events of each worker, (events, workers); (events, 1) if all have the same events."""
    lists = {Identity(schedule.events): schedule.events for schedule in schedules}
    amounts = {
        key: np.array([event.amount for event in events])
        for key, events in lists.items()
    }
    if len(amounts) == 1:
        return amounts[Identity(schedules[0].events)][:, None]
    return np.stack(
        [amounts[Identity(schedule.events)] for schedule in schedules], axis=1
    )


def _epoch(
    number: int | None,
    events: Sequence[Event],
    begin: int,
    tasks: Ints,
    amounts: Ints,
    shares: NDArray[np.float64],
    numbers: Ints,
) -> Epoch:
    """Return the epoch of the events from `begin` on; `tasks` are -1 where there is no compute."""
    exchanges = tuple(
        at
        for at in np.flatnonzero(tasks < 0).tolist()
        if _exchanges(events[begin + at])
    )
    form = _form(tasks.tobytes(), exchanges)
    steps = [
        Step(events[begin + at], begin + at, *cut)
        for at, cut in zip(exchanges, form.cuts, strict=False)
    ]
    if len(form.cuts) > len(exchanges):
        steps.append(Step(None, begin + len(tasks), *form.cuts[-1]))
    own = form.own
    names = (
        tuple(events[begin + at].name for at in own.tolist())
        if Task.OTHER in form.places
        else ()
    )
    in_order = (form.places, form.order, form.firsts)
    compute = Compute(
        tasks[own],
        *in_order,
        amounts[own],
        shares[own],
        numbers[own],
        names,
        form.starts,
    )
    return Epoch(
        number,
        compute,
        steps,
        all(step.event is None or _together(step.event) for step in steps),
    )


class _Form(NamedTuple):
    """What epochs of equal tasks and exchanges have in common: fields of `Compute`, and those of `Step` by exchange.

    `own` are the places of compute. A last cut without an exchange is there if compute
    follows the last one.
    """

    own: Ints
    places: Mapping[Task, Ints]
    order: Ints
    firsts: Ints
    starts: Ints
    cuts: list[tuple[int, int, int, int]]


@lru_cache(maxsize=4096)
def _form(tasks_bytes: bytes, exchanges: tuple[int, ...]) -> _Form:
    tasks = np.frombuffer(tasks_bytes, dtype=np.int64)
    own = np.flatnonzero(tasks >= 0)
    order = np.argsort(tasks[own], kind="stable")
    bounds = np.searchsorted(tasks[own][order], np.arange(len(Task) + 1)).tolist()
    places = {
        task: order[low:high]
        for task, (low, high) in zip(Task, pairwise(bounds), strict=True)
        if low < high
    }
    # of the compute before each
    ends = np.append(np.searchsorted(own, exchanges), len(own)).astype(np.int64)
    backwards = places.get(Task.BACKWARD, own[:0])
    latest = np.append(backwards, -1)[np.searchsorted(backwards, ends) - 1]
    cuts: list[tuple[int, int, int, int]] = []
    starts: list[int] = []
    low = 0
    for high, backward in zip(ends.tolist(), latest.tolist(), strict=True):
        if len(cuts) < len(exchanges) or high > low:
            cuts.append((low, high, len(starts) if high > low else -1, backward))
        if high > low:
            starts.append(low)
        low = high
    firsts = np.array(
        [low for low, high in pairwise(bounds) if low < high], dtype=np.int64
    )
    return _Form(own, places, order, firsts, np.array(starts, dtype=np.int64), cuts)


def _exchanges(event: Event) -> bool:
    """Return False for a collective of a lone worker, which exchanges nothing."""
    return event.partition is None or event.exchanges or event.overlap is not None


def _together(event: Event) -> bool:
    everyone = event.partition is not None and len(event.partition.sizes) == 1
    in_cycles = (
        event.overlap is not None and event.overlap.cycle_s > 0 and event.exchanges
    )
    return everyone and event.blocking and event.kind != Kind.MERGE and not in_cycles
