"""The scaling laws of a study, one result per strategy, engine and execution, with recommended worker counts.

A law recommends three counts: its knee, the largest count worth running, and the
fastest.

With S the speedup over `serial` (in weak scaling N T1 / T) and E = S / N the
efficiency, as in the figures, and T by the law:

- The *knee* is the N with the largest E S, the most speed for the workers spent. There the elasticity d log S / d log N
  is 1/2: one more percent of workers buys half a percent of speed. (D. L. Eager, J. Zahorjan and E. D. Lazowska, IEEE
  Trans. Computers 38(3), 1989, doi:10.1109/12.21127. Amdahl's law has it at (1 - s)/s.) The elasticity at N is taken
  over a quarter of a doubling around it.
- The largest N *worth running* has at least the requested efficiency.
- The *fastest* N has the least time (strong scaling) or the largest scaled speedup (weak).

Knee and largest N are real numbers, each with the integer to run. Their 95 % intervals
are the N at which the band of the elasticity contains 1/2, or that of the efficiency
the requested one, so they cover as often as the bands, with 2.5 % on either side. An
upper end beyond the band (`reach`) is not given. The lower end keeps its 2.5 %: a level
chosen by the presence of an upper end would cover less near the end of the band (G. J.
Feldman and R. D. Cousins, Phys. Rev. D 57(7), 1998, doi:10.1103/PhysRevD.57.3873). A
law is followed up to 16 times the largest measured N, as long as a worker has a whole
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.bands import (
    linear,
    no_band,
    no_extrapolation,
    parameter_interval,
    reach,
)
from scalebench.analysis.laws.candidates import (
    Candidate,
    Parameter,
    candidates,
    laws_for,
    shared_noise,
)
from scalebench.analysis.laws.series import Series, series_of
from scalebench.analysis.loading import Results, cached
from scalebench.analysis.rounds import MEASURED
from scalebench.errors import ResultsError, UsageError, nearest
from scalebench.formatting import counted
from scalebench.measured import Measured

EFFICIENCY = 0.5
POOR_FIT = 0.1
POOR_FORECAST = 0.25

Array: TypeAlias = npt.NDArray[np.float64]

FURTHEST = 16.0
_PER_OCTAVE = 16
_ROUNDING = 1e-9
STEP = 2 ** (1 / 8)


@dataclass(frozen=True, eq=False)
class Scaling:
    """Laws of one series, best first, or the reason for the missing fit in `refusal`; parameters of the best law."""

    series: Series
    candidates: Sequence[Candidate] = ()
    parameters: Sequence[tuple[Parameter, Measured]] = ()
    advice: Advice | None = None
    refusal: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def best(self) -> Candidate:
        """Law of the lowest AICc; only without a `refusal`."""
        return self.candidates[0]


def scaling_laws(
    results: Results, *, strategies: Sequence[str] = (), efficiency: float = EFFICIENCY
) -> list[Scaling]:
    """Laws of every series of `results`, or of `strategies` by name or label.

    Raises:
        UsageError: `efficiency` is not in (0, 1], or a strategy is not in the results.
        ResultsError: no strategy but serial completed a run.
    """
    if not 0 < efficiency <= 1:
        raise UsageError(
            f"an efficiency lies above 0 and is at most 1, got {efficiency:g}"
        )
    found = series_of(results)
    if not found:
        raise ResultsError(
            f"{results.folder} holds no completed run of a strategy but serial; nothing there scales"
        )
    for name in strategies:
        known = {one.key.label for one in found} | {
            one.key.label.partition("(")[0] for one in found
        }
        if name == "serial":
            raise UsageError(
                "strategy serial runs at one worker, and no law is fitted to it; name another --strategy"
            )
        if name not in known:
            raise UsageError(
                f"no completed run of strategy {name!r} in {results.folder}; {nearest(name, known)}"
            )
    if strategies:
        found = [
            one
            for one in found
            if {one.key.label, one.key.label.partition("(")[0]} & set(strategies)
        ]
    return [scaling_of(one, efficiency) for one in found]


@cached
def all_laws(results: Results) -> list[Scaling]:
    """`scaling_laws` of all strategies at the usual efficiency, fitted once for a table and a figure of one report."""
    return scaling_laws(results)


def scaling_of(series: Series, efficiency: float = EFFICIENCY) -> Scaling:
    """Fit laws to one series, choose one, and recommend worker counts."""
    if series.refusal:
        return Scaling(series, refusal=series.refusal, notes=series.notes)
    laws, notes = laws_for(series)
    found, more = candidates(laws, series)
    notes = [*series.notes, *notes, *more]
    if not found:
        runs = counted(len(series.at), "run")
        verb = "is" if len(series.at) == 1 else "are"
        reason = f"{runs} {verb} too few to choose between laws; add repetitions with --repetitions"
        return Scaling(series, refusal=reason, notes=tuple(notes))
    best = found[0].fit
    unsure = no_band(series)
    if unsure:
        notes.append(unsure)
    elif series.key.execution in MEASURED and shared_noise(series).variance > 0:
        notes.append(
            "whole repetitions were slower or faster than others, and the intervals are wider for it"
        )
    if not unsure and no_extrapolation(series):
        notes.append(no_extrapolation(series))
    if best.misfit > POOR_FIT:
        worst = int(np.argmax(np.abs(best.residuals)))
        notes.append(
            f"no law fits well: {best.law.name} misses the means by {100 * best.misfit:.0f} % typically and "
            f"{100 * np.expm1(best.residuals[worst]):+.0f} % at {counted(int(best.counts[worst]), 'worker')}"
        )
    if abs(found[0].leave_out_error) > POOR_FORECAST:
        notes.append(
            f"not to be trusted beyond what was measured: fitted without {best.counts[-1]:.0f} workers, "
            f"{best.law.name} misses them by {100 * found[0].leave_out_error:+.0f} %"
        )
    estimated = [
        (
            one,
            Measured(one.of(best.coefficients))
            if unsure
            else parameter_interval(best, series, one),
        )
        for one in best.law.parameters
    ]
    return Scaling(
        series, found, estimated, advise(found, series, efficiency), notes=tuple(notes)
    )


@dataclass(frozen=True)
class Count:
    """A number of workers: `at` by the law, with its 95 % interval, and the integer to run.

    With `reaches_end` the search ended there, and the true number may be larger.
    `measured` is the largest measured count. `at.high` is infinite where no upper end
    lies within the band. No suitable number is 0, with `at` NaN.
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
    largest = series.counts[-1]
    # Beyond, a worker has no whole batch, or the law is a guess.
    limit = math.floor(min(FURTHEST * largest, max(series.most_workers, largest)))
    octaves = math.log2(limit)
    at = 2 ** np.linspace(0, octaves, math.ceil(_PER_OCTAVE * octaves) + 1)
    best = found[0].fit
    base = series.base
    alone = (
        base.log_seconds
        if base
        else best.law.log_seconds(np.ones(1), best.coefficients)
    )

    def log_speed(n: Array) -> Array:
        gained = alone - best.law.log_seconds(n, best.coefficients)
        return np.asarray(gained + np.log(n) if series.weak else gained)

    def knee_height(n: Array) -> Array:
        return np.asarray(2 * log_speed(n) - np.log(n))

    def log_efficiency(n: Array) -> Array:
        return np.asarray(log_speed(n) - np.log(n))

    level = math.log(efficiency)
    measured = int(series.counts[-1])
    knee, knee_at = _highest(at, knee_height)
    worth, worth_at = 0, math.nan
    enough = np.flatnonzero(log_efficiency(at) >= level - _ROUNDING)
    if len(enough):
        place = int(enough[-1])
        whole = _whole_around(at, place)
        worth = int(whole[log_efficiency(whole) >= level - _ROUNDING].max(initial=1))
        # Interpolation may end a rounding below the integer that was tried.
        worth_at = max(_crossing(at, log_efficiency(at), level, place), float(worth))
    of_knee = Measured(knee_at)
    of_worth = Measured(worth_at)
    if not no_band(series):
        of_knee = _around(*_elasticity(at, found, series), 0.5, knee_at)
        # A base of one repetition has no spread that could be in an interval.
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

    # Rounded: of equal heights the smaller number of workers.
    place = int(np.argmax(np.round(height(at), 9)))
    whole = _whole_around(at, place)
    workers = int(whole[np.argmax(np.round(height(whole), 9))])
    # A maximum at the end of the search has no neighbour to bracket it.
    if place in (0, len(at) - 1):
        return workers, float(at[place])
    ends = (at[place - 1], at[place + 1])

    def depth(n: float) -> float:
        return float(-height(np.array([n]))[0])

    peak = minimize_scalar(
        depth, bounds=ends, method="bounded", options={"xatol": 1e-6}
    )
    return workers, float(peak.x)


