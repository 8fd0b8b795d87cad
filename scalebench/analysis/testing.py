"""Whether two strategies differ: exact rank tests, offered only where they can reach their level.

Two strategies of one launch are paired by block (a repetition of the interleaved run order): Wilcoxon's signed-rank
test of the log ratios, whose smallest p is 2 / 2^n. Two that were launched apart, or two studies, are independent
samples: the rank-sum test (Mann-Whitney), whose smallest p is 2 / C(n + m, n). Both are two-sided and exact: the
distribution is counted, ties included (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 2014, chapters
3 and 4).

The worker counts at which two strategies are compared form one family; p is adjusted for it by Holm's step-down rule
(Scandinavian Journal of Statistics 6, 1979). Where the smallest p a test can reach lies above the first step of that
rule, alpha / family, no test is offered, and the number of repetitions that it needs is given instead. Virtual times
get no test at any number: their repetitions resample a calibration, and more of them would make any difference
significant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalebench.analysis.grouping import Cell, by_block
from scalebench.analysis.intervals import (
    Estimate,
    interval_name,
    mean_interval,
    paired_ratio,
    time_interval,
    unpaired_ratio,
)
from scalebench.analysis.reading import Results
from scalebench.errors import UsageError, nearest

ALPHA = 0.05
SIGNED_RANK = "Wilcoxon signed-rank"
RANK_SUM = "Wilcoxon rank-sum"
MEASURED = ("native", "paced")  # the executions whose times are samples of a machine's
COLUMNS = [
    *("execution", "label_a", "label_b", "engine_a", "engine_b", "workers", "oversubscribed", "paired", "n"),
    *("a_s", "b_s", "ratio", "ratio_low", "ratio_high", "interval"),
    *("test", "p", "p_adjusted", "significant", "repetitions_needed"),
    *("metric_name", "metric_n", "metric_a", "metric_b", "metric_difference", "metric_low", "metric_high", "note"),
]


class RankTest(NamedTuple):
    """A two-sided exact p and the smallest one that so many values can give."""

    name: str
    p: float
    smallest_p: float


def signed_rank_test(top: Sequence[float], bottom: Sequence[float]) -> RankTest:
    """Wilcoxon's signed-rank test of log(top_i / bottom_i); pairs that are equal are left out, as he did."""
    logs = np.log(np.asarray(top, dtype=float)) - np.log(np.asarray(bottom, dtype=float))
    logs = logs[logs != 0]
    if not len(logs):
        return RankTest(SIGNED_RANK, 1.0, 1.0)
    doubled = _doubled_ranks(np.abs(logs))
    ways = np.ones(1)
    for rank in doubled:  # each rank is positive or not, with equal chances
        ways = (np.append(ways, np.zeros(rank)) + np.append(np.zeros(rank), ways)) / 2
    return RankTest(SIGNED_RANK, _two_sided(ways, int(doubled[logs > 0].sum())), smallest_signed_rank_p(len(logs)))


def rank_sum_test(top: Sequence[float], bottom: Sequence[float]) -> RankTest:
    """The Wilcoxon-Mann-Whitney test of two independent samples."""
    n, m = len(top), len(bottom)
    if not (n and m):
        return RankTest(RANK_SUM, 1.0, 1.0)
    doubled = _doubled_ranks(np.asarray([*top, *bottom], dtype=float))
    ways = np.zeros((n + 1, int(doubled.sum()) + 1))  # by how many are chosen, and the sum of their doubled ranks
    ways[0, 0] = 1.0
    for seen, rank in enumerate(doubled, start=1):  # the chance that `k` of the first `seen` are of `top`
        taken = np.zeros_like(ways)
        taken[1:, rank:] = ways[:-1, : ways.shape[1] - rank]
        share = np.arange(n + 1)[:, None] / seen
        ways = ways * (1 - share) + taken * share
    return RankTest(RANK_SUM, _two_sided(ways[n], int(doubled[:n].sum())), smallest_rank_sum_p(n, m))


