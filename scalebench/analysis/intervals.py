"""Centres of repeated values with their intervals.

Every function takes samples along the last axis: one sample gives numbers, a table of
samples arrays. Times are compared on a log scale, because their noise is multiplicative
and a ratio of times is a difference of logs. The interval of a time is about the median
of the run times (the geometric mean of lognormal noise), that of a ratio about the
ratio of two medians. Each is offered from the number of values at which its simulated
coverage is as stated (docs/statistics.md):

    mean            mean(x) +- t(n-1) s / sqrt(n), on logs for times and their ratios            from MEAN_FROM
    Welch's         the same for a difference of two independent means                           from MEAN_FROM
    median          between two order statistics, interpolated (Hettmansperger and Sheather,
                    Statistics & Probability Letters 4, 1986); distribution-free                 from MEDIAN_FROM
    bootstrap       trimmed geometric mean of resampled logs, where asked for                    from BOOTSTRAP_FROM
    calibration     mean(x) +- t(f) sqrt(s^2 (1 + 1/n) + e^2), for virtual times                 from MEAN_FROM

The repetitions of a virtual run are bootstrap draws of one calibration: the uncertainty
of the calibration is their spread s, not s / sqrt(n), and more draws only estimate s
better. e is the virtual-native error where native runs check the simulation, without
the factor common to all virtual times (native_check.py). f are the degrees of freedom
of the sum of variances (`half_width`). Samples of a difference are cut to equal size,
because a t interval of unequal sizes covers too little or too much.

The percentile bootstrap (Efron, Annals of Statistics 7, 1979) is of the 20 % trimmed
mean of logs, the combination that Wilcox recommends (Introduction to Robust Estimation
and Hypothesis Testing, 2017, section 4.4): at 20 values it covers 93 to 96 %, with and
without odd runs. The bootstrap of the mean covers 75 to 87 % where one run in ten is
slow, and 75 to 83 % at 3 to 5 lognormal values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis.loading import Results, table_by_cell
from scalebench.analysis.rounds import MEASURED, runs_by_cell
from scalebench.errors import UsageError
from scalebench.formatting import counted
from scalebench.measured import UNKNOWN, Measured

Array = NDArray[np.float64]

LEVEL = 0.95
SAME_METRIC = 1e-9  # metrics closer than this are equal up to rounding
MEAN_FROM, METRIC_FROM, MEDIAN_FROM = 2, 3, 6  # values
BETWEEN_FROM = 2  # degrees of freedom
_SURPLUS, _SURPLUS_OF_PAIRS = 2.0, 6.0  # of `half_width`
_KEPT = 0.7  # of `variance_between`
_LEAST, _BISECTIONS = 1e-12, 50

METRIC_RANGE = {
    "accuracy": (0.0, 1.0),
    "r2": (-math.inf, 1.0),
}  # intervals of a metric end where no value exists

CONFIDENCE = "95 % confidence interval"
CALIBRATION = "calibration interval"
STATED = "interval over repetitions at stated step times"
NOTHING_VARIES = "no interval, as nothing varies"

# A study that repeats until its intervals are narrow stops at favourable samples:
# nominal 95 % would cover 90 %. The levels restore the coverage, by simulation
# (docs/statistics.md). Coverage is lowest for cells that stop between the first look
# and the last. No run waits for a ratio to be narrow, but at the numbers of runs where
# cells stop t is wide.
STOPPED_AT_ONCE, STOPPED_LATER, STOPPED_AT_MOST = 0.96, 0.986, 0.972
RATIO_WHEN_STOPPED = 0.945

BOOTSTRAP_FROM = 20
RESAMPLES = 10_000
BOOTSTRAP = "95 % bootstrap interval"
_TRIMMED = 0.2  # of the values, at either end
_AT_ONCE = 4_000_000  # values resampled at a time: 32 MB


class Part(NamedTuple):
    """A part of the variance of a result with its degrees of freedom; numbers or arrays."""

    variance: ArrayLike
    freedom: ArrayLike


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Measured:
    """Arithmetic mean with a t interval."""
    x = np.asarray(values, dtype=float)
    return _around(_mean(x), half_width([of_mean(x)], level), x.shape[-1])


def metric_interval(values: ArrayLike, metric: str = "") -> Measured:
    """Mean of a metric over seeds with a t interval from METRIC_FROM values, without bounds where all are equal.

    Metrics lie on a grid of 1 / n_test: a few equal values do not show how far other
    seeds lie, and two values that differ by a step or more have an interval that covers
    99 %. The interval ends where no value of the `metric` exists.
    """
    # Its bounds are dropped below where they say less than they seem to.
    found = mean_interval(values)
    x = np.asarray(values, dtype=float)
    if found.n < METRIC_FROM:
        return _offered(found, False)
    ended = found.within(*METRIC_RANGE.get(metric, (-math.inf, math.inf)))
    return _offered(ended, np.ptp(x, axis=-1) > SAME_METRIC)


def metric_difference(values: ArrayLike) -> Measured:
    """Mean of differences of a metric over common seeds, with the interval of `metric_interval`.

    Differences that are all zero come from one computation made twice, and have the
    interval [0, 0].
    """
    found = metric_interval(values)
    x = np.asarray(values, dtype=float)
    if found.n < MEAN_FROM:
        return found
    nothing = np.abs(x).max(axis=-1) <= SAME_METRIC
    low, high = (
        np.where(nothing, found.value, bound)[()] for bound in (found.low, found.high)
    )
    return found._replace(low=low, high=high)


def unpaired_metric(a: ArrayLike, b: ArrayLike) -> Measured:
    """mean(a) - mean(b) of two independent samples of a metric, Welch's interval from METRIC_FROM values of each.

    Without bounds where neither sample varies.
    """
    found = difference_interval(a, b)
    return _offered(
        found, (found.n >= METRIC_FROM) & (found.high - found.low > SAME_METRIC)
    )


def difference_interval(
    a: ArrayLike,
    b: ArrayLike,
    level: float = LEVEL,
    *,
    draws: tuple[bool, bool] = (False, False),
    error: Part | None = None,
) -> Measured:
    """mean(a) - mean(b) of two independent samples, Welch's interval.

    `draws` marks samples that are draws of one calibration: their variance is not
    divided by n. `error` is a further part of the variance.
    """
    a, b = equally_many(a, b)
    parts = [
        of_draw(x) if drawn else of_mean(x)
        for x, drawn in zip((a, b), draws, strict=True)
    ]
    if error:
        parts.append(error)
    return _around(_mean(a) - _mean(b), half_width(parts, level), a.shape[-1])


def calibration_interval(
    logs: ArrayLike, error: Part | None = None, level: float = LEVEL
) -> Measured:
    """Mean log of virtual times or ratios, with the uncertainty of their calibration.

    `error` is the virtual-native error (`native_check.VirtualError`): of a time what it
    has of its own.
    """
    x = np.asarray(logs, dtype=float)
    parts = [of_draw(x)]
    if error:
        parts.append(error)
    return _around(_mean(x), half_width(parts, level), x.shape[-1])


def median_interval(values: ArrayLike, level: float = LEVEL) -> Measured:
    """Median with its interval between order statistics, from MEDIAN_FROM values."""
    x = np.sort(np.asarray(values, dtype=float), axis=-1)
    n = x.shape[-1]
    centre = np.median(x, axis=-1) if n else _mean(x)
    rank, inwards = median_ranks(n, level) if n >= MEDIAN_FROM else (-1, 0.0)
    if rank < 0:  # too few for this level
        return _around(centre, np.full(np.shape(centre), math.nan), n)
    low = (1 - inwards) * x[..., rank] + inwards * x[..., rank + 1]
    high = (1 - inwards) * x[..., n - 1 - rank] + inwards * x[..., n - 2 - rank]
    return Measured(centre, low, high, n)


def percentile_interval(value: Any, draws: ArrayLike, level: float = LEVEL) -> Measured:
    """`value` with the percentiles of its `draws` along the first axis, such as a result computed from resamples."""
    low, high = np.quantile(
        np.asarray(draws), [(1 - level) / 2, (1 + level) / 2], axis=0
    )
    return Measured(value, low, high)


def time_interval(seconds: ArrayLike, level: float = LEVEL) -> Measured:
    """Geometric mean of positive times with a t interval on their logs."""
    return mean_interval(np.log(np.asarray(seconds, dtype=float)), level).map(math.exp)


def median_time(seconds: ArrayLike, level: float = LEVEL) -> Measured:
    """Median of positive times with its interval."""
    x = np.asarray(seconds, dtype=float)
    found = median_interval(np.log(x), level).map(math.exp)
    # Of an even number the middle of two logs is their geometric mean: the usual median
    # is given.
    return found._replace(value=float(np.median(x))) if found.n else found


def paired_ratio(
    numerator: ArrayLike, denominator: ArrayLike, level: float = LEVEL
) -> Measured:
    """Geometric mean of numerator_i / denominator_i with a t interval on the log ratios."""
    return mean_interval(_log_ratios(numerator, denominator), level).map(math.exp)


def median_ratio(
    numerator: ArrayLike, denominator: ArrayLike, level: float = LEVEL
) -> Measured:
    """Median of numerator_i / denominator_i on logs, with its interval; the inverse ratio has the inverse median."""
    return median_interval(_log_ratios(numerator, denominator), level).map(math.exp)


def unpaired_ratio(
    numerator: Sequence[float], denominator: Sequence[float], level: float = LEVEL
) -> Measured:
    """Ratio of geometric means of two independent samples with Welch's t interval on logs."""
    return difference_interval(np.log(numerator), np.log(denominator), level).map(
        math.exp
    )


