"""The answer to the study's question for the target metric: which strategy reaches it sooner, and by how much."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scalebench import formatting
from scalebench.analysis import Results, loading, target
from scalebench.report import comparison
from scalebench.report.comparison import Comparison, Phrase, Sentence, plain
from scalebench.study.cell import SERIES, Cell
from scalebench.tables.table import fields

Row = dict[Hashable, Any]
Times = dict[Cell, Row]  # rows of `times_to_target`, by cell at any batch


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
        start = f"At {self.one.cell.workers} workers, "
        return _comparison(
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
        key=lambda aim: (*comparison.place_rank(aim.one), aim.row["time_to_target_s"]),
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
            yield _comparison(row, one, aim, times, brief)
            continue
        epochs = formatting.counted(int(results.completed["epochs"].max()), "epoch")
        reached = (
            f"{_runs(strategy)} and {_runs(other)} reach it within {epochs}"
            if other
            else row["note"]
        )
        yield plain(f"To {aim}: {reached}.")
        for last in both[-1:]:
            yield _comparison(
                last, one, aim, times, brief, f"At {last['workers']} workers, "
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


def _comparison(
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
    change = f"{formatting.share(row['reduction'])} {'less' if row['reduction'] >= 0 else 'more'} time to {aim}"
    if low <= 0 <= high and low < high:
        message = (
            f"{'w' if start else 'W'}hether {label} reaches {aim} sooner is not shown"
        )
        than = "against"
    else:
        message = f"{label} {'takes' if math.isfinite(low) else 'took'} {change}"
        than = "than"
    interval = "no interval"
    if math.isfinite(low):
        interval = formatting.reduction_range(low, high)
        interval += "" if brief else f", {row['interval']} from {row['n']} runs of each"
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
