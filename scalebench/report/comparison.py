"""Comparisons of strategies with the per-batch baseline, the choice of the headline among them, and open questions.

They are compared over all epochs, and up to the target metric, where one is stated. A
question is open where no effect is shown: the runs that would show it are named, and
engines that want more cores than the machine has.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pandas as pd

from scalebench import formatting
from scalebench.analysis import Results, cells, intervals, loading, pairing, target
from scalebench.analysis.comparing import compared_with, difference
from scalebench.analysis.native_check import PREFERRED_ENGINES, virtual_error
from scalebench.analysis.rounds import MEASURED
from scalebench.analysis.verdicts import MetricVerdict, verdict_of_metric
from scalebench.measured import Measured
from scalebench.strategies import registry
from scalebench.study.cell import BATCH, EXECUTIONS, SERIES, Cell, columns_without
from scalebench.study.choices import (
    ALLREDUCE,
    BASELINES,
    HOROVOD,
    LIBRARY_BASELINES,
    PER_BATCH,
)
from scalebench.tables.table import fields

# the saving is negligible if its interval lies within +- this share
_ABOUT_EQUAL = 0.05
EXECUTIONS_IN_WORDS = {
    "native": "measured",
    "paced": "measured, with compute stretched to a stated device",
    "virtual": "virtual time, real training",
    "modelled": "modelled",
}
_AS_THERE = ("oversubscribed", "disturbed", "test", "p_adjusted", "metric_name", "note")

HOLDS_ZERO = "which holds zero"  # an interval
_MOST_RUNS = 100  # that are advised
_OF_A_STATED_JITTER = 10  # repetitions
_QUIET = 0.1  # spread of times from which a quieter machine is the better advice
_COMPARED = (HOROVOD, ALLREDUCE)

Row = dict[Hashable, Any]
Times = dict[Cell, Row]  # rows of `times_to_target`, by cell at any batch


@dataclass(frozen=True)
class Comparison:
    """One strategy against the baseline, at one worker count of one execution and engine.

    `saved` = 1 - T(strategy) / T(baseline), of `saved.n` runs of each, NaN where the
    baseline is unfit. `difference` = metric(strategy) - metric(baseline), over
    `difference.n` common seeds.
    """

    cell: Cell  # of the strategy
    baseline: Cell
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
        # Virtual times without jitter repeat exactly.
        if interval == intervals.NOTHING_VARIES:
            return True
        if not math.isfinite(low):
            return False
        return not low <= 0 <= high or max(-low, high) <= _ABOUT_EQUAL

    @property
    def metric_verdict(self) -> MetricVerdict:
        """Verdict on the strategy's metric against that of the baseline, as `scalebench compare` gives it."""
        if not self.difference.n:
            return "not compared"
        return verdict_of_metric(self.difference.low, self.difference.high)

    @property
    def answers(self) -> bool:
        """Return True if the comparison can answer the study's question."""
        # Another per-batch strategy would answer which engine, not how often.
        unfit = self.per_batch or self.oversubscribed or self.disturbed
        return self.cell.workers > 1 and not unfit and math.isfinite(self.saved.value)


def comparisons(results: Results) -> list[Comparison]:
    """Compare every strategy with the first of BASELINES that ran; empty if none did.

    `allreduce` is compared with on the same engine. Real `horovod` and `ddp` have
    engines of their own: a reduction against them holds what the engine saves.
    """
    runs = results.completed
    strategy_of = dict(zip(runs["label"], runs["strategy"], strict=True))
    name = next((name for name in BASELINES if name in strategy_of.values()), None)
    if name is None:
        return []
    labels = sorted(
        label for label, strategy in strategy_of.items() if strategy == name
    )
    found = compared_with(results, name if name in labels else labels[0])
    # Real Horovod and DDP have engines of their own, and are compared across them.
    alike = [
        one
        for one in found
        if one.top.at.baseline(name).engine in ("", one.bottom.at.engine)
    ]
    return [_comparison(one, one.top.strategy in PER_BATCH) for one in alike]


def _comparison(one: pairing.CellComparison, per_batch: bool) -> Comparison:
    row = difference(one)
    return Comparison(
        cell=one.top.at,
        baseline=one.bottom.at,
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

    Order: those that are shown, those with fewer synchronisations than steps (with one
    step an epoch, averaging every epoch does what the baseline does), the largest
    worker count, native before paced before virtual, the least time.
    """
    return min(
        found,
        key=lambda one: (
            not one.is_shown,
            not one.seldom,
            *place_rank(one),
            -one.saved.value,
        ),
    )


def place_rank(one: Comparison) -> tuple[int, int, int]:
    """Sort key: the largest worker count, then native before paced before virtual, then the preferred engine."""
    engines = ["virtual", *PREFERRED_ENGINES]
    cell = one.cell
    return (
        -cell.workers,
        EXECUTIONS.index(cell.execution),
        engines.index(cell.engine),
    )


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


def change_of_time(saved: float) -> tuple[str, str]:
    """Return `8.0 % less time` and `than`; `as long` and `as` where nothing is left of the saving in print."""
    size = formatting.share(saved)
    if size == formatting.share(0.0):
        return "as long", "as"
    return f"{size} {'less' if saved > 0 else 'more'} time", "than"


def to_show_saving(one: Comparison, results: Results) -> str:
    """Return the runs that would show whether `one` saves time; empty if its interval shows that already.

    For measured times the number n of runs with t_{n-1} s / sqrt(n) below the distance
    of the mean from zero, or so small that the interval lies within +-ABOUT_EQUAL, with
    the deviation s of log ratios as it was; not fewer than all commands advise.
    """
    if one.is_shown:
        return ""
    if one.saved.n < 2:
        return f"repetitions would show both: {pairing.repeat_option(results, pairing.enough_runs(results))} or more"
    if one.cell.execution not in MEASURED:
        return _of_virtual_times(one, results)
    ratio, low, high, measured, _ = one.saved.map(lambda saved: math.log1p(-saved))
    s = (high - low) / 2 / intervals.t_quantile(measured - 1) * math.sqrt(measured)
    centre = abs(ratio)
    enough = max(centre, math.log1p(_ABOUT_EQUAL) - centre)
    half_widths = (
        (n, intervals.t_quantile(n - 1) * s / math.sqrt(n))
        for n in range(measured + 1, _MOST_RUNS + 1)
    )
    runs = next((n for n, half in half_widths if half < enough), None)
    # Of widely varying times more runs are the dearer way.
    quieter = " on a quieter machine" if s > _QUIET else ""
    if runs is None:
        return (
            f"more than {_MOST_RUNS} runs of each would be needed; times that vary less would show which is faster"
            f"{quieter}"
        )
    runs = max(runs, pairing.enough_runs(results))
    fewer = f", or fewer{quieter}" if quieter else ""
    return f"about {runs} runs of each would show which is faster ({pairing.repeat_option(results, runs)}){fewer}"


def to_show_metric(one: Comparison, results: Results) -> str:
    """Return the runs that would show whether the metric differs; empty with enough seeds, and with a single one."""
    if not 1 < one.difference.n < intervals.METRIC_FROM:
        return ""
    return f"seeds from {pairing.repeat_option(results, pairing.enough_runs(results))} up give the metric an interval"


def _of_virtual_times(one: Comparison, results: Results) -> str:
    """The larger of the two parts of the interval: the error that native runs show, or the repetitions' spread."""
    error = virtual_error(results)
    # A stated jitter has no error: repetitions alone narrow its interval.
    if one.saved.kind.startswith(intervals.STATED):
        if one.saved.n >= _OF_A_STATED_JITTER:
            return ""
        option = pairing.repeat_option(results, _OF_A_STATED_JITTER)
        return f"more repetitions of the stated jitter would show which is faster: {option}"
    if error is not None:
        what = "on a quieter machine would show which is faster"
        if not error.known:
            what = "at more worker counts would give it an interval"
        return f"native runs {what}: virtual times are off theirs by {error.words}"
    advised = pairing.enough_runs(results)
    few = (
        f", with {pairing.repeat_option(results, advised)} or more"
        if one.saved.n < advised
        else ""
    )
    again = f"scalebench recalibrate {results.folder}"
    return (
        f"a calibration on a quieter machine would show which is faster ({again}){few}"
    )


def crowded_engines(results: Results) -> str:
    """Return what is left of Horovod and DDP where all their measured runs of several workers are oversubscribed.

    With the reason for the length of Horovod's steps where they take a cycle and those
    of allreduce do not; empty where neither is so.
    """
    if results.completed.empty:
        return ""
    return " ".join([*_oversubscribed(results), *_cycle(cells(results), results)])


def _oversubscribed(results: Results) -> list[str]:
    table = cells(results)
    own = table[
        table["strategy"].isin(LIBRARY_BASELINES) & table["execution"].isin(MEASURED)
    ]
    own = own[own["workers"] > 1]
    names = [
        str(name)
        for name, cells_of in own.groupby("strategy", sort=False)
        if cells_of["oversubscribed"].all()
    ]
    if not names:
        return []
    own = own[own["strategy"].isin(names)]
    workers = formatting.listed(sorted({int(count) for count in own["workers"]}))
    # What is left for readers who came for Horovod or DDP.
    virtual = bool((results.completed["execution"] == "virtual").any())
    left = (
        "their times at several workers are virtual ones alone"
        if virtual
        else "nothing is compared with them"
    )
    wants = "want" if len(names) > 1 else "wants"
    execution, why = "native", f"{wants} more cores than this machine has"
    if own["execution"].eq("paced").all():
        execution, why = "paced", "did not keep the stated pace"
    return [
        f"At {workers} workers {' and '.join(names)} {why} ({formatting.OVERSUBSCRIBED}): these {execution} times are "
        f"no baseline, and {left}."
    ]


def _cycle(table: pd.DataFrame, results: Results) -> list[str]:
    """Compare a step of plain Horovod with one of allreduce, at the smallest worker count that both have."""
    table = table[
        loading.is_representative(table)
        & (table["workers"] > 1)
        & table["label"].isin(_COMPARED)
    ]
    if table.empty:
        return []
    # Evaluation is outside the training time, which is that of the steps alone.
    table = table.assign(
        step_s=table["train_s"]
        / table["steps_per_epoch"]
        / float(results.completed["epochs"].max())
    )
    cycle_s = registry.create(HOROVOD, {}).traits.cycle_s
    # Native where both were measured, else virtual.
    for execution in EXECUTIONS:
        own = table[table["execution"] == execution].drop_duplicates(
            columns_without("execution", "engine", *BATCH)
        )
        steps = own.pivot(index="workers", columns="label", values="step_s").astype(
            float
        )
        steps = steps.reindex(columns=list(_COMPARED)).dropna()
        # Longer steps hide the cycle, and are explained by other causes.
        steps = steps[(steps[HOROVOD] >= cycle_s) & (steps[ALLREDUCE] < cycle_s)]
        if len(steps):
            workers = formatting.counted(int(steps.index[0]), "worker")
            step, other, cycle = map(formatting.seconds, (*steps.iloc[0], cycle_s))
            return [
                f"A step of horovod takes {step} at {workers} ({execution}), where one of allreduce takes {other}: its "
                f"thread looks for gradients once in a cycle of {cycle}, and so short a step waits for the next."
            ]
    return []


@dataclass(frozen=True)
class ToTarget:
    """A comparison of the times to the target: a row of `target_ratios`, with the comparison for all epochs."""

    one: Comparison
    row: Row
    times: Times

    @property
    def is_shown(self) -> bool:
        """Return True if the interval tells what the saving is, as `Comparison.is_shown`."""
        return self._as_comparison.is_shown

    @property
    def _as_comparison(self) -> Comparison:
        reduction = fields("reduction reduction_low reduction_high")(self.row)
        return replace(
            self.one,
            saved=reduction._replace(n=self.row["n"], kind=self.row["interval"]),
        )

    def sentence(
        self, *, brief: bool = False, how: str = "", than: str = ""
    ) -> Sentence:
        """`At 8 workers, local_sgd takes 8 % less time to accuracy 0.9 than allreduce (...).`"""
        start = f"At {formatting.counted(self.one.cell.workers, 'worker')}, "
        return _to_target(
            self.row,
            self.one,
            _aim(self.row, self.one, self.times),
            self.times,
            brief,
            start,
            how,
            than,
        )


def sooner(found: Sequence[Comparison], results: Results) -> ToTarget | None:
    """Select the comparison of times to the target that is the headline; None if none is shown.

    Order: the largest worker count, then native before paced before virtual, then the
    least time to the target.
    """
    table = target.target_ratios(results)
    times = _times(results)
    # Oversubscribed and disturbed cells are drawn, but answer nothing.
    table = table[table["reduction"].notna() & loading.is_representative(table)]
    pairs = zip(loading.cells_in(table), table["baseline"], strict=True)
    rows = dict(zip(pairs, table.to_dict("records"), strict=True))
    aimed = []
    for one in found:
        # a baseline is compared without its options
        baseline = one.baseline.label.partition("(")[0]
        if row := rows.get((one.cell, baseline)):
            aimed.append(ToTarget(one, row, times))
    shown = [one for one in aimed if one.is_shown]
    return min(
        shown,
        key=lambda aim: (*place_rank(aim.one), aim.row["time_to_target_s"]),
        default=None,
    )


def reached_at(one: Comparison, results: Results) -> bool:
    """Return True if any run reached the target at the place of `one`, whatever its strategy."""
    cells = target.times_to_target(results)
    place = (cells["execution"] == one.cell.execution) & (
        cells["workers"] == one.cell.workers
    )
    return bool((cells.loc[place, "n_reached"] > 0).any())


def answer_to_target(
    one: Comparison, results: Results, *, brief: bool = False
) -> Iterator[Sentence]:
    """Compare the times to the target of the strategy and the baseline of `one`; nothing without a target.

    Where one of them does not reach it at this worker count, a second sentence has the
    largest count at which both do. A `brief` sentence does not name the interval.
    """
    table = target.target_ratios(results)
    times = _times(results)
    of_series = table[SERIES].eq(list(one.cell.series)).all(axis=1)
    against = table["baseline"] == one.baseline.label.partition("(")[0]
    own = table[of_series & against & loading.is_representative(table)]
    # One worker synchronises with no other: nothing is saved there.
    known = own[own["reduction"].notna() & (own["workers"] > 1)]
    both = known.sort_values("workers").to_dict("records")
    for row in own[own["workers"] == one.cell.workers].to_dict("records"):
        strategy, other = _cells_of(row, one, times)
        aim = _aim(row, one, times)
        if math.isfinite(row["reduction"]):
            yield _to_target(row, one, aim, times, brief)
            continue
        epochs = formatting.counted(int(results.completed["epochs"].max()), "epoch")
        reached = (
            f"{_runs(strategy)} and {_runs(other)} reach it within {epochs}"
            if other
            else row["note"]
        )
        yield plain(f"To {aim}: {reached}.")
        for last in both[-1:]:
            yield _to_target(
                last,
                one,
                aim,
                times,
                brief,
                f"At {formatting.counted(last['workers'], 'worker')}, ",
            )


def _aim(row: Row, one: Comparison, times: Times) -> str:
    """`accuracy 0.9`."""
    return f"{formatting.metric_word(one.metric_name or 'metric')} {_cells_of(row, one, times)[0]['target_metric']:g}"


def _times(results: Results) -> Times:
    """Return the rows of `times_to_target` by cell at any batch; of several batches the first."""
    table = target.times_to_target(results)
    found: Times = {}
    for cell, row in zip(
        loading.cells_in(table), table.to_dict("records"), strict=True
    ):
        found.setdefault(cell.at_any_batch, row)
    return found


def _cells_of(row: Row, one: Comparison, times: Times) -> list[Row]:
    """Return the cells of strategy and baseline at the execution and worker count of `row`; empty ones if missing."""
    own = Cell(row["execution"], row["engine"], one.cell.label, row["workers"])
    other = own._replace(engine=row["baseline_engine"], label=one.baseline.label)
    return [times.get(cell, {}) for cell in (own, other)]


def _to_target(
    row: Row,
    one: Comparison,
    aim: str,
    times: Times,
    brief: bool,
    start: str = "",
    how: str = "",
    baseline: str = "",
) -> Sentence:
    both = _cells_of(row, one, times)
    label = one.cell.label
    low = row["reduction_low"]
    high = row["reduction_high"]
    change, than = change_of_time(row["reduction"])
    is_open = low <= 0 <= high and low < high
    verb = "takes" if math.isfinite(low) and not is_open else "took"
    message = f"{label} {verb} {change} to {aim}"
    interval = "no interval"
    if math.isfinite(low):
        interval = formatting.reduction_range(low, high)
        interval += "" if brief else f", {row['interval']} from {row['n']} runs of each"
        interval += f", {HOLDS_ZERO}" if is_open else ""
    # Runs that never reached it are censored: the mean of the others would be too
    # early.
    torn = [_runs(cell) for cell in both if cell["n_reached"] < cell["n_aimed"]]
    if torn:
        interval = f"Kaplan-Meier medians, as {' and '.join(torn)} reached it"
    facts = [
        f"{formatting.seconds(time)} in {cell['epochs_to_target']:g} "
        f"epoch{'' if cell['epochs_to_target'] == 1 else 's'}"
        for time, cell in zip(
            (row["time_to_target_s"], row["baseline_s"]), both, strict=True
        )
    ]
    return (
        Phrase(start),
        Phrase(message, "strong"),
        Phrase(f" {than} {baseline}{row['baseline']}"),
        Phrase(f" ({' instead of '.join(facts)}; {interval}{how})", "detail"),
        Phrase("."),
    )


def _runs(cell: Row) -> str:
    """`4 of 5 runs of epoch_average`."""
    return f"{cell['n_reached']} of {formatting.counted(cell['n_aimed'], 'run')} of {cell['label']}"
