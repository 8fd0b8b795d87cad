"""Whether repeated times look like one steady machine's: two groups in a cell, and drift over the run order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from scalebench.analysis.blocks import Cell
from scalebench.analysis.intervals import Array

TWO_GROUPS_FROM = 5
_SIMULATED = 20_000


class Drift(NamedTuple):
    """How much longer the last run takes than the first would have, as a factor, and a two-sided p for none."""

    factor: float
    p: float


def two_groups_p(seconds: Sequence[float]) -> float:
    """How often so many values of one group would fall into two as clearly as these do; NaN below TWO_GROUPS_FROM.

    Clearness is the largest share of the logs' squared deviations that one cut explains, with at least a quarter of the
    values, and two, on either side. It is compared with samples of a uniform distribution, for which it is larger than
    for normal, exponential, Laplace or Student's: those are taken for two groups less often than p says
    (docs/statistics.md). Hartigan's dip is compared with the uniform for that reason too (Annals of Statistics 13,
    1985).
    """
    n = len(seconds)
    if n < TWO_GROUPS_FROM:
        return math.nan
    simulated = _uniform_shares(n)
    share = float(explained_by_a_cut(np.log(np.asarray(seconds, dtype=float))))
    return (1 + len(simulated) - int(np.searchsorted(simulated, share))) / (1 + len(simulated))


def explained_by_a_cut(values: ArrayLike) -> Array:
    """The share, of every sample along the last axis; 0 where all values are equal."""
    x = np.sort(np.asarray(values, dtype=float), axis=-1)
    n = x.shape[-1]
    x = x - x.mean(axis=-1, keepdims=True)
    least = max(2, math.ceil(n / 4))
    left = np.arange(least, n - least + 1)  # values below the cut
    below = np.cumsum(x, axis=-1)[..., left - 1]
    between = (below**2 * n / (left * (n - left))).max(axis=-1)
    total = (x**2).sum(axis=-1)
    share: Array = np.divide(between, total, out=np.zeros_like(total), where=total > 0)
    return share


def drift(cells: Sequence[Cell]) -> Drift | None:
    """The slope of log times over the run order within cells; None where there are fewer than ten runs to judge by.

    Least squares with an intercept for every cell, ln T = c(cell) + b order: only how a cell's own repetitions moved
    counts. p is Student's of b / se(b), with runs - cells - 1 degrees of freedom.
    """
    several = [cell for cell in cells if len(cell.seconds) > 1]
    order = [np.array([cell.order[block] for block in cell.seconds], dtype=float) for cell in several]
    logs = [np.log(list(cell.seconds.values())) for cell in several]
    freedom = sum(len(own) - 1 for own in logs) - 1
    if freedom < 10:
        return None
    at = np.concatenate([own - own.mean() for own in order])
    y = np.concatenate([own - own.mean() for own in logs])
    squares = float(at @ at)
    slope = float(at @ y) / squares if squares else 0.0
    rest = y - slope * at
    error = math.sqrt(float(rest @ rest) / freedom / squares) if squares else 0.0
    span = max(own.max() for own in order) - min(own.min() for own in order)
    return Drift(math.exp(slope * span), _two_sided_t(slope / error, freedom) if error else 1.0)


@cache
def _uniform_shares(n: int) -> Array:
    return np.sort(explained_by_a_cut(np.random.default_rng(n).random((_SIMULATED, n))))


def _two_sided_t(t: float, freedom: int) -> float:
    from scipy.special import stdtr

    return float(2 * stdtr(freedom, -abs(t)))
