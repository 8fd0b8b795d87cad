"""How many workers: where a law has its knee, how many are worth running, and how many are the fastest.

With S the speedup over one worker (in weak scaling N T1 / T) and E = S / N the efficiency, all by the law:

- The *knee* is the N with the largest E S, the most speed for the workers spent. There the elasticity d log S / d log N
  is 1/2: one more percent of workers buys half a percent of speed. (D. L. Eager, J. Zahorjan and E. D. Lazowska, IEEE
  Trans. Computers 38(3), 1989, doi:10.1109/12.21127. Amdahl's law has it at (1 - s)/s.) The elasticity at N is taken
  over the doubling around it, from N / sqrt 2 to N sqrt 2.
- The largest N *worth running* has an efficiency of at least what was asked for.
- The *fastest* N has the least time (strong scaling) or the largest scaled speedup (weak).

Their intervals reach from the estimate to where the band of the elasticity no longer contains 1/2, or that of the
efficiency the one asked for: they hold N wherever the band at N holds the truth, so that they cover at least as often.
They have no end where the curve has no band (`reach`), and err on one side only then. A law is followed up to 16 times
the largest measured N, as long as a worker has a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.bands import Band, linear, no_band, reach
from scalebench.analysis.laws.choosing import Candidate
from scalebench.analysis.laws.series import Series

Array: TypeAlias = npt.NDArray[np.float64]

FURTHEST = 16.0
_PER_OCTAVE = 16
_ROUNDING = 1e-9
_UNKNOWN = (math.nan, math.nan)


@dataclass(frozen=True)
class Count:
    """A number of workers with its 95 % interval (NaN without one).

    At `reaches_end` it is where the search ended: the true one may be larger. `measured` is the largest that was
    measured.
    """

    workers: int
    low: float
    high: float
    reaches_end: bool
    measured: int

    @property
    def is_guessed(self) -> bool:
        """Whether it lies beyond the data, and nothing says how far it may be off."""
        return self.workers > self.measured and math.isnan(self.low)


@dataclass(frozen=True)
class Advice:
    """What to run. `limit` is the N up to which the law was followed; the fastest N has no interval of its own."""

    knee: Count
    worth: Count
    efficiency: float
    fastest: Count
    limit: int


def advise(found: Sequence[Candidate], series: Series, efficiency: float) -> Advice:
    """Knee, largest N of at least `efficiency`, and fastest N by the best of `found`."""
    limit = math.floor(min(FURTHEST * series.counts[-1], max(series.most_workers, series.counts[-1])))
    at = 2 ** np.linspace(0, math.log2(limit), math.ceil(_PER_OCTAVE * math.log2(limit)) + 1)
    best = found[0].fit
    alone = best.law.log_seconds(np.ones(1), best.coefficients)

    def log_speed(n: Array) -> Array:
        gained = alone - best.law.log_seconds(n, best.coefficients)
        return np.asarray(gained + np.log(n) if series.weak else gained)

    def knee_height(n: Array) -> Array:
        return np.asarray(2 * log_speed(n) - np.log(n))

    knee = _highest(at, knee_height)
    enough = np.flatnonzero(log_speed(at) - np.log(at) >= math.log(efficiency) - _ROUNDING)
    whole = _whole_around(at, int(enough[-1]))
    worth = int(whole[log_speed(whole) - np.log(whole) >= math.log(efficiency) - _ROUNDING].max(initial=1))
    sure, measured = not no_band(series), int(series.counts[-1])
    of_knee = _knee_interval(at, knee, found, series) if sure else _UNKNOWN
    of_worth = _worth_interval(at, worth, found, series, efficiency) if sure else _UNKNOWN
    fastest = _highest(at, log_speed)
    return Advice(
        Count(knee, *of_knee, knee >= limit, measured),
        Count(worth, *of_worth, worth >= limit, measured),
        efficiency,
        Count(fastest, *_UNKNOWN, fastest >= limit, measured),
        limit,
    )


def _highest(at: Array, height: Callable[[Array], Array]) -> int:
    """The whole number of workers at which `height` is largest, the smallest of equal ones."""
    whole = _whole_around(at, int(np.argmax(np.round(height(at), 9))))
    return int(whole[np.argmax(np.round(height(whole), 9))])


def _whole_around(at: Array, place: int) -> Array:
    """The whole numbers around `at[place]`, to its neighbours and the next beyond them."""
    low, high = at[max(place - 1, 0)], at[min(place + 1, len(at) - 1)]
    return np.arange(math.floor(low + _ROUNDING), math.ceil(high - _ROUNDING) + 1, dtype=float)


def _knee_interval(at: Array, knee: int, found: Sequence[Candidate], series: Series) -> tuple[float, float]:
    inner = _up_to(min(at[-1] / math.sqrt(2), reach(series)), at[at >= math.sqrt(2)])
    points = np.concatenate([inner * math.sqrt(2), inner / math.sqrt(2)])
    slope = np.hstack([-np.eye(len(inner)), np.eye(len(inner))]) / math.log(2)
    band = linear(found, series, points, slope)
    elasticity = Band(*(part + series.weak for part in (band.centre, band.low, band.high)))
    low, high = _around(inner, elasticity, 0.5, knee)
    return _floor(low), -_floor(-high)  # the best whole number is one of the two beside the best of all


def _worth_interval(
    at: Array, worth: int, found: Sequence[Candidate], series: Series, efficiency: float
) -> tuple[float, float]:
    inner = _up_to(min(at[-1], reach(series)), at[1:])
    points = np.concatenate([np.ones(1), inner])
    against_one = np.hstack([np.ones((len(inner), 1)), -np.eye(len(inner))])
    band = linear(found, series, points, against_one)
    share = Band(*(part - (not series.weak) * np.log(inner) for part in (band.centre, band.low, band.high)))
    low, high = _around(inner, share, math.log(efficiency), worth)
    return _floor(low), _floor(high)


def _up_to(end: float, at: Array) -> Array:
    """What of `at` is below `end`, and `end`."""
    return np.append(at[at < end * (1 - _ROUNDING)], end)


def _around(at: Array, band: Band, level: float, centre: int) -> tuple[float, float]:
    """Where, on the way down and up from `centre`, the band leaves `level`: 1 or infinity where it does not."""
    surely_above = np.flatnonzero((band.low > level) & (at <= centre))
    surely_below = np.flatnonzero((band.high < level) & (at >= centre))
    low = min(_crossing(at, band.low, level, int(surely_above[-1])), centre) if len(surely_above) else 1.0
    high = max(_crossing(at, band.high, level, int(surely_below[0]) - 1), centre) if len(surely_below) else math.inf
    return low, high


def _floor(n: float) -> float:
    """The whole number below `n`, or `n` itself where it is one but for rounding."""
    return float(np.floor(n + 1e3 * _ROUNDING))


def _crossing(at: Array, limit: Array, level: float, place: int) -> float:
    """The N between `at[place]` and the next at which `limit` is `level`, by a straight line over log N."""
    if not 0 <= place < len(at) - 1:
        return float(at[np.clip(place, 0, len(at) - 1)])
    (left, right), (before, after) = np.log(at[place : place + 2]), limit[place : place + 2]
    share = (before - level) / (before - after) if before > after else 1.0
    return float(np.exp(left + np.clip(share, 0.0, 1.0) * (right - left)))
