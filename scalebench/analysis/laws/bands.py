"""Intervals of a law: noise, misfit, noise shared by whole repetitions, and the uncertain choice of the law.

The coefficients x of a law have the covariance

    C = s2 (J' W J)^-1 + x x' v        J = d log T / dx at the worker counts, W = runs at each

In the first part s2 = sum W (mean log residual)^2 / (counts - coefficients above zero)
measures the distance of the means from the law: misfit widens the band, and repetitions
do not hide it. The second part is the noise that whole repetitions share, of variance v
(`shared_noise`), which shifts the curve. Where native runs check virtual times their
error d, without the factor common to all of them (native_check.py), adds the larger of
two variances: d^2 x x', if all worker counts are off alike (larger for the curve), and
d^2 A A' with A = (J' W J)^-1 J' W, if each is off independently (larger for its shape).

Anything linear in log T over N (the curve, the efficiency, the elasticity) has the
standard error that C gives it, and Satterthwaite's degrees of freedom; where three
quarters are shared noise at most those of the shared noise, because Satterthwaite's are
too many there (docs/statistics.md). The limits average over all laws with their Akaike
weights w (tail-area averaging: D. Turek and D. Fletcher, Comput. Stat. Data Anal.
56(9), 2012, doi:10.1016/j.csda.2012.03.002): the lower limit L solves sum w P(t >
(estimate - L) / error) = 0.025. Below seven worker counts that mixture covers too much
(97.3 % at five), because the laws share most of their error. Its level there is
calibrated by simulation over ten laws and several kinds of noise: 0.0025 more in each
tail for each missing count (after W.-Y. Loh, J. Am. Stat. Assoc. 82(397), 1987;
benchmarks/laws_coverage.py).

A curve has a band up to twice the largest worker count; with five counts, which do not
distinguish laws beyond their range, up to the largest count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.intervals import Part, interval_name
from scalebench.analysis.laws.candidates import (
    Candidate,
    Fit,
    Parameter,
    SharedNoise,
    shared_noise,
)
from scalebench.analysis.laws.series import Base, Series
from scalebench.analysis.native_check import error_name
from scalebench.formatting import counted
from scalebench.measured import Measured
from scalebench.study.spec import SIMULATED

Array: TypeAlias = npt.NDArray[np.float64]

FEWEST_REPETITIONS = 3
FEWEST_COUNTS = 5
MISFIT = "misfit of the law alone, as no time varies"
COUNTS_TO_EXTRAPOLATE = 6
_EXTRAPOLATED = 2.0  # times the largest measured count
_TAIL = 0.025
_TAIL_OF_MISSING, _ENOUGH_COUNTS = 0.0025, 7
_ROUNDING = 1e-9
_BISECTIONS = 22  # a few millionths of the width


def no_band(series: Series) -> str:
    """Reason for missing intervals, empty if there are intervals."""
    repetitions = len(np.unique(series.repetition))
    counts = len(series.counts)
    if repetitions < FEWEST_REPETITIONS:
        return f"no intervals: they want {FEWEST_REPETITIONS} repetitions, there are {repetitions}"
    if counts < FEWEST_COUNTS:
        return (
            f"no intervals: they want {FEWEST_COUNTS} worker counts, there are {counts}"
        )
    if series.error is not None and not series.error.is_split:
        return f"no intervals: the error of virtual times is known from {counted(series.error.checks, 'check')} only"
    return ""


def reach(series: Series) -> float:
    """Largest N at which `curve` has a band."""
    extrapolated = _EXTRAPOLATED if len(series.counts) >= COUNTS_TO_EXTRAPOLATE else 1.0
    return extrapolated * float(series.counts[-1])


def no_extrapolation(series: Series) -> str:
    """Reason for a missing band beyond the largest worker count, empty if there is one."""
    if len(series.counts) >= COUNTS_TO_EXTRAPOLATE:
        return ""
    largest = series.counts[-1]
    counts = len(series.counts)
    beyond = counted(int(largest), "worker")
    return f"no band beyond {beyond}: it wants {COUNTS_TO_EXTRAPOLATE} worker counts, there are {counts}"


def band_name(series: Series) -> str:
    """Name of the intervals; where no time varies, they contain the misfit of the law only."""
    if series.key.execution in SIMULATED and series.error is None and not series.varies:
        return MISFIT
    return interval_name(
        series.key.execution, error=error_name(series.error), stated=series.stated
    )


def linear(
    found: Sequence[Candidate],
    series: Series,
    at: Array,
    combination: Array,
    base: Base | None = None,
) -> Measured:
    """Band of `combination @ log T(at)` over all laws, centred at the best one; one row of `combination` per result.

    With a `base` its log T is added: shared noise and a common error of virtual times cancel as far as a row sums to
    -1, and the noise and the virtual-native error of the base are added.
    """
    shared = shared_noise(series)
    centres, errors, freedoms = [], [], []
    for one in found:
        law, x = one.fit.law, one.fit.coefficients
        centres.append(
            combination @ law.log_seconds(at, x) + (base.log_seconds if base else 0.0)
        )
        error, freedom = _errors(
            one.fit,
            combination @ law.gradient(at, x),
            shared,
            _simulation(series),
            base,
        )
        errors.append(error)
        freedoms.append(freedom)
    weights = np.array([one.weight for one in found])
    estimates = np.array(centres)
    # A single law has nothing to average, and its band covers as it should.
    missing = max(_ENOUGH_COUNTS - len(series.counts), 0) if len(found) > 1 else 0
    tail = _TAIL + _TAIL_OF_MISSING * missing
    low, high = _averaged_limits(
        weights, estimates, np.array(errors), np.array(freedoms), tail
    )
    return Measured(estimates[0], low, high)


def curve(found: Sequence[Candidate], series: Series, at: Array) -> Measured:
    """Pointwise band of T at `at` workers, in seconds; its limits are NaN beyond its `reach`."""
    logs = linear(found, series, at, np.eye(len(at)))
    # Beyond its reach the curve is drawn, its band is not.
    offered = np.where(at <= reach(series) * (1 + _ROUNDING), 0.0, np.nan)
    return Measured(
        np.exp(logs.value), np.exp(logs.low + offered), np.exp(logs.high + offered)
    )


def parameter_interval(fit: Fit, series: Series, parameter: Parameter) -> Measured:
    """A parameter with its 95 % interval if the law holds: linearised, for a bandwidth on its reciprocal."""
    from scipy.special import stdtrit

    x = fit.coefficients
    reciprocal = parameter.unit == "B/s"

    def value(coefficients: Array) -> float:
        number = parameter.of(coefficients)
        return 1 / number if reciprocal else number

    # A coefficient of zero needs a step, too.
    step = 1e-6 * np.maximum(x, 1e-3 * _typical(fit))
    here = value(x)
    gradient = np.array(
        [(value(x + move) - here) / move.sum() for move in np.diag(step)]
    )
    error, freedom = _errors(
        fit, gradient[None, :], shared_noise(series), _simulation(series)
    )
    half = float(stdtrit(freedom[0], 1 - _TAIL) * error[0])
    low = max(value(x) - half, 0.0)
    high = value(x) + half
    if reciprocal:
        return Measured(parameter.of(x), 1 / high, 1 / low if low > 0 else math.inf)
    return Measured(parameter.of(x), low, high).within(parameter.least, parameter.most)


def _simulation(series: Series) -> Part | None:
    """Virtual-native error of the times of `series`, without the factor common to all virtual times."""
    return series.error.own(series.key.label) if series.error else None


def _typical(fit: Fit) -> Array:
    """Scale of each coefficient: its value if its column alone made up the whole time."""
    columns = fit.law.columns(fit.counts)
    return np.asarray(np.median(columns @ fit.coefficients) / columns.max(axis=0))


def _errors(
    fit: Fit,
    gradient: Array,
    shared: SharedNoise,
    simulation: Part | None,
    base: Base | None = None,
) -> tuple[Array, Array]:
    """Standard errors of quantities with `gradient` with respect to the coefficients, and their degrees of freedom."""
    jacobian = fit.law.gradient(fit.counts, fit.coefficients)
    # Scaled, so that the pseudo-inverse drops no column for its unit.
    scale = np.linalg.norm(jacobian, axis=0)
    weighted = np.sqrt(fit.weights)[:, None] * jacobian / scale
    # Columns may coincide at the measured counts: then one of them has no information.
    inverse = np.linalg.pinv(weighted.T @ weighted)
    scaled = gradient / scale
    own = np.einsum("ij,jk,ik->i", scaled, inverse, scaled) * fit.between / fit.freedom
    alike = (gradient @ fit.coefficients + bool(base)) ** 2
    parts: list[tuple[Array, Any]] = [
        (own, fit.freedom),
        (alike * shared.variance, shared.freedom),
    ]
    if base is not None:
        parts.append((np.full_like(own, base.variance), base.freedom))
    if simulation is not None:
        apart = np.sum(
            (scaled @ inverse @ weighted.T * np.sqrt(fit.weights)) ** 2, axis=1
        )
        parts.append(
            (
                np.maximum(alike, apart + bool(base)) * simulation.variance,
                simulation.freedom,
            )
        )
    total = np.sum([variance for variance, _ in parts], axis=0)
    shares = np.sum([variance**2 / freedom for variance, freedom in parts], axis=0)
    freedom = np.where(total > 0, total**2 / np.maximum(shares, 1e-300), fit.freedom)
    mostly_shared = 4 * alike * shared.variance > 3 * total
    freedom = np.where(mostly_shared, np.minimum(freedom, shared.freedom), freedom)
    return np.sqrt(np.maximum(total, 1e-300)), freedom


def _averaged_limits(
    weights: Array, centres: Array, errors: Array, freedoms: Array, tail: float
) -> tuple[Array, Array]:
    from scipy.special import stdtr, stdtrit

    half = stdtrit(freedoms, 1 - tail) * errors
    limits = []
    for sign in (-1.0, 1.0):
        # Between the least and the largest limit of a single law lies that of all.
        inner = (sign * centres - half).min(axis=0)
        outer = (sign * centres + half).max(axis=0)
        for _ in range(_BISECTIONS):
            middle = (inner + outer) / 2
            below = (
                np.einsum(
                    "i,ij->j",
                    weights,
                    stdtr(freedoms, (middle - sign * centres) / errors),
                )
                < 1 - tail
            )
            inner = np.where(below, middle, inner)
            outer = np.where(below, outer, middle)
        limits.append(sign * outer)
    return limits[0], limits[1]
