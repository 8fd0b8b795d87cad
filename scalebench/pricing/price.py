"""Time of programs on M machines at once, by arrays (machines, workers).

Between exchanges a worker's time adds up; a collective completes at the arrival of its
last member plus its cost. This holds in any order of evaluation, so that workers with
equal programs are evaluated together. The result equals that of the event engine, which
also prices programs whose order depends on time. Of equal workers a few may stand for
all: the others arrive when these do, and jitter enters by the expected wait for the
slowest of p workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scalebench.cluster.operation import Kind, Operation
from scalebench.comm.base import BETWEEN_STAGES
from scalebench.errors import RunError, ScalebenchError
from scalebench.pricing.charges import Charges, Floats, Machines
from scalebench.pricing.exchanges import (
    Collectives,
    Queue,
    Rendezvous,
    expected_largest,
)
from scalebench.pricing.overlap import hidden_s
from scalebench.pricing.program import Compute, Program, Step, programs_of
from scalebench.pricing.schedule import Event, Ints, RankGroups, Schedule
from scalebench.system.clock import Task


class NotLockStepError(ScalebenchError):
    """The order of a program's operations depends on time: the event engine prices it."""


@dataclass
class TimeArrays:
    """Seconds of each worker (machines, workers), or (tasks, machines, workers): its time, by task, and waiting.

    `transfer` is the cost of its collectives, of which only `seconds[Task.COMM]` less
    `wait` is exposed; `bubble` is the part of `wait` for other stages of its replica.
    """

    now: Floats
    seconds: Floats
    wait: Floats
    transfer: Floats
    bubble: Floats

    @classmethod
    def empty(cls, *shape: int) -> TimeArrays:
        return cls(
            np.zeros(shape), np.zeros((len(Task), *shape)), *np.zeros((3, *shape))
        )

    def of(self, worker: int) -> dict[str, float]:
        """Return the columns that the records have of one worker, on the only machine."""
        seconds = self.seconds[..., worker].ravel().tolist()
        waited = float(self.wait[..., worker].item())
        transfer, now = (
            float(each[..., worker].item()) for each in (self.transfer, self.now)
        )
        return {
            "compute_s": seconds[Task.FORWARD]
            + seconds[Task.BACKWARD]
            + seconds[Task.UPDATE],
            "comm_s": seconds[Task.COMM],
            "wait_s": waited,
            "bubble_s": float(self.bubble[..., worker].item()),
            "hidden_comm_s": hidden_s(transfer, seconds[Task.COMM] - waited, now),
            "data_s": seconds[Task.DATA] + seconds[Task.SHUFFLE],
            "other_s": seconds[Task.OTHER],
        }

    def copy(self) -> TimeArrays:
        return TimeArrays(*(each.copy() for each in vars(self).values()))

    def on(self, machine: int) -> TimeArrays:
        """Return the ledger of one machine, (workers,)."""
        return TimeArrays(*(each[..., machine, :] for each in vars(self).values()))


@dataclass
class Priced:
    """Ledgers of a training at its end and at the end of each epoch."""

    end: TimeArrays
    epochs: list[TimeArrays] = field(default_factory=list)

    @property
    def train_s(self) -> float:
        """Seconds until the last worker has finished."""
        return float(self.end.now.max())

    def moments(self) -> dict[int, float]:
        """Return when worker 0 ends each epoch, the last one with the training."""
        return {
            epoch: float(ledger.now[0])
            for epoch, ledger in enumerate([*self.epochs[:-1], self.end])
        }


def price(schedules: Sequence[Schedule], charges: Charges) -> list[Priced]:
    """Return the times of the workers of `schedules`, all of a run, in each repetition of the run.

    Raises:
        NotLockStepError: a program asks a server, shares a model, or exchanges amounts that depend on others.
        RunError: workers wait for operations that others do not call.
    """
    if not schedules[0].is_lock_step:
        raise NotLockStepError("the order of its operations depends on time")
    # All repetitions at once: they differ in their draws alone, which are axes of the
    # arrays.
    *epochs, end = walk(programs_of(schedules), charges, len(schedules))
    return [
        Priced(end.on(repetition), [epoch.on(repetition) for epoch in epochs])
        for repetition in range(len(charges.times))
    ]


