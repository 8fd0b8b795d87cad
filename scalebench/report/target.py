"""The second headline: the time to the target metric, where the study states one."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import pandas as pd

from scalebench.analysis import Results
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
    baseline = one.baseline.partition("(")[0]
    table, cells = target_ratios(results), times_to_target(results)
    own = table[(table["execution"] == one.execution) & (table["engine"] == one.engine) & (table["label"] == one.label)]
    own = own[(own["baseline"] == baseline) & ~own["oversubscribed"]]
    here = own[own["workers"] == one.workers]
    if here.empty:
        return
    row = here.to_dict("records")[0]
    word = f"{metric_word(one.metric_name or 'metric')} {_cell(cells, row, one.label)['target_metric']:g}"
    if math.isfinite(row["reduction"]):
        yield _sentence(row, one, cells, word, brief)
        return
    epochs = counted(int(results.completed["epochs"].max()), "epoch")
    strategy, other = _cell(cells, row, one.label), _cell(cells, row, one.baseline, str(row["baseline_engine"]))
    yield _unreached(strategy, other, word, epochs) if other else plain(f"To {word}: {row['note']}.")
    both = own[own["reduction"].notna() & (own["workers"] > 1)].sort_values("workers").to_dict("records")
    if both:
        last = both[-1]
        yield (Phrase(f"At {last['workers']} workers, "), *_sentence(last, one, cells, word, brief, within=True))


def _cell(cells: pd.DataFrame, row: Row, label: str, engine: str = "") -> Row:
    """Return the cell of `label` at the execution and worker count of `row`; empty if there is no such cell."""
    own = cells[(cells["execution"] == row["execution"]) & (cells["workers"] == row["workers"])]
    own = own[(own["label"] == label) & (own["engine"] == (engine or row["engine"]))]
    found: list[Row] = own.to_dict("records")
    return found[0] if found else {}


def _sentence(row: Row, one: Comparison, cells: pd.DataFrame, word: str, brief: bool, within: bool = False) -> Sentence:
    strategy, other = _cell(cells, row, one.label), _cell(cells, row, one.baseline, str(row["baseline_engine"]))
    low, high = row["reduction_low"], row["reduction_high"]
    change = f"{share(row['reduction'])} {'less' if row['reduction'] >= 0 else 'more'} time to {word}"
    if not math.isfinite(low):
        message = f"{one.label} took {change}"
    elif low <= 0 <= high and low < high:
        message = f"{'w' if within else 'W'}hether {one.label} reaches {word} sooner is not shown"
    else:
        message = f"{one.label} takes {change}"
    against = " against " if message.endswith("not shown") else " than "
    facts = f"{_course(row['time_to_target_s'], strategy)} instead of {_course(row['baseline_s'], other)}"
    interval = "no interval"
    if math.isfinite(low):
        interval = reduction_range(low, high)
        interval += "" if brief else f", {row['interval']} from {row['n']} runs of each"
    if counts := _counts(strategy, other):
        interval = f"Kaplan-Meier medians, as {counts} reached it"
    return (
        Phrase(message, "strong"),
        Phrase(f"{against}{row['baseline']}"),
        Phrase(f" ({facts}; {interval})", "detail"),
        Phrase("."),
    )


def _course(time: float, cell: Row) -> str:
    """`300 ms in 5 epochs`."""
    epochs = cell.get("epochs_to_target", math.nan)
    if not math.isfinite(epochs):
        return seconds(time)
    return f"{seconds(time)} in {epochs:g} epoch{'' if epochs == 1 else 's'}"


def _counts(*cells: Row) -> str:
    """Numbers of runs that reached the target, of the cells where some did not."""
    torn = [cell for cell in cells if cell and cell["n_reached"] < cell["n_aimed"]]
    return " and ".join(f"{cell['n_reached']} of {counted(cell['n_aimed'], 'run')} of {cell['label']}" for cell in torn)


def _unreached(strategy: Row, other: Row, word: str, epochs: str) -> Sentence:
    """The sentence for a worker count at which at most half of the runs of one or both reach the target."""
    never = [cell for cell in (strategy, other) if math.isinf(cell["time_to_target_s"])]
    runs = [f"{cell['label']} ({cell['n_reached']} of {counted(cell['n_aimed'], 'run')})" for cell in (strategy, other)]
    most = " in most runs" if any(cell["n_reached"] for cell in never) else ""
    if len(never) == 2:
        return (Phrase(f"Neither {runs[0]} nor {runs[1]} reaches {word}{most}", "strong"), Phrase(f" within {epochs}."))
    does = runs[0] if never[0] is other else runs[1]
    fails = runs[1] if never[0] is other else runs[0]
    return (Phrase(f"{fails} does not reach {word}{most}", "strong"), Phrase(f" within {epochs}, but {does} does."))
