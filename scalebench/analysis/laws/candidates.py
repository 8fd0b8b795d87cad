"""The laws, fitted to times and ranked: sums of known functions of N with coefficients >= 0.

    Amdahl        T = T1 (s + (1 - s) / N)                          strong scaling
    Gustafson     T = T1 N / (s + (1 - s) N)                        weak scaling; N T1 / T = s + (1 - s) N
    USL           T = T1 w (1 + sigma (N - 1) + kappa N (N - 1))    w = 1/N in strong scaling, 1 in weak
    mechanistic   T = c steps(N) + syncs(N) (a f(N) + b(N) / B)     f = log2 N (trees) or N - 1 (rings, servers)

T1 is the time of one worker, s the serial share, sigma contention, kappa crosstalk
(coherence of replicas), c the time of a step, a the latency of a message, b the bytes
that a worker sends in a synchronisation, B the bandwidth. steps, syncs and b come from
the rows. Where the batch of a worker changes with N, the step time is c + d batch.

They are fitted by least squares on the logs of times, because their noise is multiplicative, with coefficients >= 0.
Laws are ranked by AICc. Whole repetitions share noise: a machine that is slower for a while, a calibration drawn anew.
Its mean square between repetitions is MS; an F test at the 15 % level decides whether it is present. The level is high
because a missed shared part costs coverage and a false one only width (T. A. Bancroft, Ann. Math. Statist. 15(2), 1944,
doi:10.1214/aoms/1177731284). It shifts the curve as a whole, with variance MS / (counts x repetitions); for virtual
repetitions, which are draws of one calibration, MS / counts (1 + 1 / repetitions).

Sources: G. M. Amdahl, AFIPS 1967, doi:10.1145/1465482.1465560. J. L. Gustafson, CACM 31(5), 1988,
doi:10.1145/42411.42415. N. J. Gunther, A Simple Capacity Model of Massively Parallel Transaction Systems, CMG 1993;
Guerrilla Capacity Planning, Springer 2007, doi:10.1007/978-3-540-31010-5. For latency + bytes / bandwidth:
R. W. Hockney, Parallel Computing 20(3), 1994, doi:10.1016/S0167-8191(06)80021-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.series import FEWEST_COUNTS, Series, SeriesWork
from scalebench.study.spec import SIMULATED

Array: TypeAlias = npt.NDArray[np.float64]

_COLLINEAR = 1e-6

_ITERATIONS = 100
_SETTLED = 1e-13
_NOISELESS = 1e-12  # relative; below it residuals are rounding
_SEEN = 0.15  # level of the test for shared noise
# of the time at every count: a coefficient that is zero but for rounding
_NO_SHARE = 1e-9


@dataclass(frozen=True)
class Parameter:
    """A parameter of a law: a function of its coefficients, bounded by `least` and `most`."""

    name: str
    meaning: str
    unit: str
    of: Callable[[Array], float]
    least: float = 0.0
    most: float = math.inf


@dataclass(frozen=True)
class Law:
    """log T(N) = sign log(columns(N) @ coefficients), with sign -1 where the columns make up a rate."""

    name: str
    formula: str
    columns: Callable[[Array], Array]
    parameters: Sequence[Parameter]
    sign: int = 1
    notes: tuple[str, ...] = field(default_factory=tuple)

    def log_seconds(self, n: Array, coefficients: Array) -> Array:
        """log T at `n` workers."""
        return np.asarray(self.sign * np.log(self.columns(n) @ coefficients))

    def gradient(self, n: Array, coefficients: Array) -> Array:
        """d log T / d coefficient, one row for each of `n`."""
        columns = self.columns(n)
        return np.asarray(self.sign * columns / (columns @ coefficients)[:, None])


def laws_for(series: Series) -> tuple[list[Law], list[str]]:
    """Laws that `series` could follow, and the reasons for leaving laws out."""
    laws = [gustafson() if series.weak else amdahl(), universal(weak=series.weak)]
    if series.workload is None:
        return laws, [
            "mechanistic law not fitted: the rows do not count steps, synchronisations and bytes"
        ]
    return [*laws, *(mechanistic(series.workload, hops) for hops in HOPS)], []


def amdahl() -> Law:
    """Columns 1/N (parallel part) and 1 (serial part)."""

    def columns(n: Array) -> Array:
        return np.stack([1 / n, np.ones_like(n)], axis=1)

    return Law("amdahl", "T1 (s + (1 - s)/N)", columns, [_alone(sum), _share(1)])


def gustafson() -> Law:
    """Columns of the rate 1/T: 1 (parallel part) and 1/N (serial part)."""

    def columns(n: Array) -> Array:
        return np.stack([np.ones_like(n), 1 / n], axis=1)

    return Law(
        "gustafson",
        "T1 N/(s + (1 - s) N)",
        columns,
        [_alone(lambda c: 1 / sum(c)), _share(1)],
        sign=-1,
    )


def universal(*, weak: bool) -> Law:
    """Columns 1, N - 1 and N (N - 1), divided by N in strong scaling."""

    def columns(n: Array) -> Array:
        table = np.stack([np.ones_like(n), n - 1, n * (n - 1)], axis=1)
        return table if weak else np.asarray(table / n[:, None])

    contention = Parameter("sigma", "contention", "", lambda c: float(c[1] / c[0]))
    crosstalk = Parameter("kappa", "crosstalk", "", lambda c: float(c[2] / c[0]))
    factor = "T1" if weak else "T1/N"
    formula = f"{factor} (1 + sigma (N - 1) + kappa N (N - 1))"
    return Law("usl", formula, columns, [_alone(lambda c: c[0]), contention, crosstalk])


HOPS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "mechanistic-log": ("log2 N", lambda n: np.asarray(np.log2(np.maximum(n, 1.0)))),
    "mechanistic-linear": ("(N - 1)", lambda n: np.asarray(np.maximum(n - 1, 0.0))),
}


def mechanistic(workload: SeriesWork, name: str) -> Law:
    """Columns steps, samples where the batch changes, syncs f(N), and bytes if distinguishable from compute."""
    word, hops = HOPS[name]
    samples = workload.samples is not None

    def every_column(n: Array) -> Array:
        table = [workload.steps(n)]
        if samples:
            table.append(workload.samples_seen(n))
        table.append(workload.syncs(n) * hops(n))
        table.append(workload.bytes_sent(n))
        return np.stack(table, axis=1)

    latency = 1 + samples
    step = Parameter(
        "c",
        "time of a step" + (" without its samples" if samples else ""),
        "s",
        _coefficient(0),
    )
    parameters = [step]
    if samples:
        parameters.append(Parameter("d", "time of a sample", "s", _coefficient(1)))
    parameters.append(
        Parameter(
            "a", f"latency of a synchronisation per {word}", "s", _coefficient(latency)
        )
    )
    compute = "(c steps + d samples)" if samples else "c steps"
    seen = every_column(workload.counts)
    scaled = seen / np.maximum(seen.max(axis=0), 1e-300)
    if np.linalg.svd(scaled / scaled[:, [0]], compute_uv=False)[-1] < _COLLINEAR:
        note = f"{name}: bytes/B left out, as it cannot be told from the other terms at these worker counts"
        formula = f"{compute} + syncs a {word}"
        return Law(
            name, formula, lambda n: every_column(n)[:, :-1], parameters, notes=(note,)
        )
    bandwidth = Parameter("B", "bandwidth", "B/s", _inverse_of_last)
    formula = f"{compute} + syncs (a {word} + bytes/B)"
    return Law(name, formula, every_column, [*parameters, bandwidth])


def _inverse_of_last(coefficients: Array) -> float:
    # seconds a byte; 0 where bytes cost nothing that can be seen
    slowness = float(coefficients[-1])
    return 1 / slowness if slowness > 0 else math.inf


def _alone(of: Callable[[Array], float]) -> Parameter:
    return Parameter("T1", "time of one worker", "s", lambda c: float(of(c)))


def _share(index: int) -> Parameter:
    return Parameter(
        "s", "serial share", "", lambda c: float(c[index] / c.sum()), most=1.0
    )


def _coefficient(index: int) -> Callable[[Array], float]:
    return lambda c: float(c[index])


@dataclass(frozen=True, eq=False)
class Fit:
    """A law with its coefficients, fitted to `runs` runs at `counts` distinct worker counts.

    `squares` sums the squared log residuals of all runs, `between` those of the means
    at each worker count (weighted by its runs).
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
        shares = (
            np.abs(self.law.gradient(self.counts, self.coefficients))
            * self.coefficients
        )
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
    at = series.at[kept]
    logs = np.log(series.seconds[kept])
    counts, place, number = np.unique(at, return_inverse=True, return_counts=True)
    weights = number.astype(float)
    means = np.bincount(place, logs) / weights
    # Means at each count are enough: the spread around them is the same for every law.
    coefficients = nonnegative(law.columns(counts), law.sign * means, weights)
    residuals = means - law.log_seconds(counts, coefficients)
    between = float(np.sum(weights * residuals**2))
    within = float(np.sum((logs - means[place]) ** 2))
    return Fit(law, coefficients, counts, weights, residuals, between + within, between)


