"""Comparisons of strategies with the per-batch baseline, and the choice of the headline among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scalebench.analysis import Results
from scalebench.analysis.comparing import compared_with, difference
from scalebench.analysis.intervals import NOTHING_VARIES
from scalebench.analysis.native_check import PREFERRED_ENGINES
from scalebench.analysis.pairing import CellComparison
from scalebench.analysis.verdicts import MetricVerdict, verdict_of_metric
from scalebench.measured import Measured
from scalebench.study.cell import EXECUTIONS, Cell
from scalebench.study.choices import BASELINES, PER_BATCH

ABOUT_EQUAL = 0.05  # the saving is negligible if its interval lies within +- this share
EXECUTIONS_IN_WORDS = {
    "native": "measured",
    "paced": "measured, with compute stretched to a stated device",
    "virtual": "virtual time, real training",
    "modelled": "modelled",
}
_AS_THERE = ("oversubscribed", "disturbed", "test", "p_adjusted", "metric_name", "note")


@dataclass(frozen=True)
class Comparison:
    """One strategy against the baseline, at one worker count of one execution and engine.

    `saved` = 1 - T(strategy) / T(baseline), of `saved.n` runs of each, NaN where the baseline is unfit. `difference` =
    metric(strategy) - metric(baseline), over `difference.n` common seeds.
    """

    cells: tuple[Cell, Cell]  # of the strategy and of the baseline
    execution: str
    engine: str
    workers: int
    label: str
    baseline: str
    per_batch: bool
    seldom: bool  # the strategy synchronised in fewer steps than it made
    oversubscribed: bool
    disturbed: bool
    strategy_s: float
    baseline_s: float
    saved: Measured
    test: str
    p_adjusted: float
    metric_name: str
    metric: float
    metric_baseline: float
    difference: Measured
    note: str

    @property
    def saves(self) -> bool:
        """Return True if the whole interval of the saving is positive."""
        return bool(self.saved.low > 0)

    @property
    def is_shown(self) -> bool:
        """Return True if the interval tells what the saving is: a gain, a loss, or about nothing."""
        _, low, high, _, interval = self.saved
        if interval == NOTHING_VARIES:
            return True
        if not math.isfinite(low):
            return False
        return not low <= 0 <= high or max(-low, high) <= ABOUT_EQUAL

    @property
    def metric_verdict(self) -> MetricVerdict:
        """Verdict on the strategy's metric against that of the baseline, as `scalebench compare` gives it."""
        if not self.difference.n:
            return "not compared"
        return verdict_of_metric(self.difference.low, self.difference.high)

    @property
    def answers(self) -> bool:
        """Return True if the comparison can answer the study's question."""
        unfit = self.per_batch or self.oversubscribed or self.disturbed
        return self.workers > 1 and not unfit and math.isfinite(self.saved.value)


def comparisons(results: Results) -> list[Comparison]:
    """Compare every strategy with the first of BASELINES that ran; empty if none did.

    `allreduce` is compared with on the same engine. Real `horovod` and `ddp` have engines of their own: a reduction
    against them holds what the engine saves.
    """
    runs = results.completed
    strategy_of = dict(zip(runs["label"], runs["strategy"], strict=True))
    name = next((name for name in BASELINES if name in strategy_of.values()), None)
    if name is None:
        return []
    labels = sorted(label for label, strategy in strategy_of.items() if strategy == name)
    found = compared_with(results, name if name in labels else labels[0])
    alike = [one for one in found if name != BASELINES[0] or one.top.at.engine == one.bottom.at.engine]
    return [_comparison(one, one.top.strategy in PER_BATCH) for one in alike]


def _comparison(one: CellComparison, per_batch: bool) -> Comparison:
    row, cell = difference(one), one.top.at
    return Comparison(
        cells=(cell, one.bottom.at),
        execution=cell.execution,
        engine=cell.engine,
        workers=cell.workers,
        label=cell.label,
        baseline=one.bottom.label,
        per_batch=per_batch,
        seldom=one.top.seldom,
        strategy_s=row["a_s"],
        baseline_s=row["b_s"],
        saved=one.ratio.mean.map(lambda times: 1 - times)._replace(n=row["n"]),
        metric=row["metric_a"],
        metric_baseline=row["metric_b"],
        difference=one.metric,
        **{name: row[name] for name in _AS_THERE},
    )


def headline(found: Sequence[Comparison]) -> Comparison:
    """Select the headline from comparisons that answer the question, independently of the size of the saving.

    Order: those that are shown, those with fewer synchronisations than steps (with one step an epoch, averaging every
    epoch does what the baseline does), the largest worker count, native before paced before virtual, the least time.
    """
    return min(found, key=lambda one: (not one.is_shown, not one.seldom, *place_rank(one), -one.saved.value))


def place_rank(one: Comparison) -> tuple[int, int, int]:
    """Sort key: the largest worker count, then native before paced before virtual, then the preferred engine."""
    engines = ["virtual", *PREFERRED_ENGINES]
    return -one.workers, EXECUTIONS.index(one.execution), engines.index(one.engine)


class Phrase(NamedTuple):
    """A part of a sentence: `strong` parts are the message, `detail` parts can be skipped."""

    text: str
    kind: Literal["plain", "strong", "detail"] = "plain"


Sentence = tuple[Phrase, ...]


def plain(text: str) -> Sentence:
    """Return a sentence without a message or details."""
    return (Phrase(text),)


def as_text(sentence: Sentence) -> str:
    """Return the plain text of `sentence`."""
    return "".join(phrase.text for phrase in sentence)
