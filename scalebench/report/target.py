"""The second headline: the time to the target metric, where the study states one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import pandas as pd

from scalebench.analysis import Results
from scalebench.analysis.loading import is_representative
from scalebench.analysis.target_ratios import target_ratios
from scalebench.analysis.time_to_target import times_to_target
from scalebench.formatting import counted, metric_word, reduction_range, seconds, share
from scalebench.report.comparison import Comparison, Phrase, Sentence, plain

Row = dict[Hashable, Any]


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
        aim = f"{metric_word(one.metric_name or 'metric')} {strategy['target_metric']:g}"
        if math.isfinite(row["reduction"]):
            yield _comparison(row, one, aim, cells, brief)
            continue
        epochs = counted(int(results.completed["epochs"].max()), "epoch")
        reached = f"{_runs(strategy)} and {_runs(other)} reach it within {epochs}" if other else row["note"]
        yield plain(f"To {aim}: {reached}.")
        for last in both[-1:]:
            yield _comparison(last, one, aim, cells, brief, f"At {last['workers']} workers, ")


def _cells_of(row: Row, one: Comparison, cells: pd.DataFrame) -> list[Row]:
    """Return the cells of strategy and baseline at the execution and worker count of `row`; empty ones if missing."""
    here = cells[(cells["execution"] == row["execution"]) & (cells["workers"] == row["workers"])]
    places = ((one.label, row["engine"]), (one.baseline, row["baseline_engine"]))
    found = [here[(here["label"] == label) & (here["engine"] == engine)] for label, engine in places]
    return [cell.to_dict("records")[0] if len(cell) else {} for cell in found]


def _comparison(row: Row, one: Comparison, aim: str, cells: pd.DataFrame, brief: bool, start: str = "") -> Sentence:
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
        Phrase(f" {than} {row['baseline']}"),
        Phrase(f" ({' instead of '.join(facts)}; {interval})", "detail"),
        Phrase("."),
    )


def _runs(cell: Row) -> str:
    """`4 of 5 runs of epoch_average`."""
    return f"{cell['n_reached']} of {counted(cell['n_aimed'], 'run')} of {cell['label']}"
