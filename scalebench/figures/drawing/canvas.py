"""A figure of panels, legend and caption, one below the other, with the drawn data."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from operator import itemgetter
from typing import TypeVar

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

from scalebench.analysis import Results
from scalebench.analysis.grouping import EXECUTIONS
from scalebench.figures.drawing import caption
from scalebench.figures.drawing.panel import Panel, lettered, share_y
from scalebench.figures.drawing.styles import EXECUTION_WORDS, NEUTRAL, Look, cross, grouped, looks, name_series, plus
from scalebench.figures.selection import EVERYTHING, Selection
from scalebench.figures.style import REPORT, Style

WIDTH_IN = REPORT.width_in
_LEGEND_ROW_IN = 0.22
_LEAST_PANEL_IN = 0.24  # per point of text size; narrow panels have few ticks and share the label of the y axis
_LEAST_NARROW_IN = 0.2
_CAPTION_PT, _CAPTION_LINE = 7.6, 1.4
_CHARACTERS_PER_POINT_AND_IN = 130.0  # times inches, divided by points
_MOST_LEGEND_ROWS = 7
T = TypeVar("T")


class Canvas:
    """Collect panels, legend and caption; `finish` builds the figure.

    `selection` is the part of the study to draw, `chosen` the names of the panels to draw (empty: all).
    """

    def __init__(
        self, name: str, style: Style = REPORT, selection: Selection = EVERYTHING, chosen: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.style = style
        self.selection = selection
        self.chosen = tuple(chosen)
        self.panels: list[Panel] = []
        self.shown: list[Panel] = []  # without the spare ones of a grid
        self._caption: list[str] = []
        self._grid: list[tuple[int, float]] = []
        self._legend: list[Sequence[tuple[Artist, str]]] = []
        layout = ConstrainedLayoutEngine(w_pad=0.09 * style.scale, h_pad=0.06 * style.scale)
        self._figure = Figure(figsize=(style.width_in, 4), layout=layout)
        parts = 3 if style.caption == "below" else 2
        self._bands = self._figure.add_gridspec(parts, 1)
        self._body, self._strip, *self._foot = (self._figure.add_subfigure(self._bands[row]) for row in range(parts))

    def series_of(self, table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Look], list[list[str]]]:
        """Name and select the series of `table`: return its selected rows, the look of each series, and the groups."""
        named = name_series(table)
        look, shown = looks(list(named["series"])), self.selection.of(named)
        return shown, look, grouped([name for name in look if name in set(shown["series"])])

    def wanted(self, panels: Sequence[str]) -> list[str]:
        """Return those of the figure's `panels` that are to be drawn."""
        return [name for name in panels if not self.chosen or name in self.chosen]

    def fits(self, most: int, *, narrow: bool = False) -> int:
        """Return how many panels stay legible side by side, at least one and at most `most`."""
        least = self.style.size * (_LEAST_NARROW_IN if narrow else _LEAST_PANEL_IN)
        return max(1, min(most, int(self.style.width_in / least)))

    def grids(self, *grids: tuple[int, int, float]) -> list[list[Panel]]:
        """Lay out grids of (number of panels, columns, height in inches of a panel); return the panels of each grid.

        Panels are lettered in order; a single one has no letter.
        """
        rows = [(columns, height) for count, columns, height in grids for _ in range(-(-count // columns))]
        everything = iter(self.rows(*rows))
        found: list[list[Panel]] = []
        for count, columns, _ in grids:
            cells = list(itertools.islice(everything, columns * -(-count // columns)))
            for spare in cells[count:]:
                spare.hide()
            found.append(cells[:count])
            for place, panel in enumerate(cells[:count]):
                panel.leftmost = place % columns == 0
        self.shown = [panel for panels in found for panel in panels]
        for place, panel in enumerate(self.shown if len(self.shown) > 1 else []):
            panel.letter = lettered(place)
        return found

    def rows(self, *rows: tuple[int, float]) -> list[Panel]:
        """Lay out one row of panels for each (number of panels, height in inches); return all panels in order."""
        self._grid = list(rows)
        groups = [(count, [height for _, height in own]) for count, own in itertools.groupby(rows, key=itemgetter(0))]
        bands = self._body.subfigures(len(groups), 1, squeeze=False, height_ratios=[sum(own) for _, own in groups])
        for (count, heights), band in zip(groups, bands[:, 0], strict=True):
            axes = band.subplots(len(heights), count, squeeze=False, gridspec_kw={"height_ratios": heights})
            self.panels += [Panel(ax, self.style.width_in / count, self.style) for ax in axes.flat]
        return self.panels

    def rows_of_groups(
        self, groups: Sequence[T], names: Sequence[str], columns: int = 0, heights: tuple[float, float] = (2.75, 2.1)
    ) -> list[tuple[Panel, T, str]]:
        """Lay out the panels `names` for each group of series; return each panel with its group and name.

        `heights` are those of the panels of one group and of several.
        """
        across = columns or self.fits(len(names))
        (panels,) = self.grids((len(groups) * len(names), across, heights[len(groups) > 1]))
        places = itertools.product(groups, names)
        return [(panel, group, name) for panel, (group, name) in zip(panels, places, strict=True)]

    def share_y_in_columns(self, columns: int) -> None:
        """Give the panels of each column, one for each group of series, the same y range."""
        for place in range(columns):
            share_y(self.shown[place::columns])

    def legend(self, entries: Sequence[tuple[Artist, str]]) -> None:
        """Add one row of entries to the legend."""
        if entries:
            self._legend.append(entries)

    def legends(
        self,
        looks: dict[str, Look],
        drawn: pd.DataFrame,
        *extra: tuple[Artist, str],
        line: bool = True,
        crossed: str = "oversubscribed (no baseline)",
    ) -> None:
        """Add colour and marker of each drawn series, and a row with the fill of each execution of `drawn`.

        Crosses, if any, of oversubscribed runs or of what else is `crossed`, plus signs of disturbed ones, and `extra`
        entries follow in that row.
        """
        shown = {name for panel in self.panels for name in panel.series}
        names = [name for name in looks if name in shown]
        entries: list[tuple[Artist, str]] = [(looks[name].sample(), name) for name in names]
        per_row = _MOST_LEGEND_ROWS if max((len(name) for name in names), default=0) < 18 else 4
        for start in range(0, len(entries), per_row):
            self.legend(entries[start : start + per_row])
        entries = []
        for execution in [name for name in EXECUTIONS if name in set(drawn["execution"])]:
            style = Look(NEUTRAL, "o", 0).line(execution) | ({} if line else {"linestyle": ""})
            entries.append((Line2D([], [], **style), EXECUTION_WORDS[execution]))
        if drawn["oversubscribed"].any():
            entries.append((Line2D([], [], **cross()), crossed))
        if "disturbed" in drawn and drawn["disturbed"].any():
            entries.append((Line2D([], [], **plus()), "disturbed by other programs (no baseline)"))
        self.legend([*entries, *extra])

    def say(self, *sentences: str) -> None:
        """Add sentences to the caption."""
        self._caption += [sentence for sentence in sentences if sentence]

    def describe(self, results: Results, drawn: pd.DataFrame, *sentences: str, bars: bool = True) -> None:
        """Append to the caption: study, executions, machines and oversubscription of `drawn`, and `sentences`."""
        context = any(panel.has_context for panel in self.panels)
        self.say(
            caption.describe_study(results, drawn),
            caption.describe_executions(results, drawn, bars=bars),
            caption.describe_machines(results, drawn),
            *sentences,
            "Pale grey: the series of the other panels." if context else "",
            caption.describe_marks(drawn),
        )

    def data(self) -> pd.DataFrame:
        """Return the drawn data, one row per point or bar segment."""
        table = pd.concat([panel.data() for panel in self.panels], ignore_index=True).assign(figure=self.name)
        first = ["figure", "panel", "series", "execution", "engine", "workers", "oversubscribed", "quantity", "x", "y"]
        return table.reindex(columns=[*first, *(name for name in table.columns if name not in first)])

    def caption(self) -> str:
        """Return the caption: the panels, what was run, how, and what the marks mean."""
        letters: dict[str, list[str]] = {}
        for panel in self.panels:
            letters.setdefault(panel.name, []).append(f"({panel.letter})" if panel.letter else "")
        panels = "; ".join(f"{', '.join(own)} {name}".strip() for name, own in letters.items() if name)
        return " ".join([f"{panels[:1].upper()}{panels[1:]}." if panels else "", *self._caption]).strip()

    def finish(self) -> Figure:
        """Set the heights, write legend and caption, and return the figure."""
        for panel in self.panels:
            panel.fit_intervals()
        if any(panel.cuts_intervals for panel in self.panels):
            self.say("Error bars that leave a panel go on; the CSV beside the figure has their ends.")
        text = " ".join(self._caption) if self.style.titles else self.caption()
        size = max(self.style.small, _CAPTION_PT * self.style.scale * (self.style.size >= REPORT.size))
        across = int(_CHARACTERS_PER_POINT_AND_IN * self.style.width_in / size)
        lines = textwrap.wrap(text, across, break_long_words=False, break_on_hyphens=False) if self._foot else []
        legends = [row for entries in self._legend for row in self._wrap(entries)]
        row_in = _LEGEND_ROW_IN * self.style.scale
        panels = sum(height for _, height in self._grid) * self.style.height
        strip = row_in * len(legends) + 0.08 * self.style.scale
        heights = [panels, strip] + [_CAPTION_LINE * size / 72 * len(lines) + 0.16] * len(self._foot)
        self._figure.set_size_inches(self.style.width_in, sum(heights))
        self._bands.set_height_ratios(heights)
        for index, row in enumerate(legends):
            handles, labels = zip(*row, strict=True)
            top = 1 - (0.02 + row_in * index) / strip
            legend = self._strip.legend(
                handles, labels, loc="upper center", ncols=len(row), bbox_to_anchor=(0.5, top), borderaxespad=0
            )
            legend.set_in_layout(False)
        for foot in self._foot:
            at = 1 - 0.05 / heights[-1]
            foot.text(0.02, at, "\n".join(lines), va="top", size=size, linespacing=1.25).set_in_layout(False)
        layout = self._figure.get_layout_engine()
        assert layout is not None
        layout.execute(self._figure)  # once for all formats
        self._figure.set_layout_engine("none")
        _round_places(self._figure)
        return self._figure

    def _wrap(self, entries: Sequence[tuple[Artist, str]]) -> list[list[tuple[Artist, str]]]:
        """Break one row of the legend into rows that fit the width."""
        size = rcParams["legend.fontsize"]
        around = rcParams["legend.handlelength"] + rcParams["legend.handletextpad"] + rcParams["legend.columnspacing"]
        font = FontProperties(size=size)
        taken = [around * size + TextPath((0, 0), name, prop=font).get_extents().width for _, name in entries]
        rows = 1
        while rows < len(entries):
            parts = np.array_split(taken, rows)
            if all(part.sum() <= 72 * self.style.width_in for part in parts):
                break
            rows += 1
        return [[entries[place] for place in part] for part in np.array_split(np.arange(len(entries)), rows)]


def _round_places(figure: FigureBase) -> None:
    """Round positions: the last digits of the layout depend on earlier figures, and equal records give equal bytes."""
    for part in figure.subfigs:
        part.bbox_relative.p0, part.bbox_relative.p1 = (np.round(p, 5) for p in part.bbox_relative.get_points())
        _round_places(part)
    for ax in figure.get_children():
        if isinstance(ax, Axes):
            ax.set_position(np.round(ax.get_position().bounds, 5).tolist())