def nonnegative(columns: Array, logs: Array, weights: Array) -> Array:
    """The coefficients x >= 0 that minimise sum weights (logs - log(columns x))^2.

    Gauss-Newton: log(A x') is linearised at x and each step is a linear least-squares
    problem with x' >= 0, solved exactly (Lawson and Hanson 1974) and halved while it
    does not decrease the sum. Deterministic: it starts at the x that minimises relative
    errors.
    """
    from scipy.optimize import nnls

    root = np.sqrt(weights)

    def solve(relative: Array, target: Array) -> Array:
        # Columns of steps and of bytes differ by orders of magnitude: scaled, nnls
        # treats them alike.
        scale = np.linalg.norm(root[:, None] * relative, axis=0)
        solution, _ = nnls(root[:, None] * relative / scale, root * target)
        return np.asarray(solution / scale)

    def squares(x: Array) -> float:
        with np.errstate(divide="ignore"):
            return float(np.sum(weights * (logs - np.log(columns @ x)) ** 2))

    # Relative errors are nearly those of logs, and linear in x.
    x = solve(columns / np.exp(logs)[:, None], np.ones_like(logs))
    if not (columns @ x > 0).all():  # every remaining column vanishes at some count
        x = np.maximum(x, 1e-6 * np.exp(logs.max()) / columns.max(axis=0))
    now = squares(x)
    for _ in range(_ITERATIONS):
        model = columns @ x
        # log(A x') is about log(A x) + A x' / A x - 1.
        step = solve(columns / model[:, None], logs - np.log(model) + 1) - x
        length = 1.0
        while (ahead := squares(x + length * step)) > now and length > 1e-6:
            length /= 2
        if ahead > now:
            break
        # The second term ends the search at times that a law explains exactly.
        settled = now - ahead <= _SETTLED * now + weights.sum() * _NOISELESS**2
        x = x + length * step
        now = ahead
        if settled:
            break
    return x


