"""Centres of a few repeated values and how far they may be off.

Times are compared on a log scale: their noise multiplies, and a ratio of times is a difference of logs. The intervals,
each from the number of values at which it covers what it says (docs/statistics.md, by simulation):

    mean            mean(x) +- t(n-1) s / sqrt(n), on logs for times and their ratios            from MEAN_FROM
    Welch's         the same for a difference of two independent means (Biometrika 34, 1947)     from WELCH_FROM of each
    median          between two order statistics, interpolated (Hettmansperger and Sheather,
                    Statistics & Probability Letters 4, 1986): right whatever the noise          from MEDIAN_FROM
    calibration     mean(x) +- sqrt(t(n-1)^2 s^2 (1 + 1/n) + e^2), for virtual times             from MEAN_FROM
    apart           a difference of two of these that vary independently: half widths in quadrature

The repetitions of a virtual run are bootstrap draws of one calibration: their spread s, not s / sqrt(n), is how far the
calibration may be off, and more of them only tell s better. e is what a comparison with real runs adds to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = "95 % confidence interval"
CALIBRATION = "calibration interval"
CHECKED_CALIBRATION = "calibration interval with virtual-native error"

LEVEL = 0.95
# A study that repeats until its intervals are narrow stops where they happen to be: 95 % would cover 90 %. Nominal 97 %
# covers 93.6 to 97 %, whatever the noise and wherever it stops.
LEVEL_WHEN_STOPPED = 0.97

SAME_METRIC = 1e-9  # metrics no further apart are equal but for rounding

MEAN_FROM, WELCH_FROM, MEDIAN_FROM = 2, 3, 6

Array = NDArray[np.float64]


class Estimate(NamedTuple):
    """A centre with the interval around it (NaN where there is none) from `n` values."""

    centre: float
    low: float
    high: float
    n: int


class Bounds(NamedTuple):
    """The same for many samples at once."""

    centre: Array
    low: Array
    high: Array


def level_of(study: Mapping[str, Any]) -> float:
    """The nominal level of the intervals of times of a study, as its study.yaml has it."""
    return LEVEL_WHEN_STOPPED if study.get("until") else LEVEL


def interval_name(execution: str, *, checked: bool = False) -> str:
    """Virtual repetitions resample a calibration, `checked` by real runs or not; only measured ones are a sample."""
    if execution in ("native", "paced"):
        return CONFIDENCE
    return CHECKED_CALIBRATION if checked else CALIBRATION


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Arithmetic mean with a t interval."""
    return _estimate(mean_bounds(values, level), len(values))


def metric_interval(values: Sequence[float]) -> Estimate:
    """`mean_interval` without bounds where all values are equal, and not zero.

    A metric counts samples: a few seeds that agree on a grid of 1 / n_test say nothing of how far others would lie.
    Differences that are all zero are of one computation made twice, and stay [0, 0].
    """
    found = mean_interval(values)
    if len(values) > 1 and np.ptp(np.asarray(values)) <= SAME_METRIC < abs(found.centre):
        return found._replace(low=math.nan, high=math.nan)
    return found


def time_interval(seconds: Sequence[float], level: float = LEVEL) -> Estimate:
    """Geometric mean of positive times with a t interval on their logs."""
    return _exp(mean_interval(np.log(np.asarray(seconds, dtype=float)).tolist(), level))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float], level: float = LEVEL) -> Estimate:
    """Geometric mean of numerator_i / denominator_i with a t interval on the log ratios; both vary inside it."""
    return _exp(mean_interval(_logs(numerator, denominator), level))


def unpaired_ratio(numerator: Sequence[float], denominator: Sequence[float], level: float = LEVEL) -> Estimate:
    """Ratio of geometric means of two independent samples with Welch's t interval on logs."""
    top, bottom = np.log(np.asarray(numerator, dtype=float)), np.log(np.asarray(denominator, dtype=float))
    return _exp(_estimate(welch_bounds(top, bottom, level), min(len(top), len(bottom))))


def median_time(seconds: Sequence[float], level: float = LEVEL) -> Estimate:
    """Median of positive times, with its interval."""
    x = np.asarray(seconds, dtype=float)
    bounds = _exp(_estimate(median_bounds(np.log(x), level), len(x)))
    return bounds._replace(centre=float(np.median(x))) if len(x) else bounds


def median_ratio(numerator: Sequence[float], denominator: Sequence[float], level: float = LEVEL) -> Estimate:
    """Median of numerator_i / denominator_i (on logs, so that the inverse is its inverse), with its interval."""
    return _exp(_estimate(median_bounds(_logs(numerator, denominator), level), len(numerator)))


def calibration_interval(logs: Sequence[float], error: float = 0.0, level: float = LEVEL) -> Estimate:
    """Geometric mean of virtual times or ratios, given as logs, and how far it may lie from what a machine would show.

    `error` is the half width, on logs, that the comparison with real runs adds (`validation.VirtualError`).
    """
    return _exp(_estimate(calibration_bounds(logs, error, level), len(logs)))


def virtual_native_ratio(virtual: Sequence[float], native: Sequence[float]) -> Estimate:
    """T_virtual / T_native, how far the calibration may be off and how native runs vary both inside its interval.

    Draws of one calibration are no sample: the spread of the virtual times is not divided by sqrt(n).
    """
    top, bottom = calibration_bounds(np.log(virtual)), mean_bounds(np.log(native))
    return _exp(_estimate(apart(top, bottom), min(len(virtual), len(native))))


