"""Tables for a terminal of any width.

Values that neighbouring rows share stand as headings above these rows. Where the room
is too small, columns are left out, the least important first, and named below the
table. No number is truncated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.text import Text

from scalebench.tables.table import Column, Entry, Table

_GAP = "  "


@dataclass(frozen=True)
class Screen:
    """A table as rich prints it, with as many columns as there is room for."""

    table: Table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Text]:
        """Yield the lines."""
        table = self.table
        rows = [[_as_text(cell) for cell in row] for row in table.rows]
        columns = [
            (n, column) for n, column in enumerate(table.columns) if not column.shared
        ]
        widths = {}
        for n, column in columns:
            cells = [row[n].cell_len for row in rows]
            widths[n] = max([len(column.name), *cells])
        shown = columns
        while sum(widths[n] + len(_GAP) for n, _ in shown) > options.max_width + len(
            _GAP
        ):
            most = max(column.spare for _, column in shown)
            if most == 0:
                break  # the columns that are left say what the table is about, and stay
            # All of one rank at once: half of a group of columns would mislead.
            shown = [(n, column) for n, column in shown if column.spare != most]
        if table.title:
            yield Text(table.title, style="italic")
        if rows:
            if any(column.over for _, column in shown):
                yield _over(shown, widths)
            yield _line(
                [Text(column.name, style="bold") for column in table.columns],
                shown,
                widths,
            )
        for heading, own in groupby(rows, self._heading):
            if heading:
                yield Text(heading, style="bold")
            yield from (_line(row, shown, widths) for row in own)
        if rows and (
            dropped := [column for n, column in columns if (n, column) not in shown]
        ):
            names = ", ".join(
                f"{column.over} {column.name}".strip() for column in dropped
            )
            yield Text(f"no room for: {names}: a wider terminal has all", style="dim")
        for note in table.notes:
            yield Text(note, style="dim")

    def _heading(self, row: Sequence[Text]) -> str:
        return ", ".join(
            cell.plain
            for cell, column in zip(row, self.table.columns, strict=True)
            if column.shared
        )


Shown = Sequence[tuple[int, Column[Any]]]


def _line(cells: Sequence[Text], shown: Shown, widths: dict[int, int]) -> Text:
    aligned = []
    for n, column in shown:
        cell = cells[n].copy()
        cell.align("left" if column.left else "right", widths[n])
        aligned.append(cell)
    line = Text(_GAP).join(aligned)
    # Trailing blanks would wrap in a narrow terminal.
    line.rstrip()
    return line


def _over(shown: Shown, widths: dict[int, int]) -> Text:
    """Return the headings of neighbouring columns, each centred over these."""
    parts = []
    for name, own in groupby(shown, lambda item: item[1].over):
        room = sum(widths[n] + len(_GAP) for n, _ in own) - len(_GAP)
        parts.append(name.center(room, "─" if name and room > len(name) + 1 else " "))
    return Text(_GAP.join(parts).rstrip(), style="bold")


def print_results(*parts: Table | str) -> None:
    """Print tables and lines to standard output; in a terminal as wide as that."""
    console = _standard_output()
    for part in parts:
        shown = Screen(part) if isinstance(part, Table) else part
        console.print(shown, highlight=False, markup=False)


def as_terminal(table: Table) -> str:
    """Return the lines that `print_results` prints."""
    console = _standard_output()
    with console.capture() as printed:
        console.print(Screen(table), highlight=False, markup=False)
    return printed.get()


def _standard_output() -> Console:
    console = Console()
    # In a file or a pipe nothing limits a line, and no column is left out.
    return console if console.is_terminal else Console(width=10_000)


def _as_text(cell: Entry) -> Text:
    return Text(cell.text) if isinstance(cell.text, str) else cell.text
