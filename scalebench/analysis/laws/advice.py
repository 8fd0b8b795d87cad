"""How many workers: where a law has its knee, how many are worth running, and how many are the fastest.

With S the speedup over one worker (in weak scaling N T1 / T) and E = S / N the efficiency, all by the law:

- The *knee* is the N with the largest E S, the most speed for the workers spent. There the elasticity d log S / d log N
  is 1/2: one more percent of workers buys half a percent of speed. (D. L. Eager, J. Zahorjan and E. D. Lazowska, IEEE
  Trans. Computers 38(3), 1989, doi:10.1109/12.21127. Amdahl's law has it at (1 - s)/s.) The elasticity at N is taken
  over the doubling around it, from N / sqrt 2 to N sqrt 2.
- The largest N *worth running* has an efficiency of at least what was asked for.
- The *fastest* N has the least time (strong scaling) or the largest scaled speedup (weak).

Their intervals reach from the estimate to where the band of the elasticity no longer contains 1/2, or that of the
efficiency the one asked for. A law is followed up to 16 times the largest measured N, as long as a worker has a whole
batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.bands import Band, linear, no_band
from scalebench.analysis.laws.choosing import Candidate
from scalebench.analysis.laws.series import Series

Array: TypeAlias = npt.NDArray[np.float64]

FURTHEST = 16.0
_PER_OCTAVE = 16


@dataclass(frozen=True)
class Count:
    """A number of workers with its 95 % interval (NaN without one).

    At `reaches_end` it is where the search ended: the true one may be larger.
    """

    workers: int
    low: float
    high: float
    reaches_end: bool


@dataclass(frozen=True)
class Advice:
    """What to run. `limit` is the N up to which the law was followed."""

    knee: Count
    worth: Count
    efficiency: float
    fastest: int
    limit: int


def advise(found: Sequence[Candidate], series: Series, efficiency: float) -> Advice:
    """Knee, largest N of at least `efficiency`, and fastest N by the best of `found`."""
    limit = math.floor(min(FURTHEST * series.counts[-1], max(series.most_workers, series.counts[-1])))
    at = 2 ** np.linspace(0, math.log2(limit), math.ceil(_PER_OCTAVE * math.log2(limit)) + 1)
    best = found[0].fit
    speed = -best.law.log_seconds(at, best.coefficients) + best.law.log_seconds(np.ones(1), best.coefficients)
    speed = speed + np.log(at) if series.weak else speed
    sure = not no_band(series)
    return Advice(
        _knee(at, speed, found, series, sure),
        _worth(at, speed, found, series, limit, sure, efficiency),
        efficiency,
        round(float(at[int(np.argmax(np.round(speed, 9)))])),
        limit,
    )


def _knee(at: Array, speed: Array, found: Sequence[Candidate], series: Series, sure: bool) -> Count:
    centre = float(at[int(np.argmax(2 * speed - np.log(at)))])
    workers = max(1, round(centre))
    if not sure:
        return Count(workers, math.nan, math.nan, bool(centre >= at[-1]))
    inner = at[(at >= math.sqrt(2)) & (at <= at[-1] / math.sqrt(2))]
    points = np.concatenate([inner * math.sqrt(2), inner / math.sqrt(2)])
    slope = np.hstack([-np.eye(len(inner)), np.eye(len(inner))]) / math.log(2)
    band = linear(found, series, points, slope)
    elastic = Band(*(part + series.weak for part in (band.centre, band.low, band.high)))
    low, high = _around(inner, elastic, 0.5, centre)
    return Count(workers, min(low, workers), max(high, workers), bool(centre >= at[-1]))


def _worth(
    at: Array,
    speed: Array,
    found: Sequence[Candidate],
    series: Series,
    limit: int,
    sure: bool,
    efficiency: float,
) -> Count:
    enough = speed - np.log(at) >= math.log(efficiency) - 1e-9
    centre = float(at[np.flatnonzero(enough)[-1]])
    workers = _largest_whole(at, speed - np.log(at), math.log(efficiency), limit)
    if not sure:
        return Count(workers, math.nan, math.nan, bool(centre >= at[-1]))
    points = np.concatenate([np.ones(1), at[1:]])
    against_one = np.hstack([np.ones((len(at) - 1, 1)), -np.eye(len(at) - 1)])
    band = linear(found, series, points, against_one)
    share = Band(*(part - (not series.weak) * np.log(at[1:]) for part in (band.centre, band.low, band.high)))
    low, high = _around(at[1:], share, math.log(efficiency), centre)
    return Count(workers, min(low, workers), max(high, workers), bool(centre >= at[-1]))


def _largest_whole(at: Array, log_efficiency: Array, wanted: float, limit: int) -> int:
    """The largest whole N whose efficiency, interpolated between the points, is enough."""
    last = int(np.flatnonzero(log_efficiency >= wanted - 1e-9)[-1])
    if last + 1 == len(at):
        return limit
    ends, heights = np.log(at[last : last + 2]), log_efficiency[last : last + 2]
    crossing = math.exp(float(np.interp(-wanted, -heights, ends)))
    return max(1, math.floor(crossing + 1e-6))


def _around(at: Array, band: Band, level: float, centre: float) -> tuple[float, float]:
    """Where, on the way down and up from `centre`, the band leaves `level`: 1 or infinity where it does not."""
    surely_above = at[(band.low > level) & (at <= centre)]
    surely_below = at[(band.high < level) & (at >= centre)]
    low = float(surely_above[-1]) if len(surely_above) else 1.0
    return low, float(surely_below[0]) if len(surely_below) else math.inf