def relative_width(logs: ArrayLike, level: ArrayLike = LEVEL) -> Array:
    """(high - low) / centre of `time_interval`, from the logs of times."""
    half = half_width([of_mean(np.asarray(logs, dtype=float))], level)
    return np.asarray(np.exp(half) - np.exp(-half))


def equally_many(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Cut both samples to the size of the smaller one."""
    x = np.asarray(a, dtype=float)
    y = np.asarray(b, dtype=float)
    n = min(x.shape[-1], y.shape[-1])
    return x[..., :n], y[..., :n]


def half_width(parts: Sequence[Part], level: ArrayLike = LEVEL) -> Array:
    """t(f) sqrt(v_1 + v_2 + ...) of independent `parts` of a variance, elementwise; NaN where a part is unknown.

    One part has its own degrees of freedom. Several have Satterthwaite's, V^2 /
    sum(v_i^2 / f_i) (Biometrics Bulletin 2, 1946), or where the f_i are equal Welch's
    V^2 / sum(v_i^2 / (f_i + 2)) - 2 (Biometrika 34, 1947), which corrects for the bias
    of v_i^2; clipped to [min f_i, sum f_i]. Welch's series holds for large f_i: where
    all are 1 the constant is 6 instead of 2, by simulation (docs/statistics.md).
    """
    variances = [np.asarray(part.variance, dtype=float) for part in parts]
    freedoms = [np.asarray(part.freedom, dtype=float) for part in parts]
    total = np.asarray(sum(variances))
    least = np.minimum.reduce(freedoms)
    most = np.maximum.reduce(freedoms)
    # Elementwise: tables of samples have different degrees of freedom.
    surplus = np.where(
        least < most, 0.0, np.where(most == 1, _SURPLUS_OF_PAIRS, _SURPLUS)
    )
    # 0 / 0 of samples without variance, which the last line replaces.
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = [
            (v / total) ** 2 / (f + surplus)
            for v, f in zip(variances, freedoms, strict=True)
        ]
        freedom = np.clip(1 / sum(shares) - surplus, least, sum(freedoms))
    # Without any variance there are no degrees of freedom either, and the width is
    # zero: NaN stays NaN.
    varies = total > 0
    quantile = t_quantile(np.where(varies, freedom, most), level)
    return np.where(varies, np.sqrt(total) * quantile, 0.0 * total)


def weighted_mean(
    values: ArrayLike, variances: ArrayLike, between: ArrayLike = 0.0
) -> Array:
    """Mean along the last axis, with weights 1 / (variance + between)."""
    variance = np.asarray(variances, dtype=float) + np.asarray(between)[..., None]
    weights = 1 / np.maximum(variance, _LEAST)
    return np.asarray((weights * values).sum(axis=-1) / weights.sum(axis=-1))


def variance_between(groups: Sequence[tuple[ArrayLike, ArrayLike]]) -> Part | None:
    """Variance of values within groups beyond their noise; None below BETWEEN_FROM degrees of freedom.

    A group is its values and the variances of their noise. The solution t of Q(t) = f,
    where Q(t) = sum (x - mean)^2 / (v + t) has the mean f at the true t (Paule and
    Mandel, J. Research NBS 87, 1982), but at least _KEPT of the variance with the
    noise: Student's t intervals of a few values need it (docs/statistics.md).
    """
    pairs = [
        (np.asarray(values, dtype=float), np.asarray(noise, dtype=float))
        for values, noise in groups
    ]
    freedom = sum(values.shape[-1] - 1 for values, _ in pairs)
    if freedom < BETWEEN_FROM:
        return None
    deviations = [values - values.mean(axis=-1, keepdims=True) for values, _ in pairs]
    squares = [np.square(own).sum(axis=-1) for own in deviations]
    with_noise = np.asarray(sum(squares)) / freedom
    low = np.zeros_like(with_noise)
    high = with_noise  # Q(with_noise) <= f, as noise only lowers Q
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        more = (
            sum(_weighted_squares(values, noise, middle) for values, noise in pairs)
            > freedom
        )
        low = np.where(more, middle, low)
        high = np.where(more, high, middle)
    # Estimates of few values are zero in part of the samples, and intervals would be
    # too narrow there.
    return Part(np.maximum(high, _KEPT * with_noise), freedom)


def _weighted_squares(values: Array, noise: Array, between: Array) -> Array:
    weights = 1 / np.maximum(noise + between[..., None], _LEAST)
    mean = weighted_mean(values, noise, between)[..., None]
    return np.asarray((weights * np.square(values - mean)).sum(axis=-1))


@cache
def median_ranks(n: int, level: float = LEVEL) -> tuple[int, float]:
    """0-based order statistic below the lower bound of a median, and the fraction of the step to the next one.

    The order statistics d and n + 1 - d enclose the median with probability 1 - 2 P(B <
    d), B binomial (n, 1/2). The bound lies between the last d that encloses it with at
    least `level` and the next one, at Hettmansperger and Sheather's (n - d) i / (d + (n
    - 2 d) i), where i is the share of the surplus in the step from d to d + 1. The rank
    is -1 where n is too small for `level`.
    """
    # n over k
    ways = accumulate(
        range(1, n // 2 + 1), lambda number, k: number * (n - k + 1) // k, initial=1
    )
    below = np.cumsum([number / 2**n for number in ways])  # P(B <= k)
    enclosed = 1 - 2 * below  # [d - 1]
    # The largest d whose interval still has the level.
    d = int((enclosed >= level).sum())
    surplus = (enclosed[d - 1] - level) / (enclosed[d - 1] - enclosed[d])
    return d - 1, float((n - d) * surplus / (d + (n - 2 * d) * surplus))


def t_quantile(freedom: ArrayLike, level: ArrayLike = LEVEL) -> Any:
    """Student's t with (1 + level) / 2 of the probability below it, elementwise; NaN without a degree of freedom."""
    from scipy.special import (
        stdtrit,
    )  # scipy.stats, which has it too, takes seconds to import

    degrees = np.asarray(freedom, dtype=float)
    return stdtrit(
        np.where(degrees > 0, degrees, math.nan), (1 + np.asarray(level)) / 2
    )