def ratio_of_calibrations(top: Sequence[float], bottom: Sequence[float], level: float = LEVEL) -> Estimate:
    """Ratio of virtual times of two calibrations, which vary independently."""
    bounds = apart(*(calibration_bounds(np.log(times), level=level) for times in (top, bottom)))
    return _exp(_estimate(bounds, min(len(top), len(bottom))))


def apart(top: Bounds, bottom: Bounds) -> Bounds:
    """The difference of two centres that vary independently, each with its interval: half widths in quadrature."""
    half = np.hypot(top.high - top.centre, bottom.high - bottom.centre)
    return _around(top.centre - bottom.centre, half)


def mean_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """`mean_interval` of every sample along the last axis."""
    n, mean, deviation = _moments(values)
    return _around(mean, deviation / math.sqrt(max(n, 1)) * quantile(n - 1, level))


def welch_bounds(top: ArrayLike, bottom: ArrayLike, level: float = LEVEL) -> Bounds:
    """Difference of the means of two independent samples, Welch's interval, along the last axis."""
    n, mean_top, deviation_top = _moments(top)
    m, mean_bottom, deviation_bottom = _moments(bottom)
    if min(n, m) < WELCH_FROM:
        return _around(mean_top - mean_bottom, np.full(mean_top.shape, math.nan))
    shares = deviation_top**2 / n, deviation_bottom**2 / m
    variance = shares[0] + shares[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = variance**2 / (shares[0] ** 2 / (n - 1) + shares[1] ** 2 / (m - 1))
    half = np.where(variance > 0, np.sqrt(variance) * quantile(np.where(variance > 0, freedom, 1), level), 0.0)
    return _around(mean_top - mean_bottom, half)


def median_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """Median of every sample along the last axis, with its interval."""
    x = np.sort(np.asarray(values, dtype=float), axis=-1)
    n = x.shape[-1]
    centre = np.median(x, axis=-1) if n else np.full(x.shape[:-1], math.nan)
    if n < MEDIAN_FROM:
        return _around(centre, np.full(np.shape(centre), math.nan))
    rank, inwards = median_ranks(n, level)
    if rank < 0:  # too few for this level
        return _around(centre, np.full(np.shape(centre), math.nan))
    low = (1 - inwards) * x[..., rank] + inwards * x[..., rank + 1]
    high = (1 - inwards) * x[..., n - 1 - rank] + inwards * x[..., n - 2 - rank]
    return Bounds(centre, low, high)


def calibration_bounds(values: ArrayLike, error: float = 0.0, level: float = LEVEL) -> Bounds:
    """`calibration_interval` of every sample along the last axis, on logs."""
    n, mean, deviation = _moments(values)
    return _around(mean, np.hypot(deviation * quantile(n - 1, level) * math.sqrt(1 + 1 / max(n, 1)), error))


@cache
def median_ranks(n: int, level: float = LEVEL) -> tuple[int, float]:
    """The 0-based order statistic below a median's lower bound, and how far that lies towards the next one.

    The order statistics d and n + 1 - d enclose the median with probability 1 - 2 P(B < d), B binomial (n, 1/2). The
    bound lies between the last d that encloses it with at least `level` and the next one, at Hettmansperger and
    Sheather's (n - d) i / (d + (n - 2 d) i), where i is the share of the surplus in the step from d to d + 1.
    """
    below = np.cumsum([math.comb(n, k) / 2**n for k in range(n // 2 + 1)])  # P(B <= k)
    enclosed = 1 - 2 * below  # [d - 1]
    d = int((enclosed >= level).sum())
    surplus = (enclosed[d - 1] - level) / (enclosed[d - 1] - enclosed[d])
    return d - 1, float((n - d) * surplus / (d + (n - 2 * d) * surplus))


def quantile(freedom: ArrayLike, level: float = LEVEL) -> Any:
    """Student's t below which (1 + level) / 2 lie; NaN without a degree of freedom."""
    from scipy.special import stdtrit  # scipy.stats, which has it too, takes seconds to import

    degrees = np.asarray(freedom, dtype=float)
    return stdtrit(np.where(degrees > 0, degrees, math.nan), (1 + level) / 2)


def t_bounds(
    mean: pd.Series[float], deviation: pd.Series[float], n: pd.Series[int], level: float = LEVEL
) -> tuple[pd.Series[float], pd.Series[float]]:
    """The bounds of `mean_interval` for many samples of different sizes, from their means, deviations and sizes."""
    half = deviation / np.sqrt(n) * quantile(n - 1, level)
    return mean - half, mean + half


def _logs(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    return [float(x) for x in np.log(top) - np.log(bottom)]


def _moments(values: ArrayLike) -> tuple[int, Array, Array]:
    x = np.asarray(values, dtype=float)
    n = x.shape[-1]
    none = np.full(x.shape[:-1], math.nan)
    return n, x.mean(axis=-1) if n else none, x.std(axis=-1, ddof=1) if n > 1 else none


def _around(centre: Array, half: Array) -> Bounds:
    return Bounds(centre, centre - half, centre + half)


def _estimate(bounds: Bounds, n: int) -> Estimate:
    return Estimate(float(bounds.centre), float(bounds.low), float(bounds.high), n)


def _exp(logs: Estimate) -> Estimate:
    return Estimate(math.exp(logs.centre), math.exp(logs.low), math.exp(logs.high), logs.n)
