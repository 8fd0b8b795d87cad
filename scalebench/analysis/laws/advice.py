"""Recommended worker counts by a law: its knee, the largest count worth running, and the fastest.

With S the speedup over `serial` (in weak scaling N T1 / T) and E = S / N the efficiency, as in the figures, and T by
the law:

- The *knee* is the N with the largest E S, the most speed for the workers spent. There the elasticity d log S / d log N
  is 1/2: one more percent of workers buys half a percent of speed. (D. L. Eager, J. Zahorjan and E. D. Lazowska, IEEE
  Trans. Computers 38(3), 1989, doi:10.1109/12.21127. Amdahl's law has it at (1 - s)/s.) The elasticity at N is taken
  over a quarter of a doubling around it.
- The largest N *worth running* has at least the requested efficiency.
- The *fastest* N has the least time (strong scaling) or the largest scaled speedup (weak).

Knee and largest N are real numbers, each with the integer to run. Their 95 % intervals are the N at which the band of
the elasticity contains 1/2, or that of the efficiency the requested one, so they cover as often as the bands, with
2.5 % on either side. An upper end beyond the band (`reach`) is not given. The lower end keeps its 2.5 %: a level chosen
by the presence of an upper end would cover less near the end of the band (G. J. Feldman and R. D. Cousins, Phys. Rev. D
57(7), 1998, doi:10.1103/PhysRevD.57.3873). A law is followed up to 16 times the largest measured N, as long as a worker
has a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.bands import linear, no_band, reach
from scalebench.analysis.laws.fitting import Candidate
from scalebench.analysis.laws.series import Series
from scalebench.measured import Measured

Array: TypeAlias = npt.NDArray[np.float64]

FURTHEST = 16.0
_PER_OCTAVE = 16
_ROUNDING = 1e-9
STEP = 2 ** (1 / 8)


@dataclass(frozen=True)
class Count:
    """A number of workers: `at` by the law, with its 95 % interval, and the integer to run.

    With `reaches_end` the search ended there, and the true number may be larger. `measured` is the largest measured
    count. `at.high` is infinite where no upper end lies within the band. No suitable number is 0, with `at` NaN.
    """

    workers: int
    at: Measured
    reaches_end: bool
    measured: int

    @property
    def is_guessed(self) -> bool:
        """Return True if the number lies beyond the data and has no interval."""
        return self.workers > self.measured and math.isnan(self.at.low)


@dataclass(frozen=True)
class Advice:
    """Recommended counts. `limit` is the N up to which the law was followed; the fastest N has no interval."""

    knee: Count
    worth: Count
    efficiency: float
    fastest: Count
    limit: int


def advise(found: Sequence[Candidate], series: Series, efficiency: float) -> Advice:
    """Knee, largest N with at least `efficiency`, and fastest N by the best law of `found`."""
    limit = math.floor(min(FURTHEST * series.counts[-1], max(series.most_workers, series.counts[-1])))
    at = 2 ** np.linspace(0, math.log2(limit), math.ceil(_PER_OCTAVE * math.log2(limit)) + 1)
    best = found[0].fit
    base = series.base
    alone = base.log_seconds if base else best.law.log_seconds(np.ones(1), best.coefficients)

    def log_speed(n: Array) -> Array:
        gained = alone - best.law.log_seconds(n, best.coefficients)
        return np.asarray(gained + np.log(n) if series.weak else gained)

    def knee_height(n: Array) -> Array:
        return np.asarray(2 * log_speed(n) - np.log(n))

    def log_efficiency(n: Array) -> Array:
        return np.asarray(log_speed(n) - np.log(n))

    level, measured = math.log(efficiency), int(series.counts[-1])
    knee, knee_at = _highest(at, knee_height)
    worth, worth_at = 0, math.nan
    if len(enough := np.flatnonzero(log_efficiency(at) >= level - _ROUNDING)):
        place = int(enough[-1])
        whole = _whole_around(at, place)
        worth = int(whole[log_efficiency(whole) >= level - _ROUNDING].max(initial=1))
        worth_at = max(_crossing(at, log_efficiency(at), level, place), float(worth))
    of_knee, of_worth = Measured(knee_at), Measured(worth_at)
    if not no_band(series):
        of_knee = _around(*_elasticity(at, found, series), 0.5, knee_at)
        if worth and not (base and math.isnan(base.variance)):
            of_worth = _around(*_log_efficiency(at, found, series), level, worth_at)
    fastest, fastest_at = _highest(at, log_speed)
    return Advice(
        Count(knee, of_knee, knee >= limit, measured),
        Count(worth, of_worth, worth >= limit, measured),
        efficiency,
        Count(fastest, Measured(fastest_at), fastest >= limit, measured),
        limit,
    )


def _highest(at: Array, height: Callable[[Array], Array]) -> tuple[int, float]:
    """The smallest integer that maximises `height`, and the real maximum."""
    from scipy.optimize import minimize_scalar

    place = int(np.argmax(np.round(height(at), 9)))
    whole = _whole_around(at, place)
    workers = int(whole[np.argmax(np.round(height(whole), 9))])
    if place in (0, len(at) - 1):
        return workers, float(at[place])
    ends = (at[place - 1], at[place + 1])
    peak = minimize_scalar(lambda n: -height(np.array([n]))[0], bounds=ends, method="bounded", options={"xatol": 1e-6})
    return workers, float(peak.x)


def _whole_around(at: Array, place: int) -> Array:
    """Integers around `at[place]`, up to its neighbours."""
    low, high = at[max(place - 1, 0)], at[min(place + 1, len(at) - 1)]
    return np.arange(math.floor(low + _ROUNDING), math.ceil(high - _ROUNDING) + 1, dtype=float)


def _elasticity(at: Array, found: Sequence[Candidate], series: Series) -> tuple[Array, Measured]:
    inner = _up_to(min(at[-1], reach(series)) / STEP, at[at >= STEP])
    points = np.concatenate([inner * STEP, inner / STEP])
    slope = np.hstack([-np.eye(len(inner)), np.eye(len(inner))]) / math.log(STEP**2)
    band = linear(found, series, points, slope)
    return inner, Measured(*(part + series.weak for part in band[:3]))


def _log_efficiency(at: Array, found: Sequence[Candidate], series: Series) -> tuple[Array, Measured]:
    inner = _up_to(min(at[-1], reach(series)), at[1:])
    if series.base:
        band = linear(found, series, inner, -np.eye(len(inner)), series.base)
    else:
        against_one = np.hstack([np.ones((len(inner), 1)), -np.eye(len(inner))])
        band = linear(found, series, np.concatenate([np.ones(1), inner]), against_one)
    return inner, Measured(*(part - (not series.weak) * np.log(inner) for part in band[:3]))


def _up_to(end: float, at: Array) -> Array:
    """Values of `at` below `end`, then `end`."""
    return np.append(at[at < end * (1 - _ROUNDING)], end)


def _around(at: Array, band: Measured, level: float, centre: float) -> Measured:
    """`centre` with the largest interval in which the band contains `level`; 1 and infinity where it is not left."""
    surely_above = np.flatnonzero((band.low > level) & (at <= centre))
    surely_below = np.flatnonzero((band.high < level) & (at >= centre))
    low = min(_crossing(at, band.low, level, int(surely_above[-1])), centre) if len(surely_above) else 1.0
    high = max(_crossing(at, band.high, level, int(surely_below[0]) - 1), centre) if len(surely_below) else math.inf
    return Measured(centre, low, high)


def _crossing(at: Array, limit: Array, level: float, place: int) -> float:
    """N between `at[place]` and the next one at which `limit` is `level`, linear in log N."""
    if not 0 <= place < len(at) - 1:
        return float(at[np.clip(place, 0, len(at) - 1)])
    (left, right), (before, after) = np.log(at[place : place + 2]), limit[place : place + 2]
    share = (before - level) / (before - after) if before > after else 1.0
    return float(np.exp(left + np.clip(share, 0.0, 1.0) * (right - left)))
