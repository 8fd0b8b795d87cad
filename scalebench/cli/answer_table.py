"""The tables at the end of a study: one that fits a screen, and the full one with a row for every cell.

The first has strategies as rows and worker counts as columns. Its first section has the time of all epochs, a second
one, if the study states a target, time and epochs to the target. Below each time is the reduction against a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import pandas as pd
from rich.text import Text

from scalebench.analysis import Results, cells, ratios
from scalebench.analysis.grouping import EXECUTIONS
from scalebench.analysis.loading import CELL
from scalebench.analysis.native_check import PREFERRED_ENGINES
from scalebench.analysis.summary import summary_header, summary_notes, summary_rows, time_and_epochs
from scalebench.analysis.target_ratios import target_ratios
from scalebench.analysis.time_to_target import CENSORED
from scalebench.cli.terminal_table import TableColumn, TerminalTable
from scalebench.errors import UsageError
from scalebench.formatting import (
    DISTURBED,
    NOT_SHOWN,
    OVERSUBSCRIBED,
    counted,
    is_reduction_supported,
    marks,
    metric_word,
    percent,
    tell_marks,
    time_of_cell_alone,
)

BASELINES = ("allreduce", "horovod", "ddp", "serial")
_SPARE = ("speedup", "vs horovod", "vs ddp", "spread", "median")  # left out on a narrow terminal, from the last
_MARKS = {
    "(": "( ): the interval of the reduction holds zero, or there is none",
    **CENSORED,
}
Place = tuple[str, int]  # execution and workers of a column
Line = tuple[str, dict[Place, Text]]  # label and cells of a row


def answer_table(results: Results, against: Sequence[str] = ()) -> TerminalTable:
    """Return the table that fits a screen, with reductions against the baselines `against`, or the first that ran.

    Raises:
        UsageError: a baseline has no completed run.
    """
    table = _one_engine(cells(results))
    ran = set(results.completed["strategy"])
    if missing := [name for name in against if name not in ran]:
        raise UsageError(f"--against {missing[0]}: the study has no completed run of {missing[0]}")
    baselines = list(against) or [name for name in BASELINES if name in ran][:1]
    epochs = counted(int(results.completed["epochs"].max()), "epoch") if ran else "all epochs"
    sections = {f"time of {epochs}": _section(table, ratios(results), baselines, _time)}
    if table["target_metric"].notna().any():
        metric = metric_word(str(table["metric_name"].dropna().iloc[-1]))
        aim = f"time/epochs to {metric} {table['target_metric'].dropna().iloc[-1]:g}"
        sections[aim] = _section(table, target_ratios(results), baselines, _target)
    found = {(str(kind), int(n)) for kind, n in table[["execution", "workers"]].itertuples(index=False)}
    places = sorted(found, key=lambda at: (EXECUTIONS.index(at[0]), at[1]))
    columns = [TableColumn("", shared=True), TableColumn("workers", left=True)]
    columns += [TableColumn(str(at[1]), spare=_spare(at, places), over=at[0]) for at in places]
    rows: list[list[str | Text]] = [
        [heading, label, *(texts.get(at, "") for at in places)]
        for heading, lines in sections.items()
        for label, texts in lines
    ]
    texts = [str(cell) for row in rows for cell in row[2:]]
    notes = [text for mark, text in _MARKS.items() if any(mark in cell for cell in texts)] + tell_marks(texts)
    return TerminalTable(_title(results), columns, rows, [*notes, *summary_notes(results, brief=True)])


def full_table(results: Results) -> TerminalTable:
    """Return the table with a row for every cell, with its notes."""
    metrics = "/".join(sorted(results.completed["metric_name"].dropna().unique())) or "metric"
    columns = [
        TableColumn(
            metrics if name == "metric" else name,
            shared=name in ("strategy", "execution"),
            spare=1 + _SPARE.index(name) if name in _SPARE else 0,
        )
        for name in summary_header(results)
    ]
    rows = []
    for label, workers, *numbers, execution in summary_rows(results):
        plain = execution.rstrip(f" {OVERSUBSCRIBED}{DISTURBED}")
        rows.append([label, f"{workers}{execution.removeprefix(plain)}", *numbers, plain])
    marked = tell_marks(cell for row in rows for cell in row)
    return TerminalTable(_title(results), columns, rows, marked + summary_notes(results))


def _title(results: Results) -> str:
    return f"{results.runs['study'].iloc[-1]}: {counted(int(results.runs['repetition'].nunique()), 'repetition')}"


def _one_engine(table: pd.DataFrame) -> pd.DataFrame:
    """The cells of the preferred engine, where a strategy ran on several."""
    order = ["virtual", *PREFERRED_ENGINES]
    first = table.assign(rank=table["engine"].map(order.index)).sort_values("rank", kind="stable")
    kept = first.drop_duplicates(["execution", "label", "workers"]).index
    return table[table.index.isin(kept)]


def _spare(place: Place, places: Sequence[Place]) -> int:
    """Return how early a column may be left out: every second count first, then the others, never the largest."""
    counts = [n for kind, n in places if kind == place[0]]
    at = counts.index(place[1])
    return 0 if at == len(counts) - 1 else 1 if at == 0 else 2 + at % 2


def _section(
    table: pd.DataFrame, compared: pd.DataFrame, baselines: Sequence[str], text: Callable[[dict[Hashable, Any]], Text]
) -> Iterator[Line]:
    """A line of times for each strategy, and one of reductions against each baseline that it is compared with."""
    for label, own in table.groupby("label", sort=False):
        yield str(label), {(cell["execution"], cell["workers"]): text(cell) for cell in own.to_dict("records")}
        found = compared[compared["label"] == label].merge(own[CELL], on=CELL)
        for baseline in baselines:
            saved = found[(found["baseline"] == baseline) & found["reduction"].notna()]
            if len(saved):
                reductions = {(one["execution"], one["workers"]): _saved(one) for one in saved.to_dict("records")}
                yield f" vs {baseline}", reductions


def _time(cell: dict[Hashable, Any]) -> Text:
    signs = marks(cell)
    text = time_of_cell_alone(cell)
    return Text(f"{text}{signs}", style="" if text != NOT_SHOWN and not signs else "dim")


def _target(cell: dict[Hashable, Any]) -> Text:
    style = "yellow" if math.isinf(cell["time_to_target_s"]) else "dim" if marks(cell) else ""
    return Text(time_and_epochs(cell), style=style)


def _saved(one: dict[Hashable, Any]) -> Text:
    if not is_reduction_supported(*(one[f"reduction{end}"] for end in ("", "_low", "_high"))):
        return Text(NOT_SHOWN, style="dim")
    text = percent(one["reduction"])
    if one["reduction_low"] > 0 or one["reduction_high"] < 0:
        return Text(text, style="green" if one["reduction"] > 0 else "red")
    exact = one["reduction_low"] == one["reduction_high"] == one["reduction"]
    return Text(text if exact else f"({text})", style="dim")
