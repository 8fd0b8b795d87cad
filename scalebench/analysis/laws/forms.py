"""The laws: the time, or the rate, as a sum of known functions of N with coefficients >= 0.

    Amdahl        T = T1 (s + (1 - s) / N)                          strong scaling
    Gustafson     T = T1 N / (s + (1 - s) N)                        weak scaling; N T1 / T = s + (1 - s) N
    USL           T = T1 w (1 + sigma (N - 1) + kappa N (N - 1))    w = 1/N in strong scaling, 1 in weak
    mechanistic   T = c steps(N) + syncs(N) (a f(N) + b(N) / B)     f = log2 N (trees) or N - 1 (rings, servers)

T1 is the time of one worker, s the serial share, sigma contention, kappa crosstalk (coherence of replicas), c the
time of a step, a the latency of a message, b the bytes that a worker sends in a synchronisation, B the bandwidth.
steps, syncs and b come from the rows. Where the batch of a worker changes with N, the step time is c + d batch.

Sources: G. M. Amdahl, AFIPS 1967, doi:10.1145/1465482.1465560. J. L. Gustafson, CACM 31(5), 1988,
doi:10.1145/42411.42415. N. J. Gunther, A Simple Capacity Model of Massively Parallel Transaction Systems, CMG 1993;
Guerrilla Capacity Planning, Springer 2007, doi:10.1007/978-3-540-31010-5. For latency + bytes / bandwidth:
R. W. Hockney, Parallel Computing 20(3), 1994, doi:10.1016/S0167-8191(06)80021-9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scalebench.analysis.laws.series import Series, SeriesWork

Array: TypeAlias = npt.NDArray[np.float64]

_COLLINEAR = 1e-6


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
        return laws, ["mechanistic law not fitted: the rows do not count steps, synchronisations and bytes"]
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

    return Law("gustafson", "T1 N/(s + (1 - s) N)", columns, [_alone(lambda c: 1 / sum(c)), _share(1)], sign=-1)


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
    step = Parameter("c", "time of a step" + (" without its samples" if samples else ""), "s", _coefficient(0))
    parameters = [step]
    if samples:
        parameters.append(Parameter("d", "time of a sample", "s", _coefficient(1)))
    parameters.append(Parameter("a", f"latency of a synchronisation per {word}", "s", _coefficient(latency)))
    compute = "(c steps + d samples)" if samples else "c steps"
    seen = every_column(workload.counts)
    scaled = seen / np.maximum(seen.max(axis=0), 1e-300)
    if np.linalg.svd(scaled / scaled[:, [0]], compute_uv=False)[-1] < _COLLINEAR:
        note = f"{name}: bytes/B left out, as it cannot be told from the other terms at these worker counts"
        formula = f"{compute} + syncs a {word}"
        return Law(name, formula, lambda n: every_column(n)[:, :-1], parameters, notes=(note,))
    bandwidth = Parameter("B", "bandwidth", "B/s", lambda c: 1 / float(c[-1]) if c[-1] > 0 else math.inf)
    formula = f"{compute} + syncs (a {word} + bytes/B)"
    return Law(name, formula, every_column, [*parameters, bandwidth])


def _alone(of: Callable[[Array], float]) -> Parameter:
    return Parameter("T1", "time of one worker", "s", lambda c: float(of(c)))


def _share(index: int) -> Parameter:
    return Parameter("s", "serial share", "", lambda c: float(c[index] / c.sum()), most=1.0)


def _coefficient(index: int) -> Callable[[Array], float]:
    return lambda c: float(c[index])
