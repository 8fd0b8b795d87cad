"""Tables: a quantity is a column, written down once; each medium writes the same columns in its own way."""

from collections.abc import Callable

from scalebench.tables.html import as_html
from scalebench.tables.latex import as_latex
from scalebench.tables.printed import as_csv, as_json, as_markdown, records
from scalebench.tables.table import Column, Entry, Form, Table


def _as_terminal(table: Table, label: str) -> str:
    from scalebench.tables.screen import as_terminal  # rich, which programs do without

    return as_terminal(table)


# what a table is written as: by a table, and a label to refer to it
FORMATS: dict[str, Callable[[Table, str], str]] = {
    "terminal": _as_terminal,
    "html": as_html,
    "latex": as_latex,
    "markdown": as_markdown,
    "csv": as_csv,
    "json": as_json,
}


def render(table: Table, to: str, label: str = "") -> str:
    """Return `table` in one of FORMATS; in LaTeX and HTML with a `label`."""
    return FORMATS[to](table, label)


__all__ = ["FORMATS", "Column", "Entry", "Form", "Table", "records", "render"]
