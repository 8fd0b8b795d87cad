"""Tables of the report: the text of each cell, and the number that it is sorted by."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from scalebench.analysis.grouping import EXECUTIONS, strategy_rank
from scalebench.analysis.summary import OVERSUBSCRIBED
from scalebench.formatting import EMPTY, metric_word, seconds
from scalebench.records.progress import group_of


class HtmlColumn(NamedTuple):
    """Heading and meaning of a column; numeric columns are aligned to the right and sorted as numbers."""

    name: str
    meaning: str = ""
    numeric: bool = True


class Entry(NamedTuple):
    """Text and sort key of a cell; an empty key sorts last in both directions."""

    text: str
    key: str = ""


@dataclass(frozen=True)
class HtmlTable:
    """Rows under columns, with notes below."""

    name: str
    title: str
    columns: tuple[HtmlColumn, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()


STRATEGY = HtmlColumn("strategy", numeric=False)
EXECUTION = HtmlColumn("execution", f"how the number was obtained; {OVERSUBSCRIBED}: oversubscribed", numeric=False)
WORKERS = HtmlColumn("workers")


def text_entry(value: object) -> Entry:
    return Entry(str(value), str(value))


def number_entry(text: str, key: float) -> Entry:
    """Return a cell sorted by `key`; NaN: unknown."""
    return Entry(text, "" if math.isnan(key) else repr(float(key)))


def count_entry(value: Any) -> Entry:
    """Return a cell with a whole number, empty if missing."""
    return Entry(EMPTY) if pd.isna(value) else number_entry(f"{int(value):,}", int(value))


def execution_entry(execution: str, engine: str, oversubscribed: bool = False) -> Entry:
    """Return a cell with execution, engine and mark: `native mpi ×`."""
    where = group_of(execution, engine)
    return text_entry(f"{where} {OVERSUBSCRIBED}" if oversubscribed else where)


def seconds_entry(value: float) -> Entry:
    """Return a cell with a time."""
    return number_entry(seconds(value), value)


def place_entries(row: dict[Hashable, Any]) -> tuple[Entry, Entry, Entry]:
    """Return strategy, execution and worker count of a row of a table of cells."""
    execution = execution_entry(row["execution"], row["engine"], row["oversubscribed"])
    return text_entry(row["label"]), execution, count_entry(row["workers"])


def place_order(row: dict[Hashable, Any]) -> tuple[object, ...]:
    """Return the sort key of a row of a table of cells."""
    return row_order(row["execution"], row["label"], row["engine"], row["workers"])


def row_order(execution: str, label: str, engine: str, workers: int) -> tuple[object, ...]:
    """Return the sort key of a row, in the order of `cells`."""
    return EXECUTIONS.index(execution), strategy_rank(label), engine, workers


def metric_head(names: set[str]) -> str:
    return "/".join(sorted(metric_word(name) for name in names)) or "metric"
