"""Centres of a few repeated values and how far they may be off.

Times are compared on a log scale: their noise multiplies, and a ratio of times is a difference of logs. Every interval
of a time is about the median of the run times, which is their geometric mean where noise is lognormal; every interval
of a ratio about the ratio of two medians. Each from the number of values at which it covers what it says
(docs/statistics.md, by simulation):

    mean            mean(x) +- t(n-1) s / sqrt(n), on logs for times and their ratios            from MEAN_FROM
    Welch's         the same for a difference of two independent means                           from MEAN_FROM
    median          between two order statistics, interpolated (Hettmansperger and Sheather,
                    Statistics & Probability Letters 4, 1986): right whatever the noise          from MEDIAN_FROM
    calibration     mean(x) +- t(f) sqrt(s^2 (1 + 1/n) + e^2), for virtual times                 from MEAN_FROM
    apart           a difference of two centres of which either is one of these                  from MEAN_FROM

Two that vary independently are set against each other with equally many values, the first of the one that has more.

The repetitions of a virtual run are bootstrap draws of one calibration: their spread s, not s / sqrt(n), is how far the
calibration may be off, and more of them only tell s better. e is what a comparison with real runs adds to it. Where
variances from several sources add up, f is Welch's (`half_width`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scalebench.analysis.bounds import (
    LEVEL,
    METRIC_FROM,
    SAME_METRIC,
    Bounds,
    Part,
    agreement_bounds,
    calibration_bounds,
    calibrations_bounds,
    mean_bounds,
    median_bounds,
    metric_bounds,
    quantile,
    welch_bounds,
)

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = "95 % confidence interval"
CALIBRATION = "calibration interval"
CHECKED_CALIBRATION = "calibration interval with virtual-native error"
STATED = "interval over draws at stated step times"
CHECKED_STATED = "interval over draws at stated step times with virtual-native error"
NOTHING_VARIES = "no interval, as nothing varies"

# A study that repeats until its intervals are narrow stops where they happen to be: 95 % would cover 90 %. Nearest to
# that comes who stops after some runs; at once, or at the most, nearly all do alike. Ratios have widths of their own,
# which nothing waits for, but numbers of runs at which t is wide. By simulation: docs/statistics.md.
STOPPED_AT_ONCE, STOPPED_LATER, STOPPED_AT_MOST = 0.96, 0.986, 0.972
RATIO_WHEN_STOPPED = 0.945


class Estimate(NamedTuple):
    """A centre with the interval around it (NaN where there is none) from `n` values."""

    centre: float
    low: float
    high: float
    n: int


def level_of(study: Mapping[str, Any], n: ArrayLike) -> Any:
    """The nominal level of the t and calibration intervals of the times of `n` runs each, elementwise."""
    until = study.get("until")
    if not isinstance(until, Mapping):
        return np.full(np.shape(n), LEVEL)[()]
    return level_when_stopped(n, until.get("at_least", 3), until.get("at_most", 20))


def level_when_stopped(n: ArrayLike, at_least: int, at_most: int) -> Any:
    """The same where `until` looked at each number of runs from `at_least` to `at_most`; elementwise."""
    if at_least == at_most:
        return np.full(np.shape(n), LEVEL)[()]
    runs = np.asarray(n)
    later = np.where(runs < at_most, STOPPED_LATER, STOPPED_AT_MOST)
    return np.where(runs <= at_least, STOPPED_AT_ONCE, later)[()]


def level_of_ratios(*studies: Mapping[str, Any]) -> float:
    """The nominal level of the t intervals of ratios of times, by block and of independent samples, of `studies`."""
    return RATIO_WHEN_STOPPED if any(study.get("until") for study in studies) else LEVEL


def interval_name(execution: str, *, checked: bool = False, varies: bool = True, stated: bool = False) -> str:
    """Virtual repetitions resample a calibration, `checked` by real runs or not; only measured ones are a sample.

    Of `stated` step times nothing was calibrated: their draws differ by a stated jitter, by the order in which workers
    arrive at once, or by whom they meet. Without any of these they do not vary, nor does one computation made twice:
    the bounds are the value itself.
    """
    if execution in ("native", "paced"):
        return CONFIDENCE
    if not varies:
        return NOTHING_VARIES
    if stated:
        return CHECKED_STATED if checked else STATED
    return CHECKED_CALIBRATION if checked else CALIBRATION


def mean_interval(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """Arithmetic mean with a t interval."""
    return _estimate(mean_bounds(values, level), len(values))


def metric_interval(values: Sequence[float]) -> Estimate:
    """`mean_interval` from METRIC_FROM values, without bounds where all are equal and not zero.

    A metric counts samples: a few seeds that agree on a grid of 1 / n_test say nothing of how far others would lie, and
    of two that differ by a step or more the interval is wide enough 99 times in 100.
    Differences that are all zero are of one computation made twice, and stay [0, 0].
    """
    return _estimate(metric_bounds(values), len(values))


def unpaired_metric(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """mean(a) - mean(b) of two independent samples of a metric, Welch's from METRIC_FROM of each.

    Without bounds where neither varies.
    """
    found = _estimate(welch_bounds(a, b), min(len(a), len(b)))
    known = found.n >= METRIC_FROM and found.high - found.low > SAME_METRIC
    return found if known else found._replace(low=math.nan, high=math.nan)


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


def calibration_interval(logs: Sequence[float], error: Part | None = None, level: float = LEVEL) -> Estimate:
    """Geometric mean of virtual times or ratios, given as logs, and how far it may lie from what a machine would show.

    `error` is what the comparison with real runs says of the simulation (`validation.VirtualError.part`).
    """
    return _exp(_estimate(calibration_bounds(logs, error, level), len(logs)))


def virtual_native_ratio(virtual: Sequence[float], native: Sequence[float]) -> Estimate:
    """T_virtual / T_native, how far the calibration may be off and how native runs vary both inside its interval.

    Draws of one calibration are no sample: the spread of the virtual times is not divided by sqrt(n).
    """
    bounds = agreement_bounds(np.log(virtual), np.log(native))
    return _exp(_estimate(bounds, min(len(virtual), len(native))))


def ratio_of_calibrations(
    top: Sequence[float], bottom: Sequence[float], level: float = LEVEL, *, error: Part | None = None
) -> Estimate:
    """Ratio of virtual times of two calibrations, which vary independently; `error` as in `calibration_interval`."""
    bounds = calibrations_bounds(np.log(top), np.log(bottom), error, level)
    return _exp(_estimate(bounds, min(len(top), len(bottom))))


def t_bounds(
    mean: pd.Series[float], deviation: pd.Series[float], n: pd.Series[int], level: float = LEVEL
) -> tuple[pd.Series[float], pd.Series[float]]:
    """The bounds of `mean_interval` for many samples of different sizes, from their means, deviations and sizes."""
    half = deviation / np.sqrt(n) * quantile(n - 1, level)
    return mean - half, mean + half


def _logs(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    return [float(x) for x in np.log(top) - np.log(bottom)]


def _estimate(bounds: Bounds, n: int) -> Estimate:
    return Estimate(float(bounds.centre), float(bounds.low), float(bounds.high), n)


def _exp(logs: Estimate) -> Estimate:
    return Estimate(math.exp(logs.centre), math.exp(logs.low), math.exp(logs.high), logs.n)
