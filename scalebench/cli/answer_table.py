"""The table at the end of a study, which fits a screen.

It has strategies as rows, in a study at several batches each with its batch, and worker counts as columns. Its first
section has the time of all epochs, a second one time and epochs to the target or, if the study states none, the metric.
Below each time is the reduction against a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
from rich.text import Text

from scalebench.analysis import Results, cells, ratios
from scalebench.analysis.native_check import PREFERRED_ENGINES
from scalebench.analysis.summary import summary_notes, time_and_epochs, title_of
from scalebench.analysis.target import CENSORED, target_ratios
from scalebench.errors import UsageError
from scalebench.formatting import (
    BETWEEN,
    counted,
    is_reduction_supported,
    marks,
    metric_with_interval,
    metric_word,
    percent,
    reduction_bounds_alone,
    time_of_cell_alone,
)
from scalebench.study.cell import BATCH, CELL, EXECUTIONS, batch_in_words
from scalebench.study.choices import BASELINES
from scalebench.tables import Column, Table

_MARKS = {
    "(": "( ): the interval of the reduction holds zero, or there is none",
    **CENSORED,
}
_POINT = ["execution", "label", "workers"]  # of one engine
Place = tuple[str, int]  # execution and workers of a column
Line = tuple[str, str, dict[Place, Text]]  # heading, label and cells of a row


def answer_table(results: Results, against: Sequence[str] = ()) -> Table:
    """Return the table that fits a screen, with reductions against the baselines `against`, or the first that ran.

    Raises:
        UsageError: a baseline has no completed run.
    """
    table = _by_line(_one_engine(cells(results)))
    ran = set(results.completed["strategy"])
    if missing := [name for name in against if name not in ran]:
        raise UsageError(f"--against {missing[0]}: the study has no completed run of {missing[0]}")
    baselines = list(against) or [name for name in (*BASELINES, "serial") if name in ran][:1]
    epochs = counted(int(results.completed["epochs"].max()), "epoch") if ran else "all epochs"
    sections = {f"time of {epochs}": _section(table, ratios(results), baselines, _time)}
    metrics = [metric_word(str(name)) for name in table["metric_name"].dropna().unique()]
    if table["target_metric"].notna().any():
        metric = metrics[-1]
        aim = f"time/epochs to {metric} {table['target_metric'].dropna().iloc[-1]:g}"
        sections[aim] = _section(table, target_ratios(results), baselines, _target)
    elif metrics:
        sections[f"test {'/'.join(metrics)}"] = _section(table, ratios(results), (), _metric)
    found = {(str(kind), int(n)) for kind, n in table[["execution", "workers"]].itertuples(index=False)}
    places = sorted(found, key=lambda at: (EXECUTIONS.index(at[0]), at[1]))
    lines = [(heading, label, texts) for heading, own in sections.items() for label, texts in own]
    columns = [
        Column[Line]("", lambda line: line[0], shared=True),
        Column[Line]("workers", lambda line: line[1], left=True),
        *(Column[Line](str(at[1]), partial(_cell, at), spare=_spare(at, places), over=at[0]) for at in places),
    ]
    shown = Table.of(title_of(results), columns, lines)
    texts = [str(text) for *_, own in lines for text in own.values()]
    notes = [text for mark, text in _MARKS.items() if any(mark in cell for cell in texts)] + shown.told()
    return replace(shown, notes=[*notes, *summary_notes(results, brief=True)])


def _cell(at: Place, line: Line) -> Text | str:
    return line[2].get(at, "")


def _one_engine(table: pd.DataFrame) -> pd.DataFrame:
    """The cells of the preferred engine, where a strategy ran on several."""
    order = ["virtual", *PREFERRED_ENGINES]
    first = table.assign(rank=table["engine"].map(order.index)).sort_values("rank", kind="stable")
    kept = first.drop_duplicates([*_POINT, *BATCH]).index
    return table[table.index.isin(kept)]


def _by_line(table: pd.DataFrame) -> pd.DataFrame:
    """The cells with the label of their `line`: the strategy, and its batch where it ran at several at one point."""
    several = table["label"].isin(table.loc[table.duplicated(_POINT), "label"])
    sizes = table["batch_per_worker"].where(table["batch_policy"] == "per_worker", table["batch_global"])
    batches = map(batch_in_words, table["batch_policy"], sizes)
    lines = zip(table["label"], batches, several, strict=True)
    return table.assign(line=[f"{label}, {batch}" if many else label for label, batch, many in lines])


def _spare(place: Place, places: Sequence[Place]) -> int:
    """Return how early a column may be left out: every second count first, then the others, never the largest."""
    counts = [n for kind, n in places if kind == place[0]]
    at = counts.index(place[1])
    return 0 if at == len(counts) - 1 else 1 if at == 0 else 2 + at % 2


def _section(
    table: pd.DataFrame, compared: pd.DataFrame, baselines: Sequence[str], text: Callable[[dict[Hashable, Any]], Text]
) -> Iterator[tuple[str, dict[Place, Text]]]:
    """A line of times for each strategy, and one of reductions against each baseline that it is compared with."""
    for line, own in table.groupby("line", sort=False):
        yield str(line), {(cell["execution"], cell["workers"]): text(cell) for cell in own.to_dict("records")}
        found = compared.merge(own[CELL], on=CELL)
        for baseline in baselines:
            saved = found[(found["baseline"] == baseline) & found["reduction"].notna()]
            if len(saved):
                reductions = {(one["execution"], one["workers"]): _saved(one) for one in saved.to_dict("records")}
                yield f" vs {baseline}", reductions


def _time(cell: dict[Hashable, Any]) -> Text:
    signs = marks(cell)
    text = time_of_cell_alone(cell)
    return Text(f"{text}{signs}", style="dim" if BETWEEN in text or signs else "")


def _target(cell: dict[Hashable, Any]) -> Text:
    style = "yellow" if math.isinf(cell["time_to_target_s"]) else "dim" if marks(cell) else ""
    return Text(time_and_epochs(cell), style=style)


def _metric(cell: dict[Hashable, Any]) -> Text:
    return Text(metric_with_interval(cell["metric"], math.nan, math.nan))


def _saved(one: dict[Hashable, Any]) -> Text:
    low, high = one["reduction_low"], one["reduction_high"]
    if not is_reduction_supported(one["reduction"], low, high):
        return Text(reduction_bounds_alone(low, high), style="dim")
    text = percent(one["reduction"])
    if low > 0 or high < 0:
        return Text(text, style="green" if one["reduction"] > 0 else "red")
    exact = low == high == one["reduction"]
    return Text(text if exact else f"({text})", style="dim")