def walk(
    programs: Sequence[Program],
    machines: Machines,
    workers: int,
    queue: Queue | None = None,
) -> list[TimeArrays]:
    """Return the ledgers of `workers`, of which each has a program, at the end of each epoch and after the last one.

    `queue` prices servers and shared models.
    """
    walking = _Walk(machines, workers, queue)
    waiting = [walking.follow(program) for program in programs]
    while waiting:
        before = walking.progress
        # Programs go on in turns, each as far as it can without the others.
        waiting = [each for each in waiting if next(each, "ended") != "ended"]
        # A whole turn in which no program went on: the next one would be the same.
        if waiting and walking.progress == before:
            raise RunError(
                f"{len(waiting)} programs wait for operations that others do not call"
            )
    return [
        *(walking.epochs[epoch] for epoch in sorted(walking.epochs)),
        walking.ledger,
    ]


class _Walk:
    """Ledgers of the workers while their programs are followed."""

    def __init__(self, machines: Machines, workers: int, queue: Queue | None) -> None:
        self.machines, self.prices, self.workers, self.queue = (
            machines,
            machines.prices,
            workers,
            queue,
        )
        shape = (len(self.prices), workers)
        self.ledger = TimeArrays.empty(*shape)
        self.epochs: dict[int, TimeArrays] = {}
        self.progress = 0
        self.collectives = Collectives(machines, shape)
        self.variance = np.zeros(shape)  # of the compute since the last collective
        # by first pair and tag
        self._mail: dict[tuple[int, int, int], list[tuple[Floats, Floats]]] = (
            defaultdict(list)
        )
        self._messages: dict[tuple[Program, Operation], _Messages] = {}

    def follow(self, program: Program) -> Iterator[str]:
        """Advance the workers of a program; pauses where it waits for others."""
        ranks, at, spread = program.ranks, program.places, self.machines.spread
        now = self.ledger.now
        calls: dict[RankGroups, int] = defaultdict(int)
        started: dict[int, Rendezvous] = {}
        for number, compute, steps, together in program.epochs:
            seconds = self.machines.seconds(compute, ranks)
            stretches = _by_stretch(compute, seconds)
            varied = _steps_before(compute) if spread is not None else compute.shares
            # An epoch of collectives of all workers is one sum over arrays, without a
            # walk from event to event.
            if together and len(ranks) == self.workers and not self.machines.slowness:
                self._all_together(steps, seconds, stretches, varied)
                steps = []
            for event, place, low, high, stretch, backward in steps:
                self.progress += 1
                if stretch >= 0:
                    if self.machines.slowness:
                        self._slowly(seconds[low:high], ranks, at)
                    else:
                        now[:, at] += stretches[stretch]
                    if spread is not None:
                        self.variance[:, at] += (
                            (varied[high] - varied[low]) * spread**2
                        )[:, None]
                if event is None:
                    continue
                if event.partition is not None:
                    call = calls[event.partition]
                    # The n-th collective of each member is the n-th of the group, as in
                    # MPI: no tag says it.
                    calls[event.partition] += 1
                    passes = seconds[backward] if event.overlap is not None else None
                    rendezvous = self.collectives.join(
                        event, call, program, now, self.variance, passes
                    )
                    self.variance[:, at] = 0.0
                    if not event.blocking:
                        # Its end is looked at where the program waits for it.
                        started[place] = rendezvous
                        continue
                    yield from self._until_met(rendezvous, program)
                elif event.kind == "wait":
                    # A lone worker's collective is not in the program, but the wait for
                    # it is.
                    if (found := started.pop(event.amount, None)) is not None:
                        yield from self._until_met(found, program)
                        self._communicated(at, found)
                elif event.kind == Kind.SEND:
                    self._send(event, program)
                elif event.kind == "receive":
                    while not self._receive(event, program):
                        yield "waits"
                else:
                    self._exchange(event, at, ranks)
            self._count_tasks(compute, seconds, at)
            if number is not None:
                self._close_epoch(number, at)

    def _count_tasks(self, compute: Compute, seconds: Floats, at: Ints | slice) -> None:
        """Add the compute of an epoch to the seconds of each task."""
        if compute.places:
            taken = np.add.reduceat(seconds[compute.order], compute.firsts, axis=0)
            for task, own in zip(compute.places, taken, strict=True):
                self.ledger.seconds[task][:, at] += own

    def _exchange(self, event: Event, at: Ints | slice, ranks: Ints) -> None:
        """Hand a request to the server and wait for its answer."""
        assert self.queue is not None, event.kind
        now = self.ledger.now[:, at]
        until, alone = self.queue.exchange(event, now, ranks)
        self._record(at, until, np.maximum(0.0, until - now - alone), alone)
        self.variance[:, at] = 0.0

    def _all_together(
        self, steps: Sequence[Step], seconds: Floats, stretches: Floats, varied: Floats
    ) -> None:
        """Advance all workers through an epoch whose collectives they leave together.

        With s the compute before a collective of cost c, it ends max(s) + c after the
        one before.
        """
        ledger, spread = self.ledger, self.machines.spread
        self.progress += len(steps)
        exchanges = [step for step in steps if step.event is not None]
        if exchanges:
            own = np.array([step.stretch for step in exchanges])
            taken = np.zeros((len(own), *ledger.now.shape))
            taken[own >= 0] = stretches[own[own >= 0]]
            began = ledger.now.max(axis=1, keepdims=True)
            # Workers may end the epoch before apart: the first collective waits for
            # that, too.
            behind = ledger.now - began
            ledger.now += taken.sum(axis=0)
            taken[0] += behind
            latest = taken.max(axis=2)
            if spread is not None:
                variance = (
                    np.array(
                        [varied[step.high] - varied[step.low] for step in exchanges]
                    )[:, None]
                    * spread**2
                )
                variance[0] += self.variance.max(axis=1)
                members = [
                    step.event.operation.members
                    for step in exchanges
                    if step.event is not None
                ]
                largest = [expected_largest(len(each)) for each in members]
                latest = latest + np.sqrt(variance) * np.array(largest)[:, None]
                self.variance[:] = 0.0
            ends, costs = self.collectives.ends_together(
                exchanges, taken, latest, seconds
            )
            waited = np.maximum(0.0, latest[:, :, None] - taken).sum(axis=0)
            self._record(
                slice(None),
                began + ends.sum(axis=0)[:, None],
                waited,
                costs.sum(axis=0)[:, None],
            )
        if steps and steps[-1].event is None:
            ledger.now += stretches[steps[-1].stretch]
            if spread is not None:
                self.variance += ((varied[-1] - varied[steps[-1].low]) * spread**2)[
                    :, None
                ]

    def _slowly(self, seconds: Floats, ranks: Ints, at: Ints | slice) -> None:
        """Advance event by event, by `seconds` times the slowness at its beginning, which is kept in them."""
        now, slowness = self.ledger.now, self.machines.slowness
        for each in seconds:
            for place, rank in enumerate(ranks.tolist()):
                if rank in slowness:
                    each[:, place] *= [
                        slowness[rank](moment) for moment in now[:, rank].tolist()
                    ]
            now[:, at] += each

    def _close_epoch(self, epoch: int, at: Ints | slice) -> None:
        if epoch not in self.epochs:
            self.epochs[epoch] = self.ledger.copy()
            return
        # Programs reach the end of an epoch at different moments of the walk: each
        # writes its own workers.
        for kept, running in zip(
            vars(self.epochs[epoch]).values(), vars(self.ledger).values(), strict=True
        ):
            kept[..., at] = running[..., at]

    def _until_met(self, rendezvous: Rendezvous, program: Program) -> Iterator[str]:
        """Wait until all members of the program's groups have arrived; advance those that wait in it to its end."""
        while not rendezvous.is_complete(program):
            yield "waits"
        if (waiting := self.collectives.settle(rendezvous)) is not None:
            self._communicated(waiting, rendezvous)

    def _communicated(self, at: Ints | slice, rendezvous: Rendezvous) -> None:
        """Record the time up to the end of a collective as communication."""
        now, ends = self.ledger.now[:, at], rendezvous.ends[:, at]
        waited = np.maximum(0.0, np.minimum(rendezvous.latest[:, at], ends) - now)
        self._record(at, np.maximum(now, ends), waited, rendezvous.costs[:, at])

    def _record(
        self, at: Ints | slice, until: Floats, waited: Floats, cost: Floats
    ) -> None:
        ledger = self.ledger
        ledger.seconds[Task.COMM][:, at] += until - ledger.now[:, at]
        ledger.wait[:, at] += waited
        ledger.transfer[:, at] += cost
        ledger.now[:, at] = until

    def _messages_of(self, event: Event, program: Program) -> _Messages:
        """Return the messages that the workers of a program send or receive in `event`."""
        found = self._messages.get((program, event.operation))
        if found is None:
            source, to = event.operation.members
            sources, receivers = source + program.moved, to + program.moved
            seconds = self.collectives.messages(
                event.operation.nbytes, sources, receivers
            )
            found = self._messages[program, event.operation] = _Messages(
                int(sources[0]), int(receivers[0]), seconds
            )
        return found

    def _send(self, event: Event, program: Program) -> None:
        source, to, seconds = self._messages_of(event, program)
        sent = self.ledger.now[:, program.places].copy()
        self._mail[source, to, event.tag].append((sent, sent + seconds))

    def _receive(self, event: Event, program: Program) -> bool:
        """Take messages if they were sent; those of workers that others stand for are sent now."""
        source, to, seconds = self._messages_of(event, program)
        at, nbytes = program.places, event.operation.nbytes
        now = self.ledger.now[:, at]
        # Of equal workers a few are in the arrays: the others do the same at the same
        # time.
        if source >= self.workers:
            sent, arrival = now, now + seconds
        elif mail := self._mail[source, to, event.tag]:
            sent, arrival = mail.pop(0)
        else:
            return False
        until, waited = np.maximum(now, arrival), np.maximum(0.0, sent - now)
        cost = until - now - waited
        if event.name == "add":
            until = (
                until
                + self.prices.each(lambda costs: costs.adding(nbytes), "add", nbytes)[
                    :, None
                ]
            )
        self._record(at, until, waited, cost)
        if event.tag in BETWEEN_STAGES:
            self.ledger.bubble[:, at] += waited
        return True


class _Messages(NamedTuple):
    """One message of each worker of a program: the first source and receiver, and the seconds, (M, workers)."""

    source: int
    to: int
    seconds: Floats


def _by_stretch(compute: Compute, seconds: Floats) -> Floats:
    """Return the seconds of each uninterrupted stretch of compute, (stretches, M, workers)."""
    if not len(compute.starts):
        return seconds
    sums: Floats = np.add.reduceat(seconds, compute.starts, axis=0)
    return sums


def _steps_before(compute: Compute) -> Floats:
    """Return the steps whose variance precedes each event: a forward pass stands for one, a part of it for less."""
    # The jitter of a step counts once, with its forward pass; the variance of a part
    # goes with the square of its share.
    varied = np.where(compute.tasks == Task.FORWARD, compute.shares**2, 0.0)
    return np.concatenate(([0.0], np.cumsum(varied)))