def level_of(study: Mapping[str, Any], n: ArrayLike) -> Any:
    """Nominal level of the t and calibration intervals of the times of `n` runs in `study`, elementwise."""
    until = study.get("until")
    if not isinstance(until, Mapping):
        return np.full(np.shape(n), LEVEL)[()]
    return level_when_stopped(n, until.get("at_least", 3), until.get("at_most", 20))


def level_when_stopped(n: ArrayLike, at_least: int, at_most: int) -> Any:
    """Nominal level after `n` runs where `until` looked at each number from `at_least` to `at_most`; elementwise."""
    # The number of runs was fixed: nothing looked at the data.
    if at_least == at_most:
        return np.full(np.shape(n), LEVEL)[()]
    runs = np.asarray(n)
    later = np.where(runs < at_most, STOPPED_LATER, STOPPED_AT_MOST)
    return np.where(runs <= at_least, STOPPED_AT_ONCE, later)[()]


def level_of_ratios(*studies: Mapping[str, Any]) -> float:
    """Nominal level of the t intervals of ratios of times of `studies`."""
    return RATIO_WHEN_STOPPED if any(study.get("until") for study in studies) else LEVEL


def interval_name(
    execution: str, *, error: str = "", varies: bool = True, stated: bool = False
) -> str:
    """Name of the intervals of an execution.

    Only measured repetitions are a sample; virtual ones resample a calibration, and
    have the `error` that is known of it, by name (`native_check.VirtualError`). At
    `stated` step times nothing was calibrated: draws differ by a stated jitter, the
    order of simultaneous arrivals or the choice of partners. Where nothing `varies` the
    bounds equal the value.
    """
    if execution in ("native", "paced"):
        return CONFIDENCE
    if not varies:
        return NOTHING_VARIES
    name = STATED if stated else CALIBRATION
    return f"{name} with {error}" if error else name


