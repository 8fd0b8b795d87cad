"""The table below the answer of a study: rows strategies, columns worker counts, so small that it fits a screen.

A first section has the time of all epochs, a second one, if the study states a target, time and epochs to the target.
Below each time is the reduction against a baseline. Worker counts without room are named below the table.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from scalebench.analysis import Results, cells, ratios
from scalebench.analysis.grouping import EXECUTIONS
from scalebench.analysis.loading import CELL
from scalebench.analysis.native_check import PREFERRED_ENGINES
from scalebench.analysis.summary import OVERSUBSCRIBED, summary_notes, time_and_epochs
from scalebench.analysis.target_ratios import target_ratios
from scalebench.errors import UsageError
from scalebench.formatting import counted, metric_word, percent, seconds

BASELINES = ("allreduce", "horovod", "ddp", "serial")
_GAP, _LONGEST = 2, 24  # spaces between columns, letters of a label beside its times
Place = tuple[str, int]  # execution and workers of a column
Line = tuple[str, dict[Place, "Text"]]  # label and cells of a row; no cells: a heading


@dataclass(frozen=True)
class AnswerTable:
    """Title, columns, lines and notes; rendered by rich with as many columns as there is room for."""

    title: str
    places: Sequence[Place]
    lines: Sequence[Line]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the lines; the largest worker count of each execution is always among the columns."""
        shown, widths = list(self.places), self._widths()
        names = max([7, *(len(label) for label, texts in self.lines if texts and len(label) <= _LONGEST)])
        while len(shown) > 1 and names + sum(widths[at] + _GAP for at in shown) > options.max_width:
            shown.remove(_least_missed(shown))
        yield Text(self.title, style="italic")
        yield Text("".ljust(names) + "".join(_executions(shown, widths)), style="bold")
        counts = "".join(str(workers).rjust(widths[kind, workers] + _GAP) for kind, workers in shown)
        yield Text("workers".ljust(names) + counts, style="bold")
        for label, texts in self.lines:
            if not texts or len(label) > _LONGEST:
                yield Text(label, style="" if texts else "bold")
            if texts:
                row = Text("" if len(label) > _LONGEST else label).copy()
                row.pad_right(names - row.cell_len)
                for at in shown:
                    cell = texts.get(at, Text())
                    row.append(" " * (widths[at] + _GAP - cell.cell_len)).append_text(cell)
                yield row
        if hidden := [at for at in self.places if at not in shown]:
            kinds = dict.fromkeys(kind for kind, _ in hidden)
            named = (f"{', '.join(str(n) for k, n in hidden if k == kind)} workers ({kind})" for kind in kinds)
            yield Text(f"no room for {' and '.join(named)}: --full has all", style="dim")
        for note in self.notes:
            yield Text(note, style="dim")

    def _widths(self) -> dict[Place, int]:
        texts = {at: [texts[at].cell_len for _, texts in self.lines if at in texts] for at in self.places}
        return {at: max([len(str(at[1])), *found]) for at, found in texts.items()}


def _executions(shown: Sequence[Place], widths: dict[Place, int]) -> Iterator[str]:
    """Each execution, centred over its columns."""
    for kind in dict.fromkeys(kind for kind, _ in shown):
        room = sum(widths[at] + _GAP for at in shown if at[0] == kind)
        yield " " * _GAP + kind.center(room - _GAP, "─" if room > len(kind) + 2 * _GAP else " ")


def _least_missed(shown: Sequence[Place]) -> Place:
    """The place with the closest neighbours, on the scale of logs, of the execution with the most columns."""
    kinds = [kind for kind, _ in shown]
    most = max(dict.fromkeys(kinds), key=kinds.count)
    counts = [n for kind, n in shown if kind == most]
    if len(counts) < 3:
        return (most, counts[0])
    gaps = {n: math.log(counts[i + 2] / counts[i]) for i, n in enumerate(counts[1:-1])}
    return (most, min(gaps, key=lambda n: gaps[n]))


