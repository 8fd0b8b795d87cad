"""Measurement in rounds, until enough quiet windows are there.

Other programs take cores for a while, and a shared machine changes its speed within
milliseconds. So nothing is measured in one go: each round times the reference step,
which is the speed of its moment, and then some short windows. Rounds go on until the
quiet windows, those that no other program disturbed, give a precise value, or the time
is over.

Where too few windows are quiet (`are_enough`), what is measured decides what counts of
all of them: processor time of steps, the lower decile of operations, as other programs
only add to a time. It is then marked as `disturbed`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from scalebench.system.disturbance import FEWEST

T = TypeVar("T")


class Round(NamedTuple, Generic[T]):
    """Seconds of the reference step at the moment of a round, and what was measured in it."""

    reference_s: float
    found: T


def quiet_rounds(
    measure: Callable[[], T],
    reference: Callable[[], float],
    until: Callable[[Sequence[Round[T]]], bool],
) -> list[Round[T]]:
    """Measure in rounds, each after a look at the `reference` step, until the rounds so far are enough.

    Processes that measure together call it together: `until` then has one answer for
    all of them, and `reference` lets the others sleep while one takes the step.
    """
    rounds: list[Round[T]] = []
    while not until(rounds):
        # The reference first, as arguments are evaluated from the left.
        rounds.append(Round(reference(), measure()))
    return rounds


class Until(Generic[T]):
    """True once the rounds so far are enough, or `seconds` are over since it was made.

    The first round is always made, and the `fewest` are even if the time is over, as
    long as they begin within `patience` times the seconds. Within the time at least
    `least` rounds are made, and no more once they are `precise`; at most `most`.
    """

    def __init__(
        self,
        seconds: float,
        *,
        fewest: int = 1,
        patience: float = math.inf,
        least: int = 1,
        most: int | None = None,
        precise: Callable[[Sequence[Round[T]]], bool] = lambda rounds: False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds = seconds
        self._patience = patience
        self._precise = precise
        self._fewest = fewest
        self._least = least
        self._most = most
        self._now, self._began = now, now()

    def __call__(self, rounds: Sequence[Round[T]]) -> bool:
        done, elapsed = len(rounds), self._now() - self._began
        # However little time there is: no round would be no value.
        if done == 0:
            return False
        # A median of one round is worth little, so that these may take longer.
        if done < self._fewest:
            return elapsed >= self._patience * self._seconds
        if done == self._most or elapsed >= self._seconds:
            return True
        return done >= self._least and self._precise(rounds)


def are_enough(undisturbed: int, windows: int) -> bool:
    """Return True if the undisturbed ones of so many windows have a median: FEWEST, or all where there are fewer."""
    return undisturbed >= min(FEWEST, windows)
