"""Verdicts on the changes from A to B, cell by cell, and their table.

T_B / T_A has an interval. With a threshold h (0.05 for 5 %) the verdict on a cell's time is

    regression    the whole interval lies above 1 + h
    improvement   the whole interval lies below 1 / (1 + h)
    unchanged     the whole interval lies between the two: a larger change is excluded
    undecided     else: more repetitions are needed, or there is no interval

and on its metric the same with M_B - M_A around a margin m: a regression lies below -m, an improvement above m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import pandas as pd

from scalebench.analysis.comparability import Difference
from scalebench.analysis.intervals import Interval
from scalebench.analysis.validation import VirtualError

CellName = tuple[str, str, str, int]  # execution, engine, label, workers: the values of grouping.PLACE
THRESHOLD, METRIC_MARGIN = 0.05, 0.01
Verdict = Literal["regression", "improvement", "unchanged", "undecided", "not compared"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
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
    """

    a: str
    b: str
    threshold: float
    metric_margin: float
    table: pd.DataFrame
    missing: list[CellName] = field(default_factory=list)
    failed: list[CellName] = field(default_factory=list)
    added: list[CellName] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    overridden: list[Difference] = field(default_factory=list)
    virtual_errors: tuple[VirtualError | None, ...] = (None, None)

    @property
    def one_study(self) -> bool:
        """Return True if A and B are strategies of one study."""
        return bool((self.table["label_a"] != self.table["label_b"]).any())

    def count(self, verdict: Verdict) -> int:
        """Number of cells with this verdict on their time."""
        return int((self.table["verdict"] == verdict).sum())

    def metrics(self, verdict: Verdict) -> int:
        """Number of cells with this verdict on their metric."""
        return int((self.table["metric_verdict"] == verdict).sum())

    @property
    def repeats_worse(self) -> int:
        """Number of cells with a regressed metric that does not depend on the timing of workers."""
        return int(((self.table["metric_verdict"] == "regression") & self.table["metric_repeats"].astype(bool)).sum())

    @property
    def regressed(self) -> bool:
        """Return True if a time or a metric regressed, or B failed where A did not."""
        return bool(self.count("regression") or self.metrics("regression") or self.failed)


def verdict_of_time(ratio: Interval, threshold: float) -> Verdict:
    """Verdict on T_B / T_A."""
    return _verdict(math.log(ratio.low), math.log(ratio.high), math.log1p(threshold), "regression", "improvement")


def verdict_of_metric(difference: Interval, margin: float) -> Verdict:
    """Verdict on M_B - M_A of a metric for which higher is better."""
    return _verdict(difference.low, difference.high, margin, "improvement", "regression")


def _verdict(low: float, high: float, limit: float, above: Verdict, below: Verdict) -> Verdict:
    """Verdict on an interval [low, high] against [-limit, limit]."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "undecided"
    if low > limit:
        return above
    if high < -limit:
        return below
    return "unchanged" if -limit <= low and high <= limit else "undecided"
