"""Tables of the report: columns that turn a row into a text, and into the number that it is sorted by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from scalebench.analysis.grouping import EXECUTIONS, strategy_rank
from scalebench.formatting import (
    DISTURBED,
    EMPTY,
    OVERSUBSCRIBED,
    marks,
    metric_word,
    seconds,
    tell_marks,
)
from scalebench.records.progress import group_of

Row = Mapping[Any, Any]


class HtmlColumn(NamedTuple):
    """Heading, values of a row (names separated by spaces), the text that `form` makes of them, and meaning.

    Numeric columns are aligned to the right and sorted by their first value, others by their text.
    """

    name: str
    values: str
    form: Callable[..., str] = str
    meaning: str = ""
    numeric: bool = True

    def entry(self, row: Row) -> Entry:
        """Return the cell of `row`."""
        values = [row[name] for name in self.values.split()]
        text = self.form(*values)
        if not self.numeric:
            return Entry(text, text)
        return Entry(text, "" if pd.isna(values[0]) else repr(float(values[0])))


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
    notes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, title: str, columns: Sequence[HtmlColumn], rows: Iterable[Row], *notes: str) -> HtmlTable:
        """Return the table of `rows`, without empty notes, and with those on cells whose interval leaves little."""
        cells = tuple(tuple(column.entry(row) for column in columns) for row in rows)
        below = (*notes, *(f"{told}." for told in tell_marks(entry.text for own in cells for entry in own)))
        return cls(name, title, tuple(columns), cells, tuple(filter(None, below)))


def count(value: Any) -> str:
    """Return a whole number as text."""
    return EMPTY if pd.isna(value) else f"{int(value):,}"


def _where(execution: str, engine: str, oversubscribed: bool, disturbed: bool) -> str:
    """Return execution, engine and marks: `native mpi ×`."""
    return f"{group_of(execution, engine)}{marks({'oversubscribed': oversubscribed, 'disturbed': disturbed})}"


STRATEGY = HtmlColumn("strategy", "label", numeric=False)
EXECUTION = HtmlColumn(
    "execution",
    "execution engine oversubscribed disturbed",
    _where,
    f"how the number was obtained; {OVERSUBSCRIBED}: oversubscribed, {DISTURBED}: disturbed by other programs",
    numeric=False,
)
WORKERS = HtmlColumn("workers", "workers", count)
TIME = HtmlColumn("time", "train_s", seconds, "geometric mean of the runs that strategy and baseline share")


def place_order(row: Row) -> tuple[object, ...]:
    """Return the sort key of a row, in the order of `cells`."""
    return EXECUTIONS.index(row["execution"]), strategy_rank(row["label"]), row["engine"], row["workers"]


def metric_head(names: set[str]) -> str:
    return "/".join(sorted(metric_word(name) for name in names if name)) or "metric"