def _log_ratios(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    above = np.log(np.asarray(numerator, dtype=float))
    below = np.log(np.asarray(denominator, dtype=float))
    return np.asarray(above - below)


def _mean(x: Array) -> Any:
    if x.shape[-1] == 0:
        return np.full(x.shape[:-1], math.nan)[()]
    return x.mean(axis=-1)


def of_mean(x: Array) -> Part:
    """Variance of a mean, s^2 / n."""
    return Part(_variance(x) / max(x.shape[-1], 1), x.shape[-1] - 1)


def of_draw(x: Array) -> Part:
    """Variance of one more draw around a mean, s^2 (1 + 1/n)."""
    return Part(_variance(x) * (1 + 1 / max(x.shape[-1], 1)), x.shape[-1] - 1)


def _variance(x: Array) -> Array:
    if x.shape[-1] < 2:
        return np.full(x.shape[:-1], math.nan)
    return np.asarray(x.var(axis=-1, ddof=1))


def _around(centre: Any, half: Array, n: int) -> Measured:
    return Measured(centre, centre - half, centre + half, n)


def _offered(found: Measured, known: ArrayLike) -> Measured:
    """The interval without its bounds where they are not `known`."""
    low, high = (
        np.where(known, bound, math.nan)[()] for bound in (found.low, found.high)
    )
    return found._replace(low=low, high=high)


def bootstrap_interval(
    seconds: Sequence[float],
    level: float = LEVEL,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Measured:
    """Trimmed geometric mean of positive times or paired ratios, with its percentile bootstrap interval.

    Raises:
        UsageError: fewer than BOOTSTRAP_FROM values.
    """
    # Percentiles of resamples of few values lie too close together, whatever their
    # number.
    if len(seconds) < BOOTSTRAP_FROM:
        raise UsageError(
            f"no bootstrap of {counted(len(seconds), 'repetition')}: it is offered from {BOOTSTRAP_FROM}, as with "
            "fewer its interval is too narrow (3 to 5 cover 75 to 83 % instead of 95); use the t interval, or "
            f"--repetitions {BOOTSTRAP_FROM}"
        )
    # The same times give the same interval, in every table and figure.
    random = np.random.default_rng([seed, len(seconds)])
    found = bootstrap_intervals(
        np.log([list(seconds)]), level, resamples=resamples, random=random
    )
    return Measured(found.value[0], found.low[0], found.high[0], found.n).map(math.exp)


def bootstrap_cells(
    results: Results, *, resamples: int = RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """Trimmed means of measured times with bootstrap intervals, one row per cell.

    Columns: CELL, `n`, `trimmed_s`, `low_s`, `high_s`, `interval`, `note`. Cells below
    BOOTSTRAP_FROM repetitions have a note instead of numbers.

    Raises:
        UsageError: no cell has enough repetitions.
    """
    cells = [cell for cell in runs_by_cell(results) if cell.execution in MEASURED]
    most = max((len(cell.seconds) for cell in cells), default=0)
    if most < BOOTSTRAP_FROM:
        raise UsageError(
            f"no bootstrap: the most repetitions of a native or paced time are {most}, and it is offered from "
            f"{BOOTSTRAP_FROM}; the t intervals of `cells` hold from 2, or run with --repetitions {BOOTSTRAP_FROM}"
        )
    rows: list[dict[str, object]] = []
    for cell in cells:
        seconds = list(cell.seconds.values())
        n = len(cell.seconds)
        enough = n >= BOOTSTRAP_FROM
        if enough:
            found = bootstrap_interval(seconds, resamples=resamples, seed=seed)
            why = {"interval": BOOTSTRAP, "note": ""}
        else:
            found = UNKNOWN
            why = {"interval": "", "note": f"offered from {BOOTSTRAP_FROM}"}
        rows.append(
            cell.at._asdict()
            | {"n": n}
            | found.named("trimmed_s", "low_s", "high_s")
            | why
        )
    return table_by_cell(rows, list(rows[0]))


def bootstrap_intervals(
    logs: Array,
    level: float = LEVEL,
    *,
    resamples: int = RESAMPLES,
    random: np.random.Generator,
) -> Measured:
    """Trimmed mean of every row of `logs` (samples, n) with the quantiles of its resampled trimmed means."""
    n = logs.shape[1]
    # All at once would need n times the resamples of every cell in memory.
    at_once = max(1, _AT_ONCE // (n * resamples))
    found = []
    for first in range(0, len(logs), at_once):
        part = logs[first : first + at_once]
        rows = np.arange(len(part))[:, None, None]
        chosen = random.integers(n, size=(len(part), resamples, n))
        found.append(_trimmed_mean(part[rows, chosen]))
    return percentile_interval(
        _trimmed_mean(logs), np.concatenate(found).T, level
    )._replace(n=n)


def _trimmed_mean(values: Array) -> Array:
    n = values.shape[-1]
    # Rounded down: at least four fifths of the values count.
    cut = int(_TRIMMED * n)
    mean: Array = np.sort(values, axis=-1)[..., cut : n - cut].mean(axis=-1)
    return mean