@dataclass(frozen=True)
class SharedNoise:
    """`variance` of the shared part of log T, averaged over repetitions, with its degrees of `freedom`.

    `squares` is its contribution, beyond noise, to the sum of squares of all runs
    around any law. Both are 0 where the test finds no shared part.
    """

    variance: float
    freedom: int
    squares: float = 0.0


def shared_noise(series: Series) -> SharedNoise:
    """Noise that the repetitions of `series` share over all worker counts."""
    from scipy.special import fdtrc

    logs = np.log(series.seconds)
    _, cell, number = np.unique(series.at, return_inverse=True, return_counts=True)
    _, repetition, size = np.unique(
        series.repetition, return_inverse=True, return_counts=True
    )
    deviation = logs - (np.bincount(cell, logs) / number)[cell]
    shared = np.bincount(repetition, deviation) / size
    repetitions = len(size)
    counts = len(number)
    if repetitions < 2:
        return SharedNoise(0.0, 1)
    squares = float(np.sum(size * shared**2))
    rest = max(float(np.sum(deviation**2)) - squares, 0.0)
    freedom = repetitions - 1
    other = (repetitions - 1) * (counts - 1)
    mean_square = squares / freedom
    if squares <= 0 or (
        rest > 0 and fdtrc(freedom, other, mean_square / (rest / other)) > _SEEN
    ):
        return SharedNoise(0.0, freedom)
    share = (
        1 + 1 / repetitions if series.key.execution in SIMULATED else 1 / repetitions
    )
    return SharedNoise(
        mean_square / counts * share,
        freedom,
        max(squares - freedom * rest / other, 0.0) if other else squares,
    )


