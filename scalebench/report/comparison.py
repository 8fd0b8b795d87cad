"""Each strategy beside its per-batch baseline, and which of these comparisons speaks for the study."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from scalebench.analysis import Results, against
from scalebench.analysis.grouping import EXECUTIONS, PER_BATCH
from scalebench.analysis.validation import PREFERRED_ENGINES

BASELINE = "allreduce"


@dataclass(frozen=True)
class Comparison:
    """One strategy against the baseline, at one worker count of one execution and engine.

    `saved` = 1 - T(strategy) / T(baseline), of `n` runs of each, NaN where the baseline is oversubscribed. `difference`
    = metric(strategy) - metric(baseline), over `metric_n` common seeds. Bounds are NaN where one value has none.
    """

    execution: str
    engine: str
    workers: int
    label: str
    baseline: str
    per_batch: bool
    oversubscribed: bool
    strategy_s: float
    baseline_s: float
    saved: float
    saved_low: float
    saved_high: float
    interval: str
    n: int
    test: str
    p_adjusted: float
    metric_name: str
    metric: float
    metric_baseline: float
    difference: float
    difference_low: float
    difference_high: float
    metric_n: int
    note: str

    @property
    def saves(self) -> bool:
        """Whether a saving is shown: all of its interval is one."""
        return self.saved_low > 0

    @property
    def costs_metric(self) -> bool:
        """Whether a loss is shown in the metric."""
        return self.difference_high < 0

    @property
    def answers(self) -> bool:
        """Whether it may speak for the study."""
        return self.workers > 1 and not (self.per_batch or self.oversubscribed) and math.isfinite(self.saved)


def comparisons(results: Results) -> list[Comparison]:
    """Every strategy against the baseline on the same engine; none if the baseline did not run."""
    runs = results.completed
    strategy_of = dict(zip(runs["label"], runs["strategy"], strict=True))
    baselines = sorted(label for label, strategy in strategy_of.items() if strategy == BASELINE)
    if not baselines:
        return []
    table = against(results, BASELINE if BASELINE in baselines else baselines[0])
    own = table[table["engine_a"] == table["engine_b"]]
    return [_comparison(row, strategy_of[row["label_a"]] in PER_BATCH) for row in own.to_dict("records")]


def headline(found: Sequence[Comparison]) -> Comparison:
    """Of those that answer the one that speaks, by a rule that does not look for the largest saving.

    The largest worker count; native before paced before virtual where they reach equally far; there the strategy that
    takes the least time.
    """
    executions, engines = EXECUTIONS, ["virtual", *PREFERRED_ENGINES]
    most = max(one.workers for one in found)
    return min(
        (one for one in found if one.workers == most),
        key=lambda one: (executions.index(one.execution), engines.index(one.engine), -one.saved),
    )


def _comparison(row: dict[Hashable, Any], per_batch: bool) -> Comparison:
    return Comparison(
        execution=str(row["execution"]),
        engine=str(row["engine_a"]),
        workers=int(row["workers"]),
        label=str(row["label_a"]),
        baseline=str(row["label_b"]),
        per_batch=per_batch,
        oversubscribed=bool(row["oversubscribed"]),
        strategy_s=float(row["a_s"]),
        baseline_s=float(row["b_s"]),
        saved=1 - float(row["ratio"]),
        saved_low=1 - float(row["ratio_high"]),
        saved_high=1 - float(row["ratio_low"]),
        interval=str(row["interval"]),
        n=int(row["n"]),
        test=str(row["test"]),
        p_adjusted=float(row["p_adjusted"]),
        metric_name=str(row["metric_name"]),
        metric=float(row["metric_a"]),
        metric_baseline=float(row["metric_b"]),
        difference=float(row["metric_difference"]),
        difference_low=float(row["metric_low"]),
        difference_high=float(row["metric_high"]),
        metric_n=int(row["metric_n"]),
        note=str(row["note"]),
    )
