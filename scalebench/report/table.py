"""Tables of the report: the text of each cell, and the number that it is sorted by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from scalebench.analysis.summary import OVERSUBSCRIBED
from scalebench.formatting import EMPTY
from scalebench.records.progress import group_of


class Column(NamedTuple):
    """Heading and meaning of a column; numeric columns are aligned to the right and sorted as numbers."""

    name: str
    meaning: str = ""
    numeric: bool = True


class Entry(NamedTuple):
    """Text and sort key of a cell; an empty key sorts last in both directions."""

    text: str
    key: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns, with notes below."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()


STRATEGY = Column("strategy", numeric=False)
EXECUTION = Column("execution", f"how the number was obtained; {OVERSUBSCRIBED}: oversubscribed", numeric=False)
WORKERS = Column("workers")


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
