"""Verdicts on B against A, cell by cell: two studies, or two strategies of one.

T_B / T_A has an interval. With a threshold h (0.05 for 5 %) the verdict on a cell's time is

    regression    the whole interval lies above 1 + h
    improvement   the whole interval lies below 1 / (1 + h)
    unchanged     the whole interval lies between the two: a larger change is excluded
    undecided     else: more repetitions are needed, or there is no interval

The verdict on its metric, M_B - M_A with a margin m (0.01), is the one of this command, of the answer of a study, its
report, tables and `check`:

    better       the whole interval lies above m
    worse        the whole interval lies below -m
    equal        the whole interval lies between the two
    undecided    else, or there is no interval
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from scalebench.analysis.comparability import Difference, changed, refuse_unless_equal
from scalebench.analysis.comparing import compared_strategies
from scalebench.analysis.intervals import median_time
from scalebench.analysis.loading import Results, cells_in
from scalebench.analysis.native_check import VirtualError
from scalebench.analysis.pairing import CellComparison, Comparer
from scalebench.analysis.rounds import MEASURED, CellRuns, runs_by_cell, spread
from scalebench.analysis.significance import ALPHA, enough_runs, repeat_option
from scalebench.errors import UsageError, nearest
from scalebench.measured import Measured
from scalebench.strategies.registry import is_deterministic
from scalebench.study.cell import Cell, in_words

THRESHOLD, METRIC_MARGIN = 0.05, 0.01
Verdict = Literal["regression", "improvement", "unchanged", "undecided", "not compared"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MetricVerdict = Literal["worse", "better", "equal", "undecided", "not compared"]
METRIC_VERDICTS: tuple[MetricVerdict, ...] = get_args(MetricVerdict)
COLUMNS = [
    *("execution", "engine_a", "engine_b", "label_a", "label_b", "workers", "paired", "left_out", "n_a", "n_b"),
    *("a_s", "a_low", "a_high", "a_median_s", "a_spread", "b_s", "b_low", "b_high", "b_median_s", "b_spread"),
    *("ratio", "ratio_low", "ratio_high", "interval", "verdict"),
    *("test", "p", "p_adjusted", "repetitions_needed"),
    *("metric_name", "metric_n", "metric_a", "metric_b", "metric_difference", "metric_low", "metric_high"),
    *("metric_verdict", "metric_repeats", "note"),
]


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on B against A.

    `table` has a row per cell that both have, under COLUMNS. `missing` are cells of A that B lacks, `failed` cells of A
    that B tried and did not complete, `added` cells of B only. `changed` lists differences that are allowed,
    `overridden` those that are not. `virtual_errors` are the virtual-native errors of A and B, None where unchecked.
    `repeat` is the option of the repetitions that a test needs, as `check` advises it.
    """

    a: str
    b: str
    threshold: float
    metric_margin: float
    table: pd.DataFrame
    missing: list[Cell] = field(default_factory=list)
    failed: list[Cell] = field(default_factory=list)
    added: list[Cell] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    overridden: list[Difference] = field(default_factory=list)
    virtual_errors: tuple[VirtualError | None, ...] = (None, None)
    repeat: str = ""

    @property
    def one_study(self) -> bool:
        """Return True if A and B are strategies of one study."""
        return bool((self.table["label_a"] != self.table["label_b"]).any())

    def count(self, verdict: Verdict) -> int:
        """Number of cells with this verdict on their time."""
        return int((self.table["verdict"] == verdict).sum())

    def metrics(self, verdict: MetricVerdict) -> int:
        """Number of cells with this verdict on their metric."""
        return int((self.table["metric_verdict"] == verdict).sum())

    @property
    def repeats_worse(self) -> int:
        """Number of cells with a worse metric that does not depend on the timing of workers."""
        return int(((self.table["metric_verdict"] == "worse") & self.table["metric_repeats"].astype(bool)).sum())

    @property
    def regressed(self) -> bool:
        """Return True if a time regressed, a metric is worse, or B failed where A did not."""
        return bool(self.count("regression") or self.metrics("worse") or self.failed)