def _whole_around(at: Array, place: int) -> Array:
    """Integers around `at[place]`, up to its neighbours."""
    low = at[max(place - 1, 0)]
    high = at[min(place + 1, len(at) - 1)]
    return np.arange(
        math.floor(low + _ROUNDING), math.ceil(high - _ROUNDING) + 1, dtype=float
    )


def _elasticity(
    at: Array, found: Sequence[Candidate], series: Series
) -> tuple[Array, Measured]:
    # Both ends of the slope have to lie where there is a band.
    inner = _up_to(min(at[-1], reach(series)) / STEP, at[at >= STEP])
    # A slope over a quarter of a doubling: derivatives of laws have no common form.
    points = np.concatenate([inner * STEP, inner / STEP])
    one = np.eye(len(inner))
    slope = np.hstack([-one, one]) / math.log(STEP**2)
    band = linear(found, series, points, slope)
    return inner, Measured(*(part + series.weak for part in band[:3]))


def _log_efficiency(
    at: Array, found: Sequence[Candidate], series: Series
) -> tuple[Array, Measured]:
    inner = _up_to(min(at[-1], reach(series)), at[1:])
    if series.base:
        band = linear(found, series, inner, -np.eye(len(inner)), series.base)
    else:
        against_one = np.hstack([np.ones((len(inner), 1)), -np.eye(len(inner))])
        band = linear(found, series, np.concatenate([np.ones(1), inner]), against_one)
    return inner, Measured(
        *(part - (not series.weak) * np.log(inner) for part in band[:3])
    )


