"""A table that a terminal of any width can show.

Where there is room it is one table with a row per cell. Where there is not, what rows have in common becomes a heading
above them, and then columns are left out, the least important first, and named below: no number is ever cut short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

_GAP = 2


@dataclass(frozen=True)
class Column:
    """`shared`: rows below each other have it in common. Where room is short those of the largest `spare` are left out
    together, then the next; those of 0 never are."""

    name: str
    left: bool = False
    shared: bool = False
    spare: int = 0


@dataclass(frozen=True)
class Screen:
    """Title, columns, rows and notes; printed by rich in the form that fits."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Text]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The wide form, or the narrow one where that does not fit."""
        from rich.text import Text

        table = self._wide()
        fits = console.measure(table, options=options.update(max_width=10_000)).maximum <= options.max_width
        yield Text(self.title, style="italic")
        if self.rows:
            yield from [table] if fits else self._narrow(options.max_width)
        for note in self.notes:
            yield Text(note, style="dim")

    def _wide(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for column in self.columns:
            table.add_column(Text(column.name), justify="left" if column.left else "right", no_wrap=True)
        for n, (_, rows) in enumerate(groupby(self.rows, self._heading)):
            if n:
                table.add_section()
            for row in rows:
                table.add_row(*row)
        return table

    def _narrow(self, width: int) -> Iterator[RenderableType]:
        from rich.text import Text

        shown = [n for n, column in enumerate(self.columns) if not column.shared]
        widths = {n: max(len(self.columns[n].name), *(row[n].cell_len for row in self.rows)) for n in shown}
        dropped: list[int] = []
        while sum(widths[n] + _GAP for n in shown) > width and any(self.columns[n].spare for n in shown):
            most = max(self.columns[n].spare for n in shown)
            dropped += [n for n in shown if self.columns[n].spare == most]
            shown = [n for n in shown if n not in dropped]
        yield self._lines([[Text(self.columns[n].name, style="bold") for n in shown]], shown, widths)
        for heading, rows in groupby(self.rows, self._heading):
            yield Text(", ".join(heading), style="bold")
            yield self._lines([[row[n] for n in shown] for row in rows], shown, widths)
        if dropped:
            names = ", ".join(self.columns[n].name for n in sorted(dropped))
            yield Text(f"no room for: {names} (widen the terminal, or write to a file)")

    def _lines(self, rows: Sequence[Sequence[Text]], shown: Sequence[int], widths: dict[int, int]) -> Table:
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
        for n in shown:
            left = self.columns[n].left
            table.add_column(justify="left" if left else "right", min_width=widths[n], overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table

    def _heading(self, row: Sequence[Text]) -> tuple[str, ...]:
        return tuple(cell.plain for cell, column in zip(row, self.columns, strict=True) if column.shared)
