"""Fits laws to times and ranks them.

Least squares on the logs of times, because their noise is multiplicative, with coefficients >= 0. Laws are ranked by
AICc. Whole repetitions share noise: a machine that is slower for a while, a calibration drawn anew. Its mean square
between repetitions is MS; an F test at the 15 % level decides whether it is present. The level is high because a missed
shared part costs coverage and a false one only width (T. A. Bancroft, Ann. Math. Statist. 15(2), 1944,
doi:10.1214/aoms/1177731284). It shifts the curve as a whole, with variance MS / (counts x repetitions); for virtual
repetitions, which are draws of one calibration, MS / counts (1 + 1 / repetitions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.forms import Law
from scalebench.analysis.laws.series import FEWEST_COUNTS, Series
from scalebench.study.spec import SIMULATED

Array: TypeAlias = npt.NDArray[np.float64]

_ITERATIONS = 100
_SETTLED = 1e-13
_NOISELESS = 1e-12  # relative; below it residuals are rounding
_SEEN = 0.15  # level of the test for shared noise
_NO_SHARE = 1e-9  # of the time at every count: a coefficient that is zero but for rounding


@dataclass(frozen=True, eq=False)
class Fit:
    """A law with its coefficients, fitted to `runs` runs at `counts` distinct worker counts.

    `squares` sums the squared log residuals of all runs, `between` those of the means at each worker count (weighted by
    its runs).
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
        """Distinct worker counts minus coefficients above zero."""
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
    """Least squares of log T over all runs of `series` except those at `leave_out` workers."""
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
    exactly (Lawson and Hanson 1974) and halved while it does not decrease the sum. Deterministic: it starts at the x
    that minimises relative errors.
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
    if not (columns @ x > 0).all():  # every remaining column vanishes at some count
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


@dataclass(frozen=True)
class SharedNoise:
    """`variance` of the shared part of log T, averaged over repetitions, with its degrees of `freedom`.

    `squares` is its contribution, beyond noise, to the sum of squares of all runs around any law. Both are 0 where the
    test finds no shared part.
    """

    variance: float
    freedom: int
    squares: float = 0.0


def shared_noise(series: Series) -> SharedNoise:
    """Noise that the repetitions of `series` share over all worker counts."""
    from scipy.special import fdtrc

    logs = np.log(series.seconds)
    _, cell, number = np.unique(series.at, return_inverse=True, return_counts=True)
    _, repetition, size = np.unique(series.repetition, return_inverse=True, return_counts=True)
    deviation = logs - (np.bincount(cell, logs) / number)[cell]
    shared = np.bincount(repetition, deviation) / size
    repetitions, counts = len(size), len(number)
    if repetitions < 2:
        return SharedNoise(0.0, 1)
    squares = float(np.sum(size * shared**2))
    rest = max(float(np.sum(deviation**2)) - squares, 0.0)
    freedom, other = repetitions - 1, (repetitions - 1) * (counts - 1)
    mean_square = squares / freedom
    if squares <= 0 or (rest > 0 and fdtrc(freedom, other, mean_square / (rest / other)) > _SEEN):
        return SharedNoise(0.0, freedom)
    share = 1 + 1 / repetitions if series.execution in SIMULATED else 1 / repetitions
    return SharedNoise(
        mean_square / counts * share, freedom, max(squares - freedom * rest / other, 0.0) if other else squares
    )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A law fitted to a series, with its support.

    `weight` is its Akaike weight: exp(-(AICc - lowest AICc) / 2), normalised to sum 1 over the candidates.
    """

    fit: Fit
    series: Series
    aicc: float
    weight: float

    @cached_property
    def leave_out_error(self) -> float:
        """T(predicted) / T(measured) - 1 at the largest worker count, by the law fitted to the other counts."""
        series = self.series
        largest = series.counts[-1:]
        blind = fit(self.fit.law, series, leave_out=float(largest[0]))
        measured = np.exp(np.mean(np.log(series.seconds[series.at == largest[0]])))
        return float(blind.seconds(largest)[0] / measured - 1)


def candidates(laws: Sequence[Law], series: Series) -> tuple[list[Candidate], list[str]]:
    """Fitted laws, best first, and the reasons for leaving laws out."""
    fits, notes = [], []
    counts, runs = len(series.counts), len(series.at)
    for law in laws:
        size = len(law.parameters)
        if counts < size + 1:
            notes.append(f"{law.name} not fitted: {size} parameters want {max(size + 1, FEWEST_COUNTS)} worker counts")
        elif runs < size + 3:
            notes.append(f"{law.name} not fitted: AICc of {size} parameters wants {size + 3} runs, there are {runs}")
        else:
            fitted = fit(law, series)
            if not law.columns(np.ones(1)) @ fitted.coefficients > 0:
                notes.append(f"{law.name} not among them: fitted to these times it has one worker take none")
                continue
            fits.append(fitted)
            notes += law.notes
    # Shared noise is left out of the scores: no law explains it, and it would hide the differences between laws.
    # Draws of one calibration share its error: those of a worker count are one observation of the law.
    observations, shared = (counts, 0.0) if series.execution in SIMULATED else (runs, shared_noise(series).squares)
    scores = np.array([aicc(one.squares - shared, one.runs, len(one.coefficients), observations) for one in fits])
    weights = np.exp(-(scores - scores.min()) / 2) if fits else scores
    found = [
        Candidate(one, series, float(score), float(weight / weights.sum()))
        for one, score, weight in zip(fits, scores, weights, strict=True)
    ]
    return sorted(found, key=lambda one: (one.aicc, len(one.fit.coefficients))), notes


def aicc(squares: float, runs: int, coefficients: int, observations: int) -> float:
    """m log(squares / n) + 2 k + 2 k (k + 1) / (n - k - 1) with n = runs, k = coefficients + 1 for the noise.

    C. M. Hurvich and C.-L. Tsai, Biometrika 76(2), 1989, doi:10.1093/biomet/76.2.297. Defined for n > k + 1.
    Runs are m `observations` of the law: m = n where their noise is independent. Where n / m runs repeat one another,
    the variance of their mean exceeds 1/n by this factor, and the likelihood is divided by it (QAICc; K. P. Burnham and
    D. R. Anderson, Model Selection and Multimodel Inference, 2002, section 2.5). All runs estimate the size of the
    noise, so the last term keeps n.
    """
    k = coefficients + 1
    return observations * math.log(max(squares / runs, _NOISELESS**2)) + 2 * k + 2 * k * (k + 1) / (runs - k - 1)