def default_baseline(results: Results) -> list[str]:
    """The baseline whose reductions are shown where none is asked for."""
    ran = set(results.completed["strategy"])
    return [name for name in BASELINES if name in ran][:1]


def answer_table(results: Results, against: Sequence[str] = ()) -> AnswerTable:
    """Return the table of a study, with reductions against the baselines `against`.

    Raises:
        UsageError: a baseline has no completed run.
    """
    table = _one_engine(cells(results))
    ran = set(results.completed["strategy"])
    if missing := [name for name in against if name not in ran]:
        raise UsageError(f"--against {missing[0]}: the study has no completed run of {missing[0]}")
    baselines = list(against) or default_baseline(results)
    lines = [(f"time of {_epochs(results)}", {}), *_section(table, ratios(results), baselines, _time)]
    if table["target_metric"].notna().any():
        metric = metric_word(str(table["metric_name"].dropna().iloc[-1]))
        lines.append((f"time/epochs to {metric} {table['target_metric'].dropna().iloc[-1]:g}", {}))
        lines += _section(table, target_ratios(results), baselines, _target)
    found = {(str(kind), int(n)) for kind, n in table[["execution", "workers"]].itertuples(index=False)}
    places = sorted(found, key=lambda at: (EXECUTIONS.index(at[0]), at[1]))
    texts = " ".join(cell.plain for _, row in lines for cell in row.values())
    notes = [text for mark, text in _MARKS.items() if mark in texts]
    title = f"{results.runs['study'].iloc[-1]}: {counted(int(results.runs['repetition'].nunique()), 'repetition')}"
    return AnswerTable(title, places, lines, [*notes, *summary_notes(results, brief=True)])


_MARKS = {
    "(": "( ): the interval of the reduction holds zero, or there is none",
    "*": "*: not every run reached the target; the median counts those as longer (Kaplan-Meier)",
    " of ": "1 of 3: so few of the runs reached the target that their median is unknown",
}


def _one_engine(table: pd.DataFrame) -> pd.DataFrame:
    """The cells of the preferred engine, where a strategy ran on several."""
    order = ["virtual", *PREFERRED_ENGINES]
    first = table.assign(rank=table["engine"].map(order.index)).sort_values("rank", kind="stable")
    kept = first.drop_duplicates(["execution", "label", "workers"]).index
    return table[table.index.isin(kept)]


def _section(table: pd.DataFrame, compared: pd.DataFrame, baselines: Sequence[str], text: Any) -> Iterator[Line]:
    """A line of times for each strategy, and one of reductions against each baseline that it is compared with."""
    for label, own in table.groupby("label", sort=False):
        row = {(cell["execution"], cell["workers"]): text(cell) for cell in own.to_dict("records")}
        yield str(label), row
        found = compared[compared["label"] == label].merge(own[CELL], on=CELL)
        for baseline in baselines:
            saved = found[(found["baseline"] == baseline) & found["reduction"].notna()]
            if len(saved):
                reductions = {(one["execution"], one["workers"]): _saved(one) for one in saved.to_dict("records")}
                yield f" vs {baseline}", reductions


def _epochs(results: Results) -> str:
    return counted(int(results.completed["epochs"].max()), "epoch") if len(results.completed) else "all epochs"


def _time(cell: dict[Hashable, Any]) -> Text:
    crowded = bool(cell["oversubscribed"])
    return Text(f"{seconds(cell['train_s'])}{f' {OVERSUBSCRIBED}' * crowded}", style="dim" if crowded else "")


def _target(cell: dict[Hashable, Any]) -> Text:
    style = "yellow" if math.isinf(cell["time_to_target_s"]) else "dim" if cell["oversubscribed"] else ""
    return Text(time_and_epochs(cell), style=style)


def _saved(one: dict[Hashable, Any]) -> Text:
    text = percent(one["reduction"])
    if one["reduction_low"] > 0 or one["reduction_high"] < 0:
        return Text(text, style="green" if one["reduction"] > 0 else "red")
    exact = one["reduction_low"] == one["reduction_high"] == one["reduction"]
    return Text(text if exact else f"({text})", style="dim")
