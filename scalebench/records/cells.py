"""Values to CSV cells and back: numbers stay exact, text stays text even in a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

_FORMULA = re.compile(r"'*[=+\-@]")
_ESCAPED = re.compile(r"'+[=+\-@]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


def to_cell(value: object) -> str:
    """None -> empty; bool -> true/false; numbers to their shortest exact form; text on one line and harmless.

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
    """The text that `to_cell` wrote."""
    return cell[1:] if _ESCAPED.match(cell) else cell


def to_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """CSV lines, one per row; no cell holds a line break, so a line is a row."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([to_cell(value) for value in row] for row in rows)
    return buffer.getvalue().encode()


def from_line(line: bytes) -> list[str]:
    """The cells of one line, none if it cannot be read; damaged bytes become replacement characters."""
    text = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []
