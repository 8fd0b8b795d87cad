"""Centres and 95 % intervals of a few repeated values.

Times are compared on a log scale: their noise multiplies, and a ratio of times is a difference of logs. The interval of
n values x is mean(x) +- t(0.975, n-1) s / sqrt(n), on logs for times, as they are for metrics. One value has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = "95 % confidence interval"
CALIBRATION = "calibration interval"


class Estimate(NamedTuple):
    """A centre with the interval around it (NaN where there is none) from `n` values."""

    centre: float
    low: float
    high: float
    n: int


def interval_name(execution: str) -> str:
    """Virtual repetitions resample a calibration; only measured ones are a sample of times."""
    return CONFIDENCE if execution in ("native", "paced") else CALIBRATION


def mean_interval(values: Sequence[float]) -> Estimate:
    """Arithmetic mean with a t interval, for metrics."""
    x = np.asarray(values, dtype=float)
    if not len(x):
        return Estimate(math.nan, math.nan, math.nan, 0)
    if len(x) == 1:
        return Estimate(float(x[0]), math.nan, math.nan, 1)
    half = _t(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    centre = float(x.mean())
    return Estimate(centre, centre - half, centre + half, len(x))


def time_interval(seconds: Sequence[float]) -> Estimate:
    """Geometric mean of positive times with a t interval on their logs."""
    return _exp(mean_interval(np.log(np.asarray(seconds, dtype=float)).tolist()))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Geometric mean of numerator_i / denominator_i with a t interval on the log ratios; both vary inside it."""
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    return time_interval((top / bottom).tolist())


def unpaired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Ratio of geometric means of two independent samples with Welch's t interval on logs."""
    top, bottom = np.log(np.asarray(numerator, dtype=float)), np.log(np.asarray(denominator, dtype=float))
    centre = float(top.mean() - bottom.mean())
    n = min(len(top), len(bottom))
    if n < 2:
        return Estimate(math.exp(centre), math.nan, math.nan, n)
    shares = [float(sample.var(ddof=1)) / len(sample) for sample in (top, bottom)]
    variance = sum(shares)
    if variance == 0:
        return _exp(Estimate(centre, centre, centre, n))
    freedom = variance**2 / sum(s**2 / (len(x) - 1) for s, x in zip(shares, (top, bottom), strict=True))
    half = _t(freedom) * math.sqrt(variance)
    return _exp(Estimate(centre, centre - half, centre + half, n))


def t_bounds(
    mean: pd.Series[float], deviation: pd.Series[float], n: pd.Series[int]
) -> tuple[pd.Series[float], pd.Series[float]]:
    """The bounds of `mean_interval` for many samples at once, from their means, standard deviations and sizes."""
    from scipy.special import stdtrit

    half = deviation / np.sqrt(n) * stdtrit((n - 1).where(n > 1), 0.975)
    return mean - half, mean + half


def _exp(logs: Estimate) -> Estimate:
    return Estimate(math.exp(logs.centre), math.exp(logs.low), math.exp(logs.high), logs.n)


def _t(freedom: float) -> float:
    from scipy.special import stdtrit  # scipy.stats, which has it too, takes seconds to import

    return float(stdtrit(freedom, 0.975))
