"""Tables for a terminal of any width, and the summary at the end of a study as such a table.

A wide terminal shows one table with a row per cell. A narrow one shows the shared values as headings above their rows,
then leaves columns out, the least important first, and names them below the table. No number is truncated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from scalebench.analysis import Results

_GAP = 2
_SHARED = ("strategy", "execution")  # columns of the summary
_SPARE = ("speedup", "vs horovod", "vs ddp", "spread", "median")  # left out on a narrow terminal, from the last


@dataclass(frozen=True)
class TableColumn:
    """A column; a `shared` one becomes a heading in the narrow form.

    In the narrow form the columns with the largest `spare` are left out together, then the next; never those with 0.
    """

    name: str
    left: bool = False
    shared: bool = False
    spare: int = 0


@dataclass(frozen=True)
class TerminalTable:
    """Title, columns, rows and notes, rendered by rich in the wide or the narrow form."""

    title: str
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[Text]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the wide form if it fits, else the narrow one."""
        table = self._wide()
        fits = console.measure(table, options=options.update(max_width=10_000)).maximum <= options.max_width
        yield Text(self.title, style="italic")
        if self.rows:
            yield from [table] if fits else self._narrow(options.max_width)
        for note in self.notes:
            yield Text(note, style="dim")

    def _wide(self) -> Table:
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
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
        for n in shown:
            left = self.columns[n].left
            table.add_column(justify="left" if left else "right", min_width=widths[n], overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table

    def _heading(self, row: Sequence[Text]) -> tuple[str, ...]:
        return tuple(cell.plain for cell, column in zip(row, self.columns, strict=True) if column.shared)


def print_results(table: RenderableType | None, lines: Iterable[str] = ()) -> None:
    """Print a table and lines to standard output, wrapped by words in a terminal only."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    if table is not None:
        console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def summary_table(results: Results) -> TerminalTable:
    """The table at the end of a study, with its notes."""
    from scalebench.analysis.summary import OVERSUBSCRIBED, summary_header, summary_notes, summary_rows
    from scalebench.formatting import counted

    metrics = "/".join(sorted(results.completed["metric_name"].dropna().unique())) or "metric"
    columns = [
        TableColumn(
            metrics if name == "metric" else name,
            left=name in _SHARED,
            shared=name in _SHARED,
            spare=1 + _SPARE.index(name) if name in _SPARE else 0,
        )
        for name in summary_header(results)
    ]
    rows = []
    for label, workers, *numbers, execution in summary_rows(results):
        mark = execution.removeprefix(plain := execution.removesuffix(f" {OVERSUBSCRIBED}"))
        rows.append([Text(cell) for cell in (label, workers + mark, *numbers, plain)])
    repetitions = int(results.runs["repetition"].nunique())
    title = f"{results.runs['study'].iloc[-1]}: {counted(repetitions, 'repetition')}"
    return TerminalTable(title, columns, rows, summary_notes(results))