def _up_to(end: float, at: Array) -> Array:
    """Values of `at` below `end`, then `end`."""
    return np.append(at[at < end * (1 - _ROUNDING)], end)


def _around(at: Array, band: Measured, level: float, centre: float) -> Measured:
    """`centre` with the largest interval in which the band contains `level`; 1 and infinity where it is not left."""
    # Only on its side of the centre: a band may leave the level and come back.
    surely_above = np.flatnonzero((band.low > level) & (at <= centre))
    surely_below = np.flatnonzero((band.high < level) & (at >= centre))
    low = 1.0
    if len(surely_above):
        low = min(_crossing(at, band.low, level, int(surely_above[-1])), centre)
    high = math.inf
    if len(surely_below):
        high = max(_crossing(at, band.high, level, int(surely_below[0]) - 1), centre)
    return Measured(centre, low, high)


def _crossing(at: Array, limit: Array, level: float, place: int) -> float:
    """N between `at[place]` and the next one at which `limit` is `level`, linear in log N."""
    if not 0 <= place < len(at) - 1:
        return float(at[np.clip(place, 0, len(at) - 1)])
    (left, right), (before, after) = (
        np.log(at[place : place + 2]),
        limit[place : place + 2],
    )
    share = (before - level) / (before - after) if before > after else 1.0
    return float(np.exp(left + np.clip(share, 0.0, 1.0) * (right - left)))
