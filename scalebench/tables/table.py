"""What a table is: columns that say what they take from a row and how its numbers are written, and cells of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from scalebench.formatting import (
    EMPTY,
    digits,
    digits_as_known,
    digits_with_interval,
    is_reduction_supported,
    is_supported,
    memory_size,
    metric_with_interval,
    percent,
    percent_with_interval,
    seconds,
    seconds_with_interval,
    share,
    tell_marks,
)
from scalebench.measured import Measured

if TYPE_CHECKING:
    from rich.text import Text

R = TypeVar("R")
SECONDS = ((1.0, 1e3, "ms"), (1e4, 1.0, "s"), (math.inf, 1 / 3600, "h"))
_PERCENT = ((math.inf, 100.0, "%"),)


@dataclass(frozen=True)
class Form:
    """How the numbers of a column are written.

    On a screen each has the unit that suits it: `screen` writes a number and its
    bounds. In print all have the unit of the largest, from `units` (limit of the
    largest, factor to the unit, unit), and the digits that their intervals support;
    without an interval `decimals`, or three significant digits.
    """

    screen: Callable[[float, float, float], str]
    units: tuple[tuple[float, float, str], ...] = ((math.inf, 1.0, ""),)
    decimals: int | None = None
    supported: Callable[[float, float, float], bool] = is_supported

    @property
    def is_share(self) -> bool:
        """Return True for percentages, of which the whole is 1."""
        return self.units == _PERCENT

    def text(self, number: Measured, mark: str = "") -> str:
        """Return a number on a screen, with a mark behind it, or in place of infinity."""
        if mark and not math.isfinite(number.value):
            return mark
        return f"{self.screen(*number[:3])}{mark}"


def _always(*_: float) -> bool:
    return True


def _value(write: Callable[[float], str]) -> Callable[[float, float, float], str]:
    """Return a form of screens that leaves the interval out."""
    return lambda value, low, high: write(value)


def _times(value: float, low: float, high: float) -> str:
    return EMPTY if not math.isfinite(value) else digits_as_known(value, low, high, "x")


def _count(value: float) -> str:
    return EMPTY if math.isnan(value) else f"{int(value):,}"


def _passes(value: float) -> str:
    if value == math.inf:
        return "never"
    return EMPTY if math.isnan(value) else f"{value:g}"


TIME = Form(seconds_with_interval, SECONDS)  # 1.23 s [1.20, 1.26]
TIME_ALONE = Form(_value(seconds), SECONDS)  # the same without the interval on screens
RATIO = Form(digits_with_interval)  # 1.30 [1.21, 1.40]
SPEEDUP = Form(_times)  # 1.30x
NUMBER = Form(_value(digits))
# +54 % [51, 57]: 1 - ratio of times
SAVED = Form(percent_with_interval, _PERCENT, 1, is_reduction_supported)
CHANGE = Form(_value(percent), _PERCENT, 1, _always)  # +54 %
SHARE = Form(_value(share), _PERCENT, 1, _always)  # 54 %
# 0.907 [0.899, 0.915]
METRIC = Form(metric_with_interval, decimals=3, supported=_always)
METRIC_ALONE = Form(
    lambda value, low, high: metric_with_interval(value, math.nan, math.nan),
    METRIC.units,
    3,
    _always,
)
DIFFERENCE = Form(
    partial(metric_with_interval, signed=True), decimals=3, supported=_always
)
MEMORY = Form(_value(memory_size), ((math.inf, 2.0**-30, "GiB"),))  # 1.23 GiB, 45.6 MiB
COUNT = Form(_value(_count), decimals=0)
EPOCHS = Form(_value(_passes), decimals=1)
TWO_DIGITS = Form(lambda value, low, high: digits(value, 2))


class Entry(NamedTuple):
    """What a row has in a column: its text on a screen, the number behind it, and the mark that stands behind it."""

    text: str | Text
    number: Measured | None = None
    mark: str = ""

    @property
    def key(self) -> str:
        """What rows are sorted by: the number, or the text; empty for a number that is not known."""
        if self.number is None:
            return str(self.text)
        return "" if math.isnan(self.number.value) else repr(float(self.number.value))


def _no_mark(row: object) -> str:
    return ""


@dataclass(frozen=True)
class Column(Generic[R]):
    """A quantity of rows: its heading, what it takes from a row, how numbers are written, and its meaning.

    `of` gives a text, a number with a `form`, or both as an entry; `mark` gives what
    stands behind the number. Values of a `shared` column are headings above the rows
    that share them; `over` is a heading of neighbouring columns. On a narrow screen the
    columns with the largest `spare` are left out together, then the next; never those
    with 0.
    """

    name: str
    of: Callable[[R], str | Text | Measured | Entry]
    form: Form | None = None
    meaning: str = ""
    left: bool = False
    shared: bool = False
    spare: int = 0
    over: str = ""
    title: str = ""  # heading in print; default: the name
    mark: Callable[[R], str] = _no_mark

    def cell(self, row: R) -> Entry:
        """Return the cell of `row`."""
        value = self.of(row)
        # Rows without a number have a text, whatever the form of the column is.
        if isinstance(value, Measured):
            assert self.form is not None, self.name
            mark = self.mark(row)
            return Entry(self.form.text(value, mark), value, mark)
        return value if isinstance(value, Entry) else Entry(value)

    @property
    def is_text(self) -> bool:
        """Return True for names and words, which stand at the left of a column."""
        return self.left or self.shared

    @property
    def heading(self) -> str:
        """The heading in print, without a unit."""
        return self.title or f"{self.name[:1].upper()}{self.name[1:]}"


def fields(names: str) -> Callable[[Mapping[Any, Any]], Measured]:
    """Return what takes a number from a row that is a mapping: `"train_s"`, or `"train_s low_s high_s"`."""
    keys = names.split()

    def read(row: Mapping[Any, Any]) -> Measured:
        # None is what JSON and tables of objects have for a missing number.
        value, *bounds = (
            math.nan if row[key] is None else float(row[key]) for key in keys
        )
        low, high = bounds or (math.nan, math.nan)
        return Measured(value, low, high)

    return read


def text(name: str) -> Callable[[Mapping[Any, Any]], str]:
    """Return what takes a text from a row that is a mapping."""
    return lambda row: str(row[name])


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, with a title above and notes below."""

    title: str
    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()
    name: str = ""

    @classmethod
    def of(
        cls,
        title: str,
        columns: Sequence[Column[R]],
        rows: Iterable[R],
        notes: Iterable[str] = (),
        name: str = "",
    ) -> Table:
        """Return the table of `rows`."""
        cells = [[column.cell(row) for column in columns] for row in rows]
        return cls(title, list(columns), cells, list(notes), name)

    def with_texts(self, change: Callable[[str], str]) -> Table:
        """Return the table with `change` made to each text of a screen, such as one that removes secrets."""
        columns = [
            replace(column, name=change(column.name), meaning=change(column.meaning))
            for column in self.columns
        ]
        rows = [
            [entry._replace(text=change(str(entry.text))) for entry in row]
            for row in self.rows
        ]
        return replace(
            self,
            title=change(self.title),
            columns=columns,
            rows=rows,
            notes=[change(note) for note in self.notes],
        )

    def told(self) -> list[str]:
        """Return what stands for numbers that an interval leaves little of, as far as cells have it."""
        return tell_marks(str(cell.text) for row in self.rows for cell in row)