def compare_studies(
    a: Results,
    b: Results,
    *,
    threshold: float = THRESHOLD,
    metric_margin: float = METRIC_MARGIN,
    strategies: Collection[str] = (),
    execution: str | None = None,
    ignore: Collection[str] = (),
) -> Verdicts:
    """Compare study `b` with the reference study `a`, cell by cell: same execution, engine, strategy and workers.

    `strategies` (labels or names) and `execution` select cells. Oversubscribed and disturbed cells have no verdict.

    Raises:
        UsageError: there is nothing in common, or a name is wrong.
        ResultsError: the studies differ in a key that they have to share and that `ignore` does not name.
    """
    first, second = (_chosen(results, strategies, execution) for results in (a, b))
    pairs = _paired(first, second)
    if not pairs:
        raise UsageError(
            f"{a.folder} and {b.folder} have no cell in common: {in_words(first) or 'none'} against "
            f"{in_words(second) or 'none'}; "
            "run the same strategies at the same worker counts, with the same execution"
        )
    overridden = refuse_unless_equal(a, b, pairs, ignore)
    comparer = Comparer(a, b)
    families: dict[tuple[str, str, str], list[tuple[CellRuns, CellRuns]]] = {}
    for cell, other in pairs:  # the worker counts of a strategy are tested together
        families.setdefault(cell.series, []).append((second[other], first[cell]))
    compared = [one for family in families.values() for one in comparer.family(family)]
    rows = [_row(one, comparer, threshold, metric_margin) for one in _ordered(compared)]
    absent = [cell for cell in first if cell not in dict(pairs)]
    tried = set(cells_in(b.runs))
    tried |= {cell.at_any_batch for cell in tried} - {cell.at_any_batch for cell in second}  # of a batch that A lacks
    return Verdicts(
        str(a.folder),
        str(b.folder),
        threshold,
        metric_margin,
        pd.DataFrame(rows, columns=COLUMNS),
        missing=[cell for cell in absent if not {cell, cell.at_any_batch} & tried],
        failed=[cell for cell in absent if {cell, cell.at_any_batch} & tried],
        added=[cell for cell in second if cell not in {other for _, other in pairs}],
        changed=changed(a, b),
        overridden=overridden,
        virtual_errors=comparer.errors,
        repeat=repeat_option(b, max(map(enough_runs, (a, b)))),
    )


def compare_strategies(
    results: Results,
    a: str,
    b: str,
    *,
    threshold: float = THRESHOLD,
    metric_margin: float = METRIC_MARGIN,
    execution: str | None = None,
) -> Verdicts:
    """Compare strategy `b` with strategy `a` of one study, at each worker count that both have.

    Raises:
        UsageError: `a` or `b` has no completed run, or they have no cell in common.
    """
    labels = [_label(results, name) for name in (a, b)]
    if labels[0] == labels[1]:
        raise UsageError(f"{labels[0]} differs in nothing from itself; name two strategies")
    found = compared_strategies(results, labels[1], labels[0])
    found = _ordered([one for one in found if execution in (None, one.top.execution)])
    if not found:
        raise UsageError(f"{labels[0]} and {labels[1]} share no execution, worker count and global batch")
    comparer = Comparer(results)
    rows = [_row(one, comparer, threshold, metric_margin) | {"note": one.why_untested(ALPHA)} for one in found]
    return Verdicts(
        labels[0],
        labels[1],
        threshold,
        metric_margin,
        pd.DataFrame(rows, columns=COLUMNS),
        virtual_errors=comparer.errors,
        repeat=repeat_option(results, enough_runs(results)),
    )


