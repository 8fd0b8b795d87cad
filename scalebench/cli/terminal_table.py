"""Tables for a terminal of any width.

Values that neighbouring rows share stand as headings above these rows. Where the room is too small, columns are left
out, the least important first, and named below the table. No number is truncated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from rich.console import Console, ConsoleOptions
from rich.text import Text

_GAP = "  "


class TableColumn(NamedTuple):
    """A column; the values of a `shared` one are headings, and `over` is a heading of neighbouring columns.

    The columns with the largest `spare` are left out together, then the next; never those with 0.
    """

    name: str
    left: bool = False
    shared: bool = False
    spare: int = 0
    over: str = ""


@dataclass(frozen=True)
class TerminalTable:
    """Title, columns, rows and notes, rendered by rich with as many columns as there is room for."""

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[str | Text]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines."""
        rows = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        columns = [(n, column) for n, column in enumerate(self.columns) if not column.shared]
        widths = {n: max([len(column.name), *(row[n].cell_len for row in rows)]) for n, column in columns}
        shown = columns
        while sum(widths[n] + len(_GAP) for n, _ in shown) > options.max_width + len(_GAP):
            if (most := max(column.spare for _, column in shown)) == 0:
                break
            shown = [(n, column) for n, column in shown if column.spare != most]
        if self.title:
            yield Text(self.title, style="italic")
        if rows:
            if any(column.over for _, column in shown):
                yield _over(shown, widths)
            yield _line([Text(column.name, style="bold") for column in self.columns], shown, widths)
        for heading, own in groupby(rows, self._heading):
            if heading:
                yield Text(heading, style="bold")
            yield from (_line(row, shown, widths) for row in own)
        if rows and (dropped := [column for n, column in columns if (n, column) not in shown]):
            names = ", ".join(f"{column.over} {column.name}".strip() for column in dropped)
            yield Text(f"no room for: {names}: a wider terminal has all", style="dim")
        for note in self.notes:
            yield Text(note, style="dim")

    def _heading(self, row: Sequence[Text]) -> str:
        return ", ".join(cell.plain for cell, column in zip(row, self.columns, strict=True) if column.shared)


Shown = Sequence[tuple[int, TableColumn]]


def _line(cells: Sequence[Text], shown: Shown, widths: dict[int, int]) -> Text:
    aligned = []
    for n, column in shown:
        cell = cells[n].copy()
        cell.align("left" if column.left else "right", widths[n])
        aligned.append(cell)
    line = Text(_GAP).join(aligned)
    line.rstrip()
    return line


def _over(shown: Shown, widths: dict[int, int]) -> Text:
    """Return the headings of neighbouring columns, each centred over these."""
    parts = []
    for name, own in groupby(shown, lambda item: item[1].over):
        room = sum(widths[n] + len(_GAP) for n, _ in own) - len(_GAP)
        parts.append(name.center(room, "─" if name and room > len(name) + 1 else " "))
    return Text(_GAP.join(parts).rstrip(), style="bold")


def print_results(*parts: TerminalTable | str) -> None:
    """Print tables and lines to standard output; in a terminal as wide as that."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    for part in parts:
        console.print(part, highlight=False, markup=False)
