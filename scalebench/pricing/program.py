"""Programs: schedules of workers that do the same, by epoch, and excerpts that stand for long ones.

In a program the compute between two exchanges is joined. An excerpt is a few epochs of
few steps, recorded in place of all, from which the time of all is extrapolated:

A strategy states the stretches in which its program repeats. The time of an epoch is
linear in its whole periods of steps, and epochs repeat with the period of epochs. So
two lengths of an epoch and the first, a middle and the last period of epochs give the
time of the stretch without a length; the epochs of all others are recorded one by one.
The steps that a partial period leaves over are recorded too. Every batch has the mean
number of samples. Without stretches there is no excerpt: every step of every epoch is
recorded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scalebench.cluster.operation import Kind
from scalebench.pricing.schedule import Event, Ints, Schedule
from scalebench.strategies.traits import Stretch
from scalebench.system.clock import Task


class Identity:
    """Stands for `of` and for nothing that equals it; keeps it alive, so that no later object is taken for it."""

    __slots__ = ("of",)

    def __init__(self, of: object) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


# Communication is an event of its own, with bytes in place of samples.
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


# By identity, as it is a key of caches and holds arrays.
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
    # By identity: workers that share a list do the same, and comparing long lists event
    # by event takes long.
    keys: dict[Identity, object] = {}  # by list of events, which workers share
    is_one_list = len({Identity(schedule.events) for schedule in schedules}) == 1
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
                # A message names its partner by the numbers of the recorded worker:
                # only workers of the very same list can have it together.
                if to_partners or is_one_list
                else tuple(map(_without_amounts, events))
            )
            if to_partners:
                distances[own] = to_partners
        alike[keys[own]].append(rank)
    # A message of a program is priced for all of its workers at once: their partners
    # have to be in one program, too.
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
    # Messages in the list are those of the worker that was recorded.
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
    # Every local step begins with fetching its batch.
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
    # Shared lists are turned into arrays once.
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
    # Epochs repeat: the indices depend on the order of tasks alone, whose bytes are a
    # key.
    form = _form(tasks.tobytes(), exchanges)
    steps = [
        Step(events[begin + at], begin + at, *cut)
        for at, cut in zip(exchanges, form.cuts, strict=False)
    ]
    if len(form.cuts) > len(exchanges):
        # Compute behind the last exchange of an epoch.
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
    # As `_epochs` made them; another dtype would read other numbers.
    tasks = np.frombuffer(tasks_bytes, dtype=np.int64)
    own = np.flatnonzero(tasks >= 0)
    # By task, in the order of the program within each: prices are computed task by
    # task.
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
    # Without a backward pass before the exchange, place -1 of the appended array gives
    # -1.
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
    # Overlapped averages cost a lone worker the hooks of the library all the same.
    return event.partition is None or event.exchanges or event.overlap is not None


def _together(event: Event) -> bool:
    # Then all leave at one time, whatever was before, and an epoch is a sum over its
    # exchanges.
    everyone = event.partition is not None and len(event.partition.sizes) == 1
    in_cycles = (
        event.overlap is not None and event.overlap.cycle_s > 0 and event.exchanges
    )
    return everyone and event.blocking and event.kind != Kind.MERGE and not in_cycles


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EvenPlan:
    """Batches of equal workers with equal shards, each one block: what a recording asks of a `BatchPlan`."""

    workers: int
    steps_per_epoch: int
    batch_size: int = 1
    lead: int = 0  # further steps of the first epoch
    tail: int = 0  # and of the last one
    epochs: int = 0
    rows_move: bool = False

    def shard_sizes(self, epoch: int) -> Ints:
        return np.broadcast_to(
            np.int64(self.steps(epoch) * self.batch_size), self.workers
        )

    def steps(self, epoch: int) -> int:
        steps = self.steps_per_epoch
        if epoch == 0:
            steps += self.lead
        if epoch == self.epochs - 1:
            steps += self.tail
        return steps

    def bounds(self, epoch: int, worker: int) -> Ints:
        return np.arange(self.steps(epoch) + 1) * self.batch_size

    def batch_sizes(self, epoch: int) -> Ints:
        shape = self.workers, self.steps(epoch)
        return np.broadcast_to(np.int64(self.batch_size), shape)

    def block_starts(self, epoch: int, worker: int) -> Ints:
        return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Excerpt:
    """Recorded epochs, of one length in `steps` or of two, from which longer epochs are extrapolated.

    Each stands for so many as `counts` says, the last of which is that of what follows
    the last epoch. The first epoch has `lead` further steps, the last one `tail`.
    `joined`: a step stands for an epoch's. `whole`: every step of every epoch.
    """

    steps: tuple[int, ...]
    counts: tuple[int, ...]
    joined: bool = False
    lead: int = 0
    tail: int = 0
    whole: bool = False

    @property
    def epochs(self) -> int:
        return len(self.counts) - 1

    def plans(self, workers: int, batch_size: int = 1) -> list[EvenPlan]:
        """Return the batches of the recorded epochs at each length."""
        return [
            EvenPlan(workers, length, batch_size, self.lead, self.tail, self.epochs)
            for length in self.steps
        ]

    def extrapolated(self, marks: list[Floats], steps: Floats) -> Floats:
        """Return the ledgers of the whole training, (columns, M), with epochs of `steps` (M,).

        `marks` (epochs + 1, columns, M) are the cumulative ledgers of the excerpt at
        each length.
        """
        durations = [np.diff(each, axis=0, prepend=0.0) for each in marks]
        parts = durations[0]
        if len(self.steps) == 2:
            recorded = np.full((len(parts), 1, 1), float(self.steps[0]))
            recorded[0] += self.lead
            recorded[self.epochs - 1] += self.tail
            # The slope between two lengths, a period apart, times the steps that were
            # not recorded.
            parts = parts + (durations[1] - parts) / (self.steps[1] - self.steps[0]) * (
                steps - recorded
            )
        total: Floats = np.tensordot(self.counts, parts, axes=1)
        return total


def excerpt_of(
    stretches: tuple[Stretch, ...] | None, epochs: int, steps: int
) -> Excerpt:
    """Return the excerpt of a training of `epochs` of `steps` whose program consists of `stretches`."""
    # A strategy that says nothing may do another thing in every step.
    if stretches is None:
        return Excerpt((steps,), (1,) * (epochs + 1), whole=True)
    # After so many epochs all rhythms stand where they began.
    every = math.lcm(*(each.period for each in stretches if each.unit == "epoch"))
    if all(each.unit == "epoch" for each in stretches):
        # Workers meet between epochs only: one step can stand for all of an epoch.
        return Excerpt((1,), _counts(stretches, 0, epochs, every), joined=True)
    first = sum(each.steps or 0 for each in stretches)
    by_batches = [
        each for each in stretches if each.unit == "batch" and each.steps is None
    ]
    period = math.lcm(*(each.period for each in by_batches))
    # First steps of another kind are recorded once; the lengths have one period each
    # already.
    lead = period * max(0, math.ceil(first / period) - 1)
    # Then an epoch begins where the last one left the period, and epochs differ.
    counts_on = any(each.period > 1 and not each.restarts for each in by_batches)
    # with the beginning of an epoch
    until_aligned = every * period // math.gcd(period, steps) if counts_on else every
    rest, tail = steps % period, 0
    # One endless rhythm: where epochs end in it does not change the sum.
    if counts_on and all(each.epochs is None for each in stretches):
        rest, tail = (
            0,
            epochs * steps % period,
        )  # period follows period, and the last one may be partial
    else:
        every = until_aligned
    lengths = (period + rest, 2 * period + rest)
    # A shorter training is recorded as it is.
    if steps > lengths[-1] + lead + tail:
        return Excerpt(
            lengths, _counts(stretches, 0, epochs, every), lead=lead, tail=tail
        )
    return Excerpt(
        (steps,), _counts(stretches, math.ceil(first / steps), epochs, until_aligned)
    )


def _counts(
    stretches: tuple[Stretch, ...], first: int, epochs: int, every: int
) -> tuple[int, ...]:
    """Return how many epochs each recorded one stands for, and 1 for what follows the last one.

    The `first` epochs, and those of stretches of a stated length, stand for themselves;
    of the others a first, a middle and a last period of `every` epochs are recorded.
    """
    last = 0
    if (endless := _endless(stretches)) is not None:
        first += _epochs_of(stretches[:endless])
        last = _epochs_of(stretches[endless + 1 :])
    between = epochs - first - last
    if endless is None or between <= 3 * every:
        return (1,) * (epochs + 1)
    repeats, rest = divmod(between - 3 * every, every)
    # The ends stand for themselves, as they may differ from what lies between; the
    # middle period repeats.
    middle = (1,) * every + (1 + repeats,) * every + (1,) * (every + rest)
    return ((1,) * first) + middle + (1,) * (last + 1)


def _endless(stretches: tuple[Stretch, ...]) -> int | None:
    """Return the place of the stretch without a length; None if all have one."""
    return next(
        (
            at
            for at, each in enumerate(stretches)
            if each.epochs is None and each.steps is None
        ),
        None,
    )


def _epochs_of(stretches: Iterable[Stretch]) -> int:
    return sum(each.epochs or 0 for each in stretches)