def _chosen(results: Results, strategies: Collection[str], execution: str | None) -> dict[Cell, CellRuns]:
    """Cells of a study, of these strategies and this execution."""
    every = runs_by_cell(results)
    for name in strategies:
        known = {cell.label for cell in every} | {cell.strategy for cell in every}
        if name not in known:
            raise UsageError(f"{results.folder} has no completed run of strategy {name!r}; {nearest(name, known)}")
    return {
        cell.at: cell
        for cell in every
        if (not strategies or cell.label in strategies or cell.strategy in strategies)
        and execution in (None, cell.execution)
    }


def _paired(first: Collection[Cell], second: Collection[Cell]) -> list[tuple[Cell, Cell]]:
    """Pair the cells of two studies: those of equal batches, and those that are alone at their place in both.

    The latter differ in their batch alone, which `refuse_unless_equal` names.
    """
    counts = [Counter(cell.at_any_batch for cell in cells) for cells in (first, second)]
    alone = {cell.at_any_batch: cell for cell in second if all(own[cell.at_any_batch] == 1 for own in counts)}
    others = {cell: cell if cell in second else alone.get(cell.at_any_batch) for cell in first}
    return [(cell, other) for cell, other in others.items() if other]


def _label(results: Results, name: str) -> str:
    """The label `name`, or that of the only variant of the strategy `name`."""
    runs = results.completed
    labels = sorted(runs.loc[runs["strategy"] == name, "label"].unique())
    if name in set(runs["label"].unique()) or not labels:
        return name  # an unknown name is refused by `compared_strategies`
    if len(labels) > 1:
        raise UsageError(f"{name} ran with several options: name one of {', '.join(map(repr, labels))}")
    return str(labels[0])


def verdict_of_time(ratio: Measured, threshold: float) -> Verdict:
    """Verdict on T_B / T_A."""
    low, high, limit = math.log(ratio.low), math.log(ratio.high), math.log1p(threshold)
    if low > limit:
        return "regression"
    if high < -limit:
        return "improvement"
    return "unchanged" if -limit <= low and high <= limit else "undecided"


def verdict_of_metric(low: float, high: float, margin: float = METRIC_MARGIN) -> MetricVerdict:
    """Verdict on M_B - M_A, of the interval from `low` to `high`, of a metric for which higher is better."""
    if low > margin:
        return "better"
    if high < -margin:
        return "worse"
    return "equal" if -margin <= low and high <= margin else "undecided"


def _row(one: CellComparison, comparer: Comparer, threshold: float, metric_margin: float) -> dict[str, Any]:
    """The row of one cell under COLUMNS; A is the bottom of the ratio, B its top."""
    a, b = one.bottom, one.top
    unfit = a.unfit or b.unfit
    verdict: Verdict = "not compared" if unfit else verdict_of_time(one.ratio.mean, threshold)
    metric = verdict_of_metric(one.metric.low, one.metric.high, metric_margin)
    row = one.columns(top="b", bottom="a") | {
        "verdict": verdict,
        "metric_verdict": metric if one.metric.n else "not compared",
        "metric_repeats": _repeats(a, comparer) and _repeats(b, comparer),
        "note": unfit,
    }
    for side, (name, cell) in enumerate((("a", a), ("b", b))):
        times = list(cell.seconds.values())
        row |= comparer.time(cell, side).named(f"{name}_s", f"{name}_low", f"{name}_high")
        row |= {f"{name}_median_s": median_time(times).value, f"{name}_spread": spread(np.log(times))}
    return row


def _repeats(cell: CellRuns, comparer: Comparer) -> bool:
    """Return True if equal programs give `cell` equal metrics.

    Where workers merge as they arrive, native metrics vary from run to run.
    """
    alike = cell.execution not in MEASURED and comparer.same_draws
    return alike or cell.workers == 1 or is_deterministic(cell.strategy)


def _ordered(found: Collection[CellComparison]) -> list[CellComparison]:
    """Comparisons in the order of the cells of A."""
    return sorted(found, key=lambda one: one.bottom.at.sort_key)
