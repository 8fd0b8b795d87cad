"""Intervals of many samples at once, along the last axis, from the variances that add up in what each is about.

The mean of a sample varies by s^2 / n, one more draw around it by s^2 (1 + 1/n), and a difference of two that are
independent by both. `half_width` turns any sum of such parts into Student's half width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
SAME_METRIC = 1e-9  # metrics no further apart are equal but for rounding
MEAN_FROM, METRIC_FROM, MEDIAN_FROM = 2, 3, 6
BETWEEN_FROM = 2  # degrees of freedom
_SURPLUS, _SURPLUS_OF_PAIRS = 2.0, 6.0  # of `half_width`
_KEPT = 0.7  # of `variance_between`
_LEAST, _BISECTIONS = 1e-12, 50

Array = NDArray[np.float64]


class Part(NamedTuple):
    """A part of the variance of a result, and the degrees of freedom with which it is known; numbers or arrays."""

    variance: ArrayLike
    freedom: ArrayLike


class Bounds(NamedTuple):
    """A centre with the interval around it (NaN where there is none), for many samples at once."""

    centre: Array
    low: Array
    high: Array


def mean_bounds(values: ArrayLike, level: float = LEVEL) -> Bounds:
    """`mean_interval` of every sample along the last axis."""
    return _around(_mean(values), half_width([_of_mean(values)], level))


def metric_bounds(values: ArrayLike) -> Bounds:
    """`metric_interval` of every sample along the last axis."""
    found, x = mean_bounds(values), np.asarray(values, dtype=float)
    if x.shape[-1] < MEAN_FROM:
        return found
    same = np.ptp(x, axis=-1) <= SAME_METRIC
    known = np.where(same, np.abs(found.centre) <= SAME_METRIC, x.shape[-1] >= METRIC_FROM)
    return Bounds(found.centre, np.where(known, found.low, math.nan), np.where(known, found.high, math.nan))


def welch_bounds(top: ArrayLike, bottom: ArrayLike, level: float = LEVEL) -> Bounds:
    """Difference of the means of two independent samples, Welch's interval, along the last axis."""
    top, bottom = equally_many(top, bottom)
    return _apart(top, bottom, [_of_mean(top), _of_mean(bottom)], level)


def agreement_bounds(virtual: ArrayLike, native: ArrayLike, level: float = LEVEL) -> Bounds:
    """`virtual_native_ratio` of every pair of samples along the last axis, on logs."""
    virtual, native = equally_many(virtual, native)
    return _apart(virtual, native, [_of_draw(virtual), _of_mean(native)], level)


def calibrations_bounds(top: ArrayLike, bottom: ArrayLike, error: Part | None = None, level: float = LEVEL) -> Bounds:
    """`ratio_of_calibrations` of every pair of samples along the last axis, on logs."""
    top, bottom = equally_many(top, bottom)
    return _apart(top, bottom, [_of_draw(top), _of_draw(bottom), *([error] if error else [])], level)


