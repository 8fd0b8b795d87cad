"""Whether two strategies differ: exact rank tests, offered only where they can reach their level.

Two strategies whose repetitions lie in common blocks of the run order are paired: Wilcoxon's signed-rank test of the
log ratios, whose smallest p is 2 / 2^n. Two that were launched apart, or two studies, are independent samples: the
rank-sum test (Mann-Whitney), whose smallest p is 2 / C(n + m, n). Both are two-sided and exact: the distribution is
counted, ties included (Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, 2014, chapters 3 and 4).

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

from scalebench.analysis.blocks import Cell, by_block
from scalebench.analysis.intervals import NO_INTERVAL, mean_interval, metric_interval, time_interval
from scalebench.analysis.loading import Results
from scalebench.analysis.pairing import Ratio, Ratios
from scalebench.errors import UsageError, nearest
from scalebench.formatting import counted

ALPHA = 0.05
SIGNED_RANK = "Wilcoxon signed-rank"
RANK_SUM = "Wilcoxon rank-sum"
MEASURED = ("native", "paced")  # the executions whose times are samples of a machine's
COLUMNS = [
    *("execution", "label_a", "label_b", "engine_a", "engine_b", "workers", "oversubscribed", "paired", "n"),
    *("left_out", "a_s", "b_s", "ratio", "ratio_low", "ratio_high", "interval"),
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

    `ratio` is T(a) / T(b), its interval `ratio_low` to `ratio_high` (see `interval`): paired where both lie in common
    blocks of the run order (`paired`), without the `left_out` blocks in which they did not run side by side; else
    Welch's. `test`, `p`, `p_adjusted` (Holm over the worker counts) and `significant` are empty where no test is
    offered; then `repetitions_needed` is how many repetitions of both would offer one (0 where none ever is, as for
    virtual times), and `note` says why. An oversubscribed `b` is no baseline: no ratio, no test. An oversubscribed `a`
    is not tested and not of the family.
    `metric_difference` is metric(a) - metric(b), the mean over common seeds with a 95 % t interval.

    Raises:
        UsageError: `a` or `b` has no completed run.
    """
    found, compared = by_block(results), Ratios(results)
    first, second = _of(found, a), _of(found, b)
    rows: list[dict[str, object]] = []
    for (execution, engine_a), cells_a in _grouped(first).items():
        same = [cell for cell in second if cell.execution == execution and cell.engine == engine_a]
        others = same or [cell for cell in second if cell.execution == execution]
        for cells_b in _grouped(others).values():
            pairs = [(x, y) for x in cells_a for y in cells_b if _comparable(x, y)]
            pairs.sort(key=lambda pair: pair[0].workers)
            rows += _family(pairs, [compared.of(*pair) for pair in pairs], alpha)
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


def _family(pairs: list[tuple[Cell, Cell]], ratios: list[Ratio], alpha: float) -> list[dict[str, object]]:
    """The rows of one execution and pair of engines, tested together."""
    asked = [n for n, (a, b) in enumerate(pairs) if not (a.oversubscribed or b.oversubscribed)]
    tests = [_test(a, ratio, alpha / max(1, len(asked))) for (a, _), ratio in zip(pairs, ratios, strict=True)]
    p = [test.p if test else math.nan for test in tests]
    adjusted = dict(zip(asked, holm([p[n] for n in asked]), strict=True))
    return [
        _row(a, b, ratio)
        | _verdict(a, b, ratio, tests[n] if n in adjusted else None, adjusted.get(n, math.nan), len(asked), alpha)
        | _metrics(a, b)
        for n, ((a, b), ratio) in enumerate(zip(pairs, ratios, strict=True))
    ]


def _test(a: Cell, ratio: Ratio, level: float) -> RankTest | None:
    """The test that suits the ratio, None where its p cannot reach `level`."""
    if a.execution not in MEASURED:
        return None
    test = (signed_rank_test if ratio.paired else rank_sum_test)(ratio.top_s, ratio.bottom_s)
    return test if test.smallest_p <= level else None


def _row(a: Cell, b: Cell, ratio: Ratio) -> dict[str, object]:
    mean = NO_INTERVAL if b.oversubscribed else ratio.mean
    return {
        "execution": a.execution,
        "label_a": a.label,
        "label_b": b.label,
        "engine_a": a.engine,
        "engine_b": b.engine,
        "workers": a.workers,
        "oversubscribed": a.oversubscribed or b.oversubscribed,
        "paired": ratio.paired,
        "n": min(len(ratio.top_s), len(ratio.bottom_s)),
        "left_out": ratio.left_out,
        "a_s": time_interval(ratio.top_s).centre,
        "b_s": time_interval(ratio.bottom_s).centre,
        "ratio": mean.centre,
        "ratio_low": mean.low,
        "ratio_high": mean.high,
        "interval": ratio.interval if math.isfinite(mean.low) else "",
    }


def _verdict(
    a: Cell, b: Cell, ratio: Ratio, test: RankTest | None, adjusted: float, family: int, alpha: float
) -> dict[str, object]:
    note, needed = "", 0
    if b.oversubscribed:
        note = f"{b.label} is oversubscribed at {counted(b.workers, 'worker')} and so no baseline"
    elif a.oversubscribed:
        note = f"{a.label} is oversubscribed at {counted(a.workers, 'worker')} and so not tested"
    elif a.execution not in MEASURED:
        note = f"{a.execution} times get no test"
    elif test is None:
        alone = min(len(ratio.top_s), len(ratio.bottom_s)) < 2  # further runs will lie in blocks
        needed = repetitions_needed(family, paired=ratio.paired or alone, alpha=alpha)
        note = f"a test of {counted(family, 'worker count')} needs {needed} repetitions to reach {alpha:g}"
    return {
        "test": test.name if test else "",
        "p": test.p if test else math.nan,
        "p_adjusted": adjusted,
        "significant": bool(adjusted <= alpha) if test else None,
        "repetitions_needed": needed,
        "note": note,
    }


def _metrics(a: Cell, b: Cell) -> dict[str, object]:
    seeds = sorted(a.metrics.keys() & b.metrics.keys())
    top, bottom = [a.metrics[seed] for seed in seeds], [b.metrics[seed] for seed in seeds]
    difference = metric_interval([x - y for x, y in zip(top, bottom, strict=True)])
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