@dataclass(frozen=True, eq=False)
class Candidate:
    """A law fitted to a series, with its support.

    `weight` is its Akaike weight: exp(-(AICc - lowest AICc) / 2), normalised to sum 1
    over the candidates.
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


def candidates(
    laws: Sequence[Law], series: Series
) -> tuple[list[Candidate], list[str]]:
    """Fitted laws, best first, and the reasons for leaving laws out."""
    fits, notes = [], []
    counts = len(series.counts)
    runs = len(series.at)
    for law in laws:
        size = len(law.parameters)
        if counts < size + 1:
            notes.append(
                f"{law.name} not fitted: {size} parameters want {max(size + 1, FEWEST_COUNTS)} worker counts"
            )
        # AICc divides by runs - parameters - 2.
        elif runs < size + 3:
            notes.append(
                f"{law.name} not fitted: AICc of {size} parameters wants {size + 3} runs, there are {runs}"
            )
        else:
            fitted = fit(law, series)
            if not law.columns(np.ones(1)) @ fitted.coefficients > 0:
                notes.append(
                    f"{law.name} not among them: fitted to these times it has one worker take none"
                )
                continue
            fits.append(fitted)
            notes += law.notes
    # Shared noise is left out of the scores: no law explains it, and it would hide the
    # differences between laws. Draws of one calibration share its error: those of a
    # worker count are one observation of the law.
    observations, shared = (
        (counts, 0.0)
        if series.key.execution in SIMULATED
        else (runs, shared_noise(series).squares)
    )
    scores = np.array(
        [
            aicc(one.squares - shared, one.runs, len(one.coefficients), observations)
            for one in fits
        ]
    )
    weights = np.exp(-(scores - scores.min()) / 2) if fits else scores
    found = [
        Candidate(one, series, float(score), float(weight / weights.sum()))
        for one, score, weight in zip(fits, scores, weights, strict=True)
    ]
    return sorted(found, key=lambda one: (one.aicc, len(one.fit.coefficients))), notes


def aicc(squares: float, runs: int, coefficients: int, observations: int) -> float:
    """m log(squares / n) + 2 k + 2 k (k + 1) / (n - k - 1) with n = runs, k = coefficients + 1 for the noise.

    C. M. Hurvich and C.-L. Tsai, Biometrika 76(2), 1989, doi:10.1093/biomet/76.2.297.
    Defined for n > k + 1. Runs are m `observations` of the law: m = n where their noise
    is independent. Where n / m runs repeat one another, the variance of their mean
    exceeds 1/n by this factor, and the likelihood is divided by it (QAICc; K. P.
    Burnham and D. R. Anderson, Model Selection and Multimodel Inference, 2002, section
    2.5). All runs estimate the size of the noise, so the last term keeps n.
    """
    k = coefficients + 1
    # The mean square is bounded below: of times without noise the logarithm would have
    # no end.
    mean_square = max(squares / runs, _NOISELESS**2)
    small_sample = 2 * k * (k + 1) / (runs - k - 1)
    return observations * math.log(mean_square) + 2 * k + small_sample
