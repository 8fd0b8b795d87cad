"""Conversion of values to CSV cells and back: numbers are exact, text stays text in a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

_FORMULA = re.compile(r"'*[=+\-@]")
_ESCAPED = re.compile(r"'+[=+\-@]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


def to_cell(value: object) -> str:
    """Return None as empty text, booleans as true/false, numbers in their shortest exact form, text on one line.

    Text that starts like a formula (`=`, `+`, `-`, `@`) is preceded by an apostrophe.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = _CONTROL.sub(" ", str(value)).strip()
    return f"'{text}" if _FORMULA.match(text) else text


def to_text(cell: str) -> str:
    """Return the text that `to_cell` converted to `cell`."""
    return cell[1:] if _ESCAPED.match(cell) else cell


def to_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Return CSV lines, one per row; no cell contains a line break."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([to_cell(value) for value in row] for row in rows)
    return buffer.getvalue().encode()


def from_line(line: bytes) -> list[str]:
    """Return the cells of one line, empty if it cannot be parsed; damaged bytes become replacement characters."""
    text = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []
