"""The time to the target metric, where the study states one: the headline where it is shown, else beside it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from scalebench.analysis import Results
from scalebench.analysis.loading import is_representative
from scalebench.analysis.target import target_ratios, times_to_target
from scalebench.formatting import counted, metric_word, reduction_range, seconds, share
from scalebench.report.comparison import Comparison, Phrase, Sentence, place_rank, plain
from scalebench.tables.table import fields

Row = dict[Hashable, Any]


@dataclass(frozen=True)
class ToTarget:
    """A comparison of the times to the target: a row of `target_ratios`, with the comparison for all epochs."""

    one: Comparison
    row: Row
    cells: pd.DataFrame

    @property
    def is_shown(self) -> bool:
        """Return True if the interval tells what the saving is, as `Comparison.is_shown`."""
        return self._as_comparison.is_shown

    @property
    def _as_comparison(self) -> Comparison:
        reduction = fields("reduction reduction_low reduction_high")(self.row)
        return replace(self.one, saved=reduction._replace(n=self.row["n"], kind=self.row["interval"]))

    def sentence(self, *, brief: bool = False, how: str = "", than: str = "") -> Sentence:
        """`At 8 workers, local_sgd takes 8 % less time to accuracy 0.9 than allreduce (...).`"""
        start = f"At {self.one.workers} workers, "
        return _comparison(
            self.row, self.one, _aim(self.row, self.one, self.cells), self.cells, brief, start, how, than
        )


def to_target(found: Sequence[Comparison], results: Results) -> ToTarget | None:
    """Select the comparison of times to the target that is the headline; None if none is shown.

    Order: the largest worker count, then native before paced before virtual, then the least time to the target.
    """
    table, cells = target_ratios(results), times_to_target(results)
    table = table[table["reduction"].notna() & is_representative(table)]
    rows = {(row["execution"], row["engine"], row["label"], row["workers"], row["baseline"]): row
            for row in table.to_dict("records")}  # fmt: skip
    aimed = [
        ToTarget(one, row, cells)
        for one in found
        if (row := rows.get((one.execution, one.engine, one.label, one.workers, one.baseline.partition("(")[0])))
    ]
    shown = [one for one in aimed if one.is_shown]
    return min(shown, key=lambda aim: (*place_rank(aim.one), aim.row["time_to_target_s"]), default=None)


def reached_at(one: Comparison, results: Results) -> bool:
    """Return True if any run reached the target at the place of `one`, whatever its strategy."""
    cells = times_to_target(results)
    place = (cells["execution"] == one.execution) & (cells["workers"] == one.workers)
    return bool((cells.loc[place, "n_reached"] > 0).any())


def target_answer(one: Comparison, results: Results, *, brief: bool = False) -> Iterator[Sentence]:
    """Compare the times to the target of the strategy and the baseline of `one`; nothing without a target.

    Where one of them does not reach it at this worker count, a second sentence has the largest count at which both do.
    A `brief` sentence does not name the interval.
    """
    table, cells = target_ratios(results), times_to_target(results)
    own = table[(table["execution"] == one.execution) & (table["engine"] == one.engine) & (table["label"] == one.label)]
    own = own[(own["baseline"] == one.baseline.partition("(")[0]) & is_representative(own)]
    both = own[own["reduction"].notna() & (own["workers"] > 1)].sort_values("workers").to_dict("records")
    for row in own[own["workers"] == one.workers].to_dict("records"):
        strategy, other = _cells_of(row, one, cells)
        aim = _aim(row, one, cells)
        if math.isfinite(row["reduction"]):
            yield _comparison(row, one, aim, cells, brief)
            continue
        epochs = counted(int(results.completed["epochs"].max()), "epoch")
        reached = f"{_runs(strategy)} and {_runs(other)} reach it within {epochs}" if other else row["note"]
        yield plain(f"To {aim}: {reached}.")
        for last in both[-1:]:
            yield _comparison(last, one, aim, cells, brief, f"At {last['workers']} workers, ")


def _aim(row: Row, one: Comparison, cells: pd.DataFrame) -> str:
    """`accuracy 0.9`."""
    return f"{metric_word(one.metric_name or 'metric')} {_cells_of(row, one, cells)[0]['target_metric']:g}"


def _cells_of(row: Row, one: Comparison, cells: pd.DataFrame) -> list[Row]:
    """Return the cells of strategy and baseline at the execution and worker count of `row`; empty ones if missing."""
    here = cells[(cells["execution"] == row["execution"]) & (cells["workers"] == row["workers"])]
    places = ((one.label, row["engine"]), (one.baseline, row["baseline_engine"]))
    found = [here[(here["label"] == label) & (here["engine"] == engine)] for label, engine in places]
    return [cell.to_dict("records")[0] if len(cell) else {} for cell in found]


def _comparison(
    row: Row,
    one: Comparison,
    aim: str,
    cells: pd.DataFrame,
    brief: bool,
    start: str = "",
    how: str = "",
    baseline: str = "",
) -> Sentence:
    both, label = _cells_of(row, one, cells), one.label
    low, high = row["reduction_low"], row["reduction_high"]
    change = f"{share(row['reduction'])} {'less' if row['reduction'] >= 0 else 'more'} time to {aim}"
    if low <= 0 <= high and low < high:
        message, than = f"{'w' if start else 'W'}hether {label} reaches {aim} sooner is not shown", "against"
    else:
        message, than = f"{label} {'takes' if math.isfinite(low) else 'took'} {change}", "than"
    interval = "no interval"
    if math.isfinite(low):
        interval = reduction_range(low, high)
        interval += "" if brief else f", {row['interval']} from {row['n']} runs of each"
    if torn := [_runs(cell) for cell in both if cell["n_reached"] < cell["n_aimed"]]:
        interval = f"Kaplan-Meier medians, as {' and '.join(torn)} reached it"
    facts = [
        f"{seconds(time)} in {cell['epochs_to_target']:g} epoch{'' if cell['epochs_to_target'] == 1 else 's'}"
        for time, cell in zip((row["time_to_target_s"], row["baseline_s"]), both, strict=True)
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
    return f"{cell['n_reached']} of {counted(cell['n_aimed'], 'run')} of {cell['label']}"