def smallest_signed_rank_p(pairs: int) -> float:
    """2 / 2^n: all differences have one sign."""
    return min(1.0, 2.0 ** (1 - pairs))


def smallest_rank_sum_p(n: int, m: int) -> float:
    """2 / C(n + m, n): the two samples do not overlap."""
    return min(1.0, 2.0 / math.comb(n + m, n))


def repetitions_needed(family: int, *, paired: bool, alpha: float = ALPHA) -> int:
    """The repetitions of each strategy from which a test of `family` worker counts can reach its level."""
    n = 1
    while (smallest_signed_rank_p(n) if paired else smallest_rank_sum_p(n, n)) > alpha / family:
        n += 1
    return n


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p: the k-th smallest of m is multiplied by m - k + 1, never below the one before it.

    A p that is NaN stands for a hypothesis of the family that was not tested: it counts in m and stays NaN.
    """
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")  # NaN last
    steps = np.minimum(1.0, values[order] * (len(values) - np.arange(len(values))))
    adjusted = np.full(len(values), math.nan)
    adjusted[order] = np.maximum.accumulate(steps)
    return [float(x) for x in adjusted]


def differences(results: Results, a: str, b: str, *, alpha: float = ALPHA) -> pd.DataFrame:
    """How strategy `a` differs from `b`, a row per execution, engine and worker count, under `COLUMNS`.

    `ratio` is T(a) / T(b), its interval `ratio_low` to `ratio_high` (see `interval`): paired by block where both ran in
    one launch (`paired`), else Welch's. `test`, `p`, `p_adjusted` (Holm over the worker counts) and `significant` are
    empty where no test is offered; then `repetitions_needed` is how many repetitions of both would offer one (0 where
    none ever is, as for virtual times), and `note` says why. An oversubscribed `b` is no baseline: no ratio, no test.
    `metric_difference` is metric(a) - metric(b), the mean over common seeds with a 95 % t interval.

    Raises:
        UsageError: `a` or `b` has no completed run.
    """
    found = by_block(results)
    first, second = _of(found, a), _of(found, b)
    rows: list[dict[str, object]] = []
    for (execution, engine_a), cells_a in _grouped(first).items():
        same = [cell for cell in second if cell.execution == execution and cell.engine == engine_a]
        others = same or [cell for cell in second if cell.execution == execution]
        for (_, engine_b), cells_b in _grouped(others).items():
            pairs = [(x, y) for x in cells_a for y in cells_b if _comparable(x, y)]
            rows += _family(pairs, engine_a == engine_b, alpha)
    return pd.DataFrame(rows, columns=COLUMNS)


def against(results: Results, baseline: str = "allreduce", *, alpha: float = ALPHA) -> pd.DataFrame:
    """`differences` of every other strategy from `baseline`, one below the other; empty if it did not run.

    Each strategy's worker counts are a family of their own: a study is asked one question per strategy.
    """
    labels = list(dict.fromkeys(cell.label for cell in by_block(results)))
    if baseline not in labels:
        return pd.DataFrame(columns=COLUMNS)
    tables = [differences(results, label, baseline, alpha=alpha) for label in labels if label != baseline]
    tables = [table for table in tables if len(table)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def _of(cells: list[Cell], name: str) -> list[Cell]:
    found = [cell for cell in cells if cell.label == name]
    if not found:
        raise UsageError(f"no completed run of strategy {name!r}; {nearest(name, {cell.label for cell in cells})}")
    return found


def _grouped(cells: list[Cell]) -> dict[tuple[str, str], list[Cell]]:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.execution, cell.engine), []).append(cell)
    return groups


def _comparable(a: Cell, b: Cell) -> bool:
    """At one worker count and with one global batch; with another it would be another problem."""
    return a.workers == b.workers and a.batch_global == b.batch_global


def _family(pairs: list[tuple[Cell, Cell]], paired: bool, alpha: float) -> list[dict[str, object]]:
    """The rows of one execution and pair of engines, tested together."""
    ordered = sorted(pairs, key=lambda pair: pair[0].workers)
    times = [_times(a, b, paired) for a, b in ordered]
    asked = [n for n, (_, b) in enumerate(ordered) if not b.oversubscribed]
    offered, p = [""] * len(ordered), [math.nan] * len(ordered)
    needed = repetitions_needed(max(1, len(asked)), paired=paired, alpha=alpha)
    for n in asked:
        test = (signed_rank_test if paired else rank_sum_test)(*times[n])
        if ordered[n][0].execution in MEASURED and test.smallest_p <= alpha / len(asked):
            offered[n], p[n] = test.name, test.p
    adjusted = dict(zip(asked, holm([p[n] for n in asked]), strict=True))
    return [
        _row(a, b, paired, top, bottom)
        | _verdict(a, b, offered[n], p[n], adjusted.get(n, math.nan), needed, len(asked), alpha)
        | _metrics(a, b)
        for n, ((a, b), (top, bottom)) in enumerate(zip(ordered, times, strict=True))
    ]


def _times(a: Cell, b: Cell, paired: bool) -> tuple[list[float], list[float]]:
    if not paired:
        return list(a.seconds.values()), list(b.seconds.values())
    blocks = sorted(a.seconds.keys() & b.seconds.keys())
    return [a.seconds[block] for block in blocks], [b.seconds[block] for block in blocks]


def _row(a: Cell, b: Cell, paired: bool, top: list[float], bottom: list[float]) -> dict[str, object]:
    ratio = Estimate(math.nan, math.nan, math.nan, 0)
    if top and bottom and not b.oversubscribed:
        ratio = (paired_ratio if paired else unpaired_ratio)(top, bottom)
    return {
        "execution": a.execution,
        "label_a": a.label,
        "label_b": b.label,
        "engine_a": a.engine,
        "engine_b": b.engine,
        "workers": a.workers,
        "oversubscribed": a.oversubscribed or b.oversubscribed,
        "paired": paired,
        "n": min(len(top), len(bottom)),
        "a_s": time_interval(top).centre,
        "b_s": time_interval(bottom).centre,
        "ratio": ratio.centre,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "interval": interval_name(a.execution) if ratio.n > 1 else "",
    }


def _verdict(
    a: Cell, b: Cell, test: str, p: float, adjusted: float, needed: int, family: int, alpha: float
) -> dict[str, object]:
    note = ""
    if b.oversubscribed:
        note, needed = f"{b.label} is oversubscribed at {b.workers} workers and so no baseline", 0
    elif a.execution not in MEASURED:
        note, needed = f"{a.execution} times get no test", 0
    elif not test:
        counts = f"{family} worker count{'s' if family > 1 else ''}"
        note = f"a test of {counts} needs {needed} repetitions to reach {alpha:g}"
    return {
        "test": test,
        "p": p,
        "p_adjusted": adjusted,
        "significant": bool(adjusted <= alpha) if test else None,
        "repetitions_needed": 0 if test else needed,
        "note": note,
    }


def _metrics(a: Cell, b: Cell) -> dict[str, object]:
    seeds = sorted(a.metrics.keys() & b.metrics.keys())
    top, bottom = [a.metrics[seed] for seed in seeds], [b.metrics[seed] for seed in seeds]
    difference = mean_interval([x - y for x, y in zip(top, bottom, strict=True)])
    return {
        "metric_name": a.metric_name,
        "metric_n": difference.n,
        "metric_a": mean_interval(top).centre,
        "metric_b": mean_interval(bottom).centre,
        "metric_difference": difference.centre,
        "metric_low": difference.low,
        "metric_high": difference.high,
    }


def _doubled_ranks(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Twice the ranks 1..n, which are whole where equal values share their mean rank."""
    ordered = np.sort(values)
    below, upto = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return (below + upto + 1).astype(np.int64)


def _two_sided(chances: NDArray[np.float64], seen: int) -> float:
    return float(min(1.0, 2 * min(chances[: seen + 1].sum(), chances[seen:].sum())))