def equally_many(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """The first values of both, as many as both have: a t interval of unequal numbers holds too little or too much."""
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n = min(x.shape[-1], y.shape[-1])
    return x[..., :n], y[..., :n]


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


def calibration_bounds(values: ArrayLike, error: Part | None = None, level: float = LEVEL) -> Bounds:
    """`calibration_interval` of every sample along the last axis, on logs."""
    return _around(_mean(values), half_width([_of_draw(values), *([error] if error else [])], level))


def relative_width(logs: ArrayLike, level: ArrayLike = LEVEL) -> Array:
    """(high - low) / centre of `time_interval`, of every sample along the last axis."""
    half = half_width([_of_mean(logs)], level)
    return np.asarray(np.exp(half) - np.exp(-half))


def half_width(parts: Sequence[Part], level: ArrayLike = LEVEL) -> Array:
    """t(f) sqrt(v_1 + v_2 + ...) of independent `parts` of a variance, elementwise; NaN where one is not known.

    One part has its own degrees of freedom. Several have Satterthwaite's, V^2 / sum(v_i^2 / f_i) (Biometrics Bulletin
    2, 1946), or where the f_i are equal Welch's V^2 / sum(v_i^2 / (f_i + 2)) - 2 (Biometrika 34, 1947), which leaves
    out what v_i^2 overestimates; never fewer than the least f_i nor more than all together. Welch's series begins at
    large f_i: where all are 1 it has 6 in the place of 2, by simulation (docs/statistics.md).
    """
    variances = [np.asarray(part.variance, dtype=float) for part in parts]
    freedoms = [np.asarray(part.freedom, dtype=float) for part in parts]
    total = np.asarray(sum(variances))
    least, most = np.minimum.reduce(freedoms), np.maximum.reduce(freedoms)
    surplus = np.where(least < most, 0.0, np.where(most == 1, _SURPLUS_OF_PAIRS, _SURPLUS))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [(v / total) ** 2 / (f + surplus) for v, f in zip(variances, freedoms, strict=True)]
        freedom = np.clip(1 / sum(shares) - surplus, least, sum(freedoms))
    return np.where(total > 0, np.sqrt(total) * quantile(np.where(total > 0, freedom, most), level), 0.0 * total)


def weighted_mean(values: ArrayLike, variances: ArrayLike, between: ArrayLike = 0.0) -> Array:
    """Mean along the last axis, with weights 1 / (variance + between)."""
    weights = 1 / np.maximum(np.asarray(variances, dtype=float) + np.asarray(between)[..., None], _LEAST)
    return np.asarray((weights * values).sum(axis=-1) / weights.sum(axis=-1))


def variance_between(groups: Sequence[tuple[ArrayLike, ArrayLike]]) -> Part | None:
    """Variance of values within groups beyond the noise of each, along the last axis; None below BETWEEN_FROM degrees.

    A group is its values and the variances of their noise. Q(t) = sum (x - mean)^2 / (v + t) falls with t, and has the
    mean f at the true t: Paule and Mandel (J. Research NBS 87, 1982) solve Q(t) = f. A few values of which noise is
    taken out are too close by chance as often as not: at least _KEPT of their variance with the noise stays, so that
    intervals with Student's t of f hold what they say (docs/statistics.md).
    """
    pairs = [(np.asarray(values, dtype=float), np.asarray(noise, dtype=float)) for values, noise in groups]
    freedom = sum(values.shape[-1] - 1 for values, _ in pairs)
    if freedom < BETWEEN_FROM:
        return None
    squares = [np.square(values - values.mean(axis=-1, keepdims=True)).sum(axis=-1) for values, _ in pairs]
    with_noise = np.asarray(sum(squares)) / freedom
    low, high = np.zeros_like(with_noise), with_noise  # Q(with_noise) <= f, as noise only lowers Q
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        more = sum(_weighted_squares(values, noise, middle) for values, noise in pairs) > freedom
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    return Part(np.maximum(high, _KEPT * with_noise), freedom)


def _weighted_squares(values: Array, noise: Array, between: Array) -> Array:
    weights = 1 / np.maximum(noise + between[..., None], _LEAST)
    mean = weighted_mean(values, noise, between)[..., None]
    return np.asarray((weights * np.square(values - mean)).sum(axis=-1))


@cache
def median_ranks(n: int, level: float = LEVEL) -> tuple[int, float]:
    """The 0-based order statistic below a median's lower bound, and how far that lies towards the next one.

    The order statistics d and n + 1 - d enclose the median with probability 1 - 2 P(B < d), B binomial (n, 1/2). The
    bound lies between the last d that encloses it with at least `level` and the next one, at Hettmansperger and
    Sheather's (n - d) i / (d + (n - 2 d) i), where i is the share of the surplus in the step from d to d + 1.
    """
    ways = accumulate(range(1, n // 2 + 1), lambda number, k: number * (n - k + 1) // k, initial=1)  # n over k
    below = np.cumsum([number / 2**n for number in ways])  # P(B <= k)
    enclosed = 1 - 2 * below  # [d - 1]
    d = int((enclosed >= level).sum())
    surplus = (enclosed[d - 1] - level) / (enclosed[d - 1] - enclosed[d])
    return d - 1, float((n - d) * surplus / (d + (n - 2 * d) * surplus))


def quantile(freedom: ArrayLike, level: ArrayLike = LEVEL) -> Any:
    """Student's t below which (1 + level) / 2 lie, elementwise; NaN without a degree of freedom."""
    from scipy.special import stdtrit  # scipy.stats, which has it too, takes seconds to import

    degrees = np.asarray(freedom, dtype=float)
    return stdtrit(np.where(degrees > 0, degrees, math.nan), (1 + np.asarray(level)) / 2)


def _mean(values: ArrayLike) -> Array:
    x = np.asarray(values, dtype=float)
    return np.asarray(x.mean(axis=-1) if x.shape[-1] else np.full(x.shape[:-1], math.nan))


def _of_mean(values: ArrayLike) -> Part:
    """The variance of a mean."""
    variance, n = _variance(values)
    return Part(variance / max(n, 1), n - 1)


def _of_draw(values: ArrayLike) -> Part:
    """The variance of one more draw around the mean of these."""
    variance, n = _variance(values)
    return Part(variance * (1 + 1 / max(n, 1)), n - 1)


def _variance(values: ArrayLike) -> tuple[Array, int]:
    x = np.asarray(values, dtype=float)
    n = x.shape[-1]
    return (x.var(axis=-1, ddof=1) if n > 1 else np.full(x.shape[:-1], math.nan)), n


def _apart(top: ArrayLike, bottom: ArrayLike, parts: Sequence[Part], level: float) -> Bounds:
    """The difference of two means; without bounds where there are too few values."""
    return _around(_mean(top) - _mean(bottom), half_width(parts, level))


def _around(centre: Array, half: Array) -> Bounds:
    return Bounds(centre, centre - half, centre + half)
