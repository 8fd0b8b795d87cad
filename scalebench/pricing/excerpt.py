"""Excerpts of long trainings: few epochs of few steps, recorded in place of all, and the time of all from them.

The time of an epoch is linear in its whole periods of steps, and epochs repeat with the period of the strategy. So two
lengths of an epoch and the first, a middle and the last period of epochs give the time of any training. Stretches in
which a strategy behaves otherwise (warm-up, cool-down, first steps) are recorded whole. Partial periods count in
proportion, and every batch has the mean number of samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.pricing.schedule import Ints
from scalebench.strategies.base import Strategy

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EvenPlan:
    """Batches of equal workers with equal shards, each one block: what a recording asks of a `BatchPlan`."""

    workers: int
    steps_per_epoch: int
    batch_size: int = 1
    lead: int = 0  # further steps of the first epoch

    def shard_sizes(self, epoch: int) -> Ints:
        return np.broadcast_to(np.int64(self.steps(epoch) * self.batch_size), self.workers)

    def steps(self, epoch: int) -> int:
        return self.steps_per_epoch + (self.lead if epoch == 0 else 0)

    def bounds(self, epoch: int, worker: int) -> Ints:
        return np.arange(self.steps(epoch) + 1) * self.batch_size

    def block_starts(self, epoch: int, worker: int) -> Ints:
        return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Excerpt:
    """Recorded epochs of `strategy`, of one length in `steps` or of two, from which longer epochs are extrapolated.

    Each stands for so many as `counts` says, the last of which is that of what follows the last epoch. The first epoch
    has `lead` further steps. `joined`: a step stands for an epoch's.
    """

    strategy: Strategy
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    joined: bool
    lead: int = 0

    @property
    def epochs(self) -> int:
        return len(self.counts) - 1

    def whole(self, marks: list[Floats], steps: Floats) -> Floats:
        """Return the ledgers of the whole training, (columns, M), with epochs of `steps` (M,).

        `marks` (epochs + 1, columns, M) are the cumulative ledgers of the excerpt at each length.
        """
        durations = [np.diff(each, axis=0, prepend=0.0) for each in marks]
        parts = durations[0]
        if len(self.steps) == 2:
            recorded = np.full((len(parts), 1, 1), float(self.steps[0]))
            recorded[0] += self.lead
            parts = parts + (durations[1] - parts) / (self.steps[1] - self.steps[0]) * (steps - recorded)
        total: Floats = np.tensordot(self.counts, parts, axes=1)
        return total


def excerpt_of(strategy: Strategy, epochs: int, steps: int) -> Excerpt:
    """Return the excerpt of a training of `epochs` of `steps` that keeps the periods of `strategy` whole.

    Of long stretches of warm-up and cool-down the ends are kept, of what lies between them three periods.
    """
    period, every = _steps_of_a_period(strategy), _epochs_of_a_period(strategy)
    start, head = _first_steps(strategy), 0
    lengths: tuple[int, ...] = (period, 2 * period)
    lead = period * max(0, math.ceil(start / period) - 1)
    joined = strategy.synchronisation.unit != "batch"
    if joined:
        lengths, lead = (1,), 0
    elif steps <= lengths[-1] + lead:
        lengths, lead = (steps,), 0
        head = math.ceil(start / steps)
        every *= period // math.gcd(period, steps)  # until steps and periods meet again at the end of an epoch
    ends = {name: int(getattr(strategy, name, 0)) for name in ("warm_up_epochs", "cool_down_epochs")}
    between = epochs - head - sum(ends.values())
    if between <= 3 * every:
        return Excerpt(strategy, lengths, (1,) * (epochs + 1), joined, lead)
    repeats, rest = divmod(between - 3 * every, every)
    middle = (1,) * every + (1 + repeats,) * every + (1,) * (every + rest)
    first, last = map(_at_ends, ends.values())
    kept = {name: len(counts) for name, counts in zip(ends, (first, last), strict=True) if len(counts) < ends[name]}
    shortened = strategy.model_copy(update=kept)
    return Excerpt(shortened, lengths, (*first, *(1,) * head, *middle, *last, 1), joined, lead)


def _at_ends(epochs: int) -> tuple[int, ...]:
    """Return the counts of the first of `epochs` that repeat, of those after it, and of the last one."""
    return (1, epochs - 2, 1) if epochs > 3 else (1,) * epochs


def _steps_of_a_period(strategy: Strategy) -> int:
    """Return the steps after which the synchronisations of `strategy` repeat."""
    said = strategy.synchronisation
    groups: Any = getattr(strategy, "groups", None)
    every = said.every if said.unit == "batch" else 1
    return math.lcm(max(1, every), *groups.values()) if isinstance(groups, dict) else max(1, every)


def _epochs_of_a_period(strategy: Strategy) -> int:
    said = strategy.synchronisation
    return max(1, said.every) if said.unit == "epoch" else 1


def _first_steps(strategy: Strategy) -> int:
    """Return the steps after which `strategy` begins to behave as it goes on."""
    if getattr(strategy, "compression", "powersgd") != "powersgd":
        return 0
    return max(_option(strategy, "start"), _option(strategy, "first"))


def _option(strategy: Strategy, name: str) -> int:
    return int(getattr(strategy, name, 0) or 0)
