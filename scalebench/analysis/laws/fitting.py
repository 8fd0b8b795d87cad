"""Fits a law to times: least squares on their logs, because their noise multiplies, with coefficients that are >= 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.forms import Law
from scalebench.analysis.laws.series import Series

Array: TypeAlias = npt.NDArray[np.float64]

_ITERATIONS = 100
_SETTLED = 1e-13
_NOISELESS = 1e-12  # relative; below it residuals are rounding
_NO_SHARE = 1e-9  # of the time at every count: a coefficient that is zero but for rounding


@dataclass(frozen=True, eq=False)
class Fit:
    """A law with its coefficients, fitted to `runs` runs at `counts` distinct worker counts.

    `squares` sums the squared log residuals of all runs, `between` those of the worker counts' means (each weighted by
    its runs): what is left of it when noise is averaged away is what the law cannot follow.
    """

    law: Law
    coefficients: Array
    counts: Array
    weights: Array
    residuals: Array
    squares: float
    between: float

    @property
    def runs(self) -> int:
        return int(self.weights.sum())

    @property
    def freedom(self) -> int:
        """Distinct worker counts that are not used up by coefficients; one that is held at zero uses none."""
        shares = np.abs(self.law.gradient(self.counts, self.coefficients)) * self.coefficients
        return len(self.counts) - int(np.count_nonzero(shares.max(axis=0) > _NO_SHARE))

    @property
    def misfit(self) -> float:
        """Typical relative distance of the measured means from the law."""
        return float(np.expm1(np.sqrt(np.mean(self.residuals**2))))

    def seconds(self, n: Array) -> Array:
        """T at `n` workers by the law."""
        return np.asarray(np.exp(self.law.log_seconds(n, self.coefficients)))


def fit(law: Law, series: Series, leave_out: float | None = None) -> Fit:
    """Least squares of log T over all runs of `series`, but those at `leave_out` workers."""
    kept = series.at != leave_out
    at, logs = series.at[kept], np.log(series.seconds[kept])
    counts, place, number = np.unique(at, return_inverse=True, return_counts=True)
    weights = number.astype(float)
    means = np.bincount(place, logs) / weights
    coefficients = nonnegative(law.columns(counts), law.sign * means, weights)
    residuals = means - law.log_seconds(counts, coefficients)
    between = float(np.sum(weights * residuals**2))
    within = float(np.sum((logs - means[place]) ** 2))
    return Fit(law, coefficients, counts, weights, residuals, between + within, between)


def nonnegative(columns: Array, logs: Array, weights: Array) -> Array:
    """The coefficients x >= 0 that minimise sum weights (logs - log(columns x))^2.

    Gauss-Newton: log(A x') is linearised at x and each step is a linear least-squares problem with x' >= 0, solved
    exactly (Lawson and Hanson 1974), halved where it would not go down. It begins at the x that minimises relative
    errors, so that the same data always give the same answer.
    """
    from scipy.optimize import nnls

    root = np.sqrt(weights)

    def solve(relative: Array, target: Array) -> Array:
        scale = np.linalg.norm(root[:, None] * relative, axis=0)
        solution, _ = nnls(root[:, None] * relative / scale, root * target)
        return np.asarray(solution / scale)

    def squares(x: Array) -> float:
        with np.errstate(divide="ignore"):
            return float(np.sum(weights * (logs - np.log(columns @ x)) ** 2))

    x = solve(columns / np.exp(logs)[:, None], np.ones_like(logs))
    if not (columns @ x > 0).all():  # a count at which every remaining column vanishes
        x = np.maximum(x, 1e-6 * np.exp(logs.max()) / columns.max(axis=0))
    now = squares(x)
    for _ in range(_ITERATIONS):
        model = columns @ x
        step = solve(columns / model[:, None], logs - np.log(model) + 1) - x
        length = 1.0
        while (ahead := squares(x + length * step)) > now and length > 1e-6:
            length /= 2
        if ahead > now:
            break
        settled = now - ahead <= _SETTLED * now + weights.sum() * _NOISELESS**2
        x, now = x + length * step, ahead
        if settled:
            break
    return x
