"""Excerpts of long trainings: few epochs of few steps, recorded in place of all, and the time of all from them.

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
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scalebench.pricing.schedule import Ints
from scalebench.strategies.traits import Stretch

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
            parts = parts + (durations[1] - parts) / (self.steps[1] - self.steps[0]) * (
                steps - recorded
            )
        total: Floats = np.tensordot(self.counts, parts, axes=1)
        return total


def excerpt_of(
    stretches: tuple[Stretch, ...] | None, epochs: int, steps: int
) -> Excerpt:
    """Return the excerpt of a training of `epochs` of `steps` whose program consists of `stretches`."""
    if stretches is None:
        return Excerpt((steps,), (1,) * (epochs + 1), whole=True)
    every = math.lcm(*(each.period for each in stretches if each.unit == "epoch"))
    if all(each.unit == "epoch" for each in stretches):
        return Excerpt((1,), _counts(stretches, 0, epochs, every), joined=True)
    first = sum(each.steps or 0 for each in stretches)
    by_batches = [
        each for each in stretches if each.unit == "batch" and each.steps is None
    ]
    period = math.lcm(*(each.period for each in by_batches))
    lead = period * max(0, math.ceil(first / period) - 1)
    counts_on = any(each.period > 1 and not each.restarts for each in by_batches)
    # with the beginning of an epoch
    until_aligned = every * period // math.gcd(period, steps) if counts_on else every
    rest, tail = steps % period, 0
    if counts_on and all(each.epochs is None for each in stretches):
        rest, tail = (
            0,
            epochs * steps % period,
        )  # period follows period, and the last one may be partial
    else:
        every = until_aligned
    lengths = (period + rest, 2 * period + rest)
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
