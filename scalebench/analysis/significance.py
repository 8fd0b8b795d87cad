"""Exact rank tests of differences, and tests for a machine that was not in one steady state.

Paired times (pairing.py) are tested by Wilcoxon's signed-rank test of the log ratios, whose smallest p is 2 / 2^n;
independent samples by the rank-sum test (Mann-Whitney), whose smallest p is 2 / C(n + m, n). Both are two-sided and
exact: the distribution is enumerated, ties included (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods,
2014, chapters 3 and 4). p is adjusted for a family of hypotheses by Holm's step-down rule (Scandinavian Journal of
Statistics 6, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis.intervals import Array
from scalebench.analysis.loading import Results, cached
from scalebench.analysis.rounds import MEASURED, CellRuns, runs_by_cell

ALPHA = 0.05
ENOUGH_RUNS = 5  # of a cell, for a useful interval
SIGNED_RANK = "Wilcoxon signed-rank"
RANK_SUM = "Wilcoxon rank-sum"
TWO_GROUPS_FROM = 5  # values
_SIMULATED = 20_000


class RankTest(NamedTuple):
    """Two-sided exact p, and the smallest p that samples of this size can reach."""

    name: str
    p: float
    smallest_p: float


def signed_rank_test(top: Sequence[float], bottom: Sequence[float]) -> RankTest:
    """Wilcoxon's signed-rank test of log(top_i / bottom_i); equal pairs are left out."""
    logs = np.log(np.asarray(top, dtype=float)) - np.log(
        np.asarray(bottom, dtype=float)
    )
    logs = logs[logs != 0]
    if not len(logs):
        return RankTest(SIGNED_RANK, 1.0, 1.0)
    doubled = _doubled_ranks(np.abs(logs))
    ways = np.ones(1)
    for rank in doubled:  # each rank is positive or not, with equal chances
        ways = (np.append(ways, np.zeros(rank)) + np.append(np.zeros(rank), ways)) / 2
    return RankTest(
        SIGNED_RANK,
        _two_sided(ways, int(doubled[logs > 0].sum())),
        smallest_signed_rank_p(len(logs)),
    )


def rank_sum_test(top: Sequence[float], bottom: Sequence[float]) -> RankTest:
    """Wilcoxon-Mann-Whitney test of two independent samples."""
    n = len(top)
    m = len(bottom)
    if not (n and m):
        return RankTest(RANK_SUM, 1.0, 1.0)
    doubled = _doubled_ranks(np.asarray([*top, *bottom], dtype=float))
    # by how many are chosen, and the sum of their doubled ranks
    ways = np.zeros((n + 1, int(doubled.sum()) + 1))
    ways[0, 0] = 1.0
    # the chance that `k` of the first `seen` are of `top`
    for seen, rank in enumerate(doubled, start=1):
        taken = np.zeros_like(ways)
        taken[1:, rank:] = ways[:-1, : ways.shape[1] - rank]
        share = np.arange(n + 1)[:, None] / seen
        ways = ways * (1 - share) + taken * share
    return RankTest(
        RANK_SUM, _two_sided(ways[n], int(doubled[:n].sum())), smallest_rank_sum_p(n, m)
    )


def smallest_signed_rank_p(pairs: int) -> float:
    """2 / 2^n: all differences have one sign."""
    return min(1.0, 2.0 ** (1 - pairs))


def smallest_rank_sum_p(n: int, m: int) -> float:
    """2 / C(n + m, n): the two samples do not overlap."""
    return min(1.0, 2.0 / math.comb(n + m, n))


def repetitions_needed(family: int, *, paired: bool, alpha: float = ALPHA) -> int:
    """Smallest number of repetitions at which a test of `family` worker counts can reach its level."""
    n = 1
    while (
        smallest_signed_rank_p(n) if paired else smallest_rank_sum_p(n, n)
    ) > alpha / family:
        n += 1
    return n


@cached
def enough_runs(results: Results) -> int:
    """Number of repetitions that every command advises: for useful intervals, and a test of any two strategies."""
    fit = [
        cell
        for cell in runs_by_cell(results)
        if cell.execution in MEASURED and not cell.unfit
    ]
    families = []
    for execution in MEASURED:
        counts = {cell.workers for cell in fit if cell.execution == execution}
        families.append(len(counts))
    needed = [repetitions_needed(family, paired=True) for family in families if family]
    return max([ENOUGH_RUNS, *needed])


def repeat_option(results: Results, runs: int) -> str:
    """Return the option that makes `runs` repetitions of every point of the study."""
    return f"{'--set until.at_least=' if results.study.get('until') else '--repetitions '}{runs}"


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p by Holm: the k-th smallest of m times m - k + 1, made monotone.

    NaN stands for a hypothesis of the family that was not tested: it counts in m and
    stays NaN.
    """
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")  # NaN last
    steps = np.minimum(1.0, values[order] * (len(values) - np.arange(len(values))))
    adjusted = np.full(len(values), math.nan)
    adjusted[order] = np.maximum.accumulate(steps)
    return [float(x) for x in adjusted]


class Trend(NamedTuple):
    """Time of the last run over the time it would have had as the first, and the two-sided p of no trend."""

    factor: float
    p: float


def two_groups_p(seconds: Sequence[float]) -> float:
    """Probability of as clear a split of values from one group; NaN below TWO_GROUPS_FROM values.

    Clearness is the largest share of the logs' squared deviations that one cut
    explains, with at least a quarter of the values, and two, on either side. The
    reference distribution is uniform, for which the share is larger than for normal,
    exponential, Laplace or Student's samples: the test is conservative for those
    (docs/statistics.md), like Hartigan's dip (Annals of Statistics 13, 1985).
    """
    n = len(seconds)
    if n < TWO_GROUPS_FROM:
        return math.nan
    simulated = _uniform_shares(n)
    share = float(explained_by_a_cut(np.log(np.asarray(seconds, dtype=float))))
    return (1 + len(simulated) - int(np.searchsorted(simulated, share))) / (
        1 + len(simulated)
    )


def explained_by_a_cut(values: ArrayLike) -> Array:
    """Largest share of squared deviations that one cut explains, along the last axis; 0 where all values are equal."""
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


def time_trend(cells: Sequence[CellRuns]) -> Trend | None:
    """Slope of log times over the run order within cells; None below ten degrees of freedom.

    Least squares with an intercept for every cell, ln T = c(cell) + b order. p is
    Student's of b / se(b), with runs - cells - 1 degrees of freedom.
    """
    from scipy.special import stdtr

    several = [cell for cell in cells if len(cell.seconds) > 1]
    order = [
        np.array([cell.order[number] for number in cell.seconds], dtype=float)
        for cell in several
    ]
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
    p = float(2 * stdtr(freedom, -abs(slope / error))) if error else 1.0
    return Trend(math.exp(slope * span), p)


@cache
def _uniform_shares(n: int) -> Array:
    return np.sort(explained_by_a_cut(np.random.default_rng(n).random((_SIMULATED, n))))


def _doubled_ranks(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Twice the ranks 1..n: integers even where ties share their mean rank."""
    ordered = np.sort(values)
    below = np.searchsorted(ordered, values, "left")
    upto = np.searchsorted(ordered, values, "right")
    return (below + upto + 1).astype(np.int64)


def _two_sided(chances: NDArray[np.float64], seen: int) -> float:
    at_most = chances[: seen + 1].sum()
    at_least = chances[seen:].sum()
    return float(min(1.0, 2 * min(at_most, at_least)))
