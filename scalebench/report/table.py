"""What a table of the report is: text for readers, and for each cell the number that it is sorted by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from scalebench.formatting import EMPTY

OVERSUBSCRIBED = "×"


class Column(NamedTuple):
    """A head, what it means, and whether numbers stand under it."""

    name: str
    meaning: str = ""
    numeric: bool = True


class Entry(NamedTuple):
    """What is read, and what is sorted by (empty: always last)."""

    text: str
    key: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns; `notes` are what has to be known to read them."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()


STRATEGY = Column("strategy", numeric=False)
EXECUTION = Column("execution", f"how the number was obtained; {OVERSUBSCRIBED}: oversubscribed", numeric=False)
WORKERS = Column("workers")


def text_entry(value: object) -> Entry:
    """Sorted as it reads."""
    return Entry(str(value), str(value))


def number_entry(text: str, key: float) -> Entry:
    """Sorted by `key`; NaN is not known."""
    return Entry(text, "" if math.isnan(key) else repr(float(key)))


def count_entry(value: Any) -> Entry:
    """A whole number, or nothing."""
    return Entry(EMPTY) if pd.isna(value) else number_entry(f"{int(value):,}", int(value))


def execution_entry(execution: str, engine: str, oversubscribed: bool = False) -> Entry:
    """`native mpi ×`: how a number was obtained, through what, and whether the machine could feed it."""
    where = execution if execution == engine else f"{execution} {engine}"
    return text_entry(f"{where} {OVERSUBSCRIBED}" if oversubscribed else where)
