"""Tables in print and in files: numbers in one unit a column, with the digits that hold; Markdown, CSV and JSON.

In print the numbers of a column have one unit and the digits that their intervals
support. Files have them unrounded: CSV in the unit of its heading, JSON in SI units.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scalebench.formatting import (
    BETWEEN,
    EMPTY,
    bounds_alone,
    in_cell,
    is_interval,
    reduction_bounds_alone,
)
from scalebench.tables.table import Column, Entry, Form, Table

_PLAIN_DIGITS = 3  # of a number without an interval
# interval worth its digits, of the number: simulated times can differ by rounding alone
_NARROWEST = 1e-4
_TWO_DIGITS_UP_TO = 354  # of the three leading digits of a half-width


@dataclass(frozen=True)
class Rounded:
    """A number and its bounds as text with equally many decimals; the bounds are empty without an interval.

    `mark` stands behind a number, such as a time to target that some runs did not
    reach.
    """

    value: str
    low: str = ""
    high: str = ""
    mark: str = ""

    @property
    def is_number(self) -> bool:
        """Return False for words in place of a number, such as `never` or `1 of 3`, or a dash."""
        return re.fullmatch(r"-?\d+(\.\d+)?", self.value) is not None

    @property
    def bounds(self) -> tuple[str, str]:
        """Both bounds, also those that stand in place of the number; empty without an interval."""
        low, between, high = self.value.partition(BETWEEN)
        return (low, high) if between else (self.low, self.high)

    def sides(self) -> tuple[str, str]:
        """Distances from the value down to the lower and up to the upper bound."""
        decimals = len(self.value.partition(".")[2])
        value, low, high = (float(text) for text in (self.value, self.low, self.high))
        return f"{value - low:.{decimals}f}", f"{high - value:.{decimals}f}"

    def in_brackets(self) -> str:
        """Return `1.23 [1.20, 1.26]`."""
        bounds = f" [{self.low}, {self.high}]" if self.low else ""
        return f"{self.value}{self.mark}{bounds}"


@dataclass(frozen=True)
class Print:
    """A table with its columns each in one unit, by a factor from that of its numbers, and its cells rounded."""

    heads: tuple[str, ...]
    cells: tuple[tuple[Rounded, ...], ...]
    columns: tuple[Column[Any], ...]
    factors: tuple[float, ...]

    @classmethod
    def of(cls, table: Table) -> Print:
        """Round the cells of `table`."""
        heads, columns, factors = [], [], []
        for place, column in enumerate(table.columns):
            own = [row[place] for row in table.rows]
            factor, unit = _unit(column.form, own) if column.form else (1.0, "")
            heads.append(f"{column.heading} ({unit})" if unit else column.heading)
            columns.append([rounded(cell, column.form, factor) for cell in own])
            factors.append(factor)
        return cls(
            tuple(heads),
            tuple(zip(*columns, strict=True)),
            tuple(table.columns),
            tuple(factors),
        )


def round_to_interval(
    value: float, low: float, high: float, decimals: int | None = None
) -> Rounded:
    """Round a number to two digits of its interval's half-width, one if that begins with 355 or more.

    Rule of the Particle Data Group, Review of Particle Physics, section 5.3. The
    distance to the nearer bound keeps one digit at least: 1.98 between 0.04 and 108 is
    2, not 0. Without an interval: `decimals`, or three significant digits.
    """
    if not math.isfinite(value):
        return Rounded("never" if value == math.inf else EMPTY)
    # Without an interval nothing says how many digits hold.
    if not is_interval(low, high):
        places = max(0, _places(value, _PLAIN_DIGITS)) if decimals is None else decimals
        return Rounded(_fixed(value, places))
    half = (high - low) / 2
    leading = round(half / 10 ** (math.floor(math.log10(half)) - 2))
    places = _places(half, 2 if leading <= _TWO_DIGITS_UP_TO or leading >= 950 else 1)
    # The shorter side of an interval that is not even needs a digit, too.
    if (nearer := min(value - low, high - value)) > 0:
        places = max(places, _places(nearer, 1))
    return Rounded(*(_fixed(number, places) for number in (value, low, high)))


def rounded(cell: Entry, form: Form | None, factor: float) -> Rounded:
    """Return the number of a cell in its unit, or its text where it has none."""
    if cell.number is None or form is None:
        return Rounded(str(cell.text))
    (value, low, high), mark = cell.number[:3], cell.mark
    if mark and not math.isfinite(value):
        return Rounded(mark)
    if not form.supported(value, low, high):
        if form.is_share:
            return Rounded(reduction_bounds_alone(low, high).removesuffix(" %"))
        return Rounded(bounds_alone(factor * low, factor * high))
    # Such an interval would ask for digits that nobody reads.
    if high - low < _NARROWEST * (1.0 if form.is_share else abs(value)):
        low = high = math.nan
    found = round_to_interval(
        factor * value, factor * low, factor * high, form.decimals
    )
    return replace(found, mark=mark)


def as_markdown(table: Table, label: str = "") -> str:
    """Return a table with title and notes below."""
    found = Print.of(table)
    rules = ["---" if column.is_text else "---:" for column in found.columns]
    rows = [[cell.in_brackets() for cell in row] for row in found.cells]
    lines = []
    for row in (found.heads, rules, *rows):
        # A bar would end the cell.
        cells = [cell.replace("|", r"\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    below = [sentence(text) for text in (table.title, *table.notes) if text]
    # A blank line ends the table.
    return "\n".join([*lines, "", " ".join(below), ""])


def as_csv(table: Table, label: str = "") -> str:
    """Return unrounded numbers, each with its bounds, and its mark, in columns of their own where any row has some.

    Bounds stand alone where a number is not supported by its interval, as in print.
    """
    # The digits of print decide what is supported; the numbers are the whole ones.
    printed = Print.of(table)
    bounded = []
    marked = []
    for place in range(len(printed.heads)):
        column = [row[place] for row in printed.cells]
        bounded.append(any(cell.bounds[0] for cell in column))
        marked.append(any(cell.mark for cell in column))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header: list[str] = []
    for head, has_bounds, has_marks in zip(printed.heads, bounded, marked, strict=True):
        header.append(head)
        if has_bounds:
            header += [f"{head} low", f"{head} high"]
        if has_marks:
            header.append(f"{head} mark")
    writer.writerow(header)
    for row, rounded_row in zip(table.rows, printed.cells, strict=True):
        cells: list[str] = []
        columns = zip(row, rounded_row, printed.factors, bounded, marked, strict=True)
        for cell, shown, factor, has_bounds, has_marks in columns:
            number = _unrounded(cell, shown, factor)
            cells.append(number.value)
            if has_bounds:
                cells += [number.low, number.high]
            if has_marks:
                cells.append(number.mark.strip())
        writer.writerow(cells)
    return text.getvalue()


def _unrounded(cell: Entry, shown: Rounded, factor: float) -> Rounded:
    """Return the numbers of a cell in its unit with all their digits, or its text for a cell of a file.

    The number is left out where its bounds stand alone in print, and bounds where it
    has none there.
    """
    if cell.number is None or not (shown.is_number or shown.bounds[0]):
        return replace(
            shown, value="" if shown.value == EMPTY else in_cell(shown.value)
        )
    # a product is exact to so many
    value, low, high = (f"{factor * number:.15g}" for number in cell.number[:3])
    has_bounds = bool(shown.bounds[0])
    return Rounded(
        value if shown.is_number else "",
        low if has_bounds else "",
        high if has_bounds else "",
        shown.mark,
    )


def as_json(table: Table, label: str = "") -> str:
    """Return title, notes and rows; a number is unrounded, in its SI unit, with its bounds where it has some."""
    content = {
        "title": table.title,
        "rows": records(table),
        "notes": list(table.notes),
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def records(table: Table) -> list[dict[str, Any]]:
    """Return the values of each row by column: unrounded numbers in SI units, their bounds where they have some."""
    rows = []
    for row in table.rows:
        named: dict[str, Any] = {}
        for column, cell in zip(table.columns, row, strict=True):
            key = f"{column.over} {column.name}".strip()
            if cell.number is None:
                named[key] = str(cell.text)
                continue
            value, low, high = cell.number[:3]
            named[key] = _finite(value)
            if is_interval(low, high):
                named |= {f"{key} low": low, f"{key} high": high}
            if cell.mark:
                named[f"{key} mark"] = cell.mark.strip()
        rows.append(named)
    return rows


def sentence(text: str) -> str:
    """Return `text` with a full stop, if it ends with no other mark."""
    return text if text.endswith((".", ":", ";")) else f"{text}."


def _unit(form: Form, cells: Sequence[Entry]) -> tuple[float, str]:
    """Return the factor to the unit that suits the largest number, and the unit."""
    known = [
        cell.number.value
        for cell in cells
        if cell.number is not None and math.isfinite(cell.number.value)
    ]
    longest = max(known, default=math.nan)
    return next(
        (factor, unit) for limit, factor, unit in form.units if not longest >= limit
    )


def _finite(value: float) -> float | str | None:
    """Return a number as JSON has it: infinity, a time that is never over, is a word."""
    if value == math.inf:
        return "never"
    return value if math.isfinite(value) else None


def _places(number: float, significant: int) -> int:
    """Return the decimals that show `significant` digits of a number; negative: to tens, hundreds."""
    if number == 0:
        return 0
    # first: 9.99 with two digits is 10, of another order
    rounded = float(f"{number:.{significant - 1}e}")
    return significant - 1 - math.floor(math.log10(abs(rounded)))


def _fixed(number: float, places: int) -> str:
    return f"{round(number, places) + 0.0:.{max(0, places)}f}"
