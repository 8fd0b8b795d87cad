"""A figure of panels, legend and caption, one below the other, with the drawn data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from scalebench.analysis.grouping import EXECUTIONS
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.styles import CROSS, EXECUTION_WORDS, NEUTRAL, Look

WIDTH_IN = 9.6
_LEGEND_ROW_IN = 0.22
_CAPTION_LINE_IN = 0.148
_CAPTION_SIZE = 7.6
_CAPTION_CHARACTERS = 164


class Canvas:
    """Collect panels, legend and caption; `finish` builds the figure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.panels: list[Panel] = []
        self._caption: list[str] = []
        self._grid: list[tuple[int, float]] = []
        self._legend: list[Sequence[tuple[Artist, str]]] = []
        self._figure = Figure(figsize=(WIDTH_IN, 4), layout=ConstrainedLayoutEngine(w_pad=0.09, h_pad=0.06))
        self._bands = self._figure.add_gridspec(3, 1)
        self._body, self._strip, self._foot = (self._figure.add_subfigure(self._bands[row]) for row in range(3))

    def rows(self, *rows: tuple[int, float]) -> list[Panel]:
        """Lay out one row of panels for each (number of panels, height in inches); return all panels in order."""
        self._grid = list(rows)
        bands = self._body.subfigures(len(rows), 1, squeeze=False, height_ratios=[height for _, height in rows])
        for (count, _), band in zip(self._grid, bands[:, 0], strict=True):
            axes = band.subplots(1, count, squeeze=False)
            self.panels += [Panel(ax, WIDTH_IN / count) for ax in axes[0]]
        return self.panels

    def legend(self, entries: Sequence[tuple[Artist, str]]) -> None:
        """Add one row of entries to the legend."""
        if entries:
            self._legend.append(entries)

    def legend_of_series(self, series: Iterable[str], looks: dict[str, Look]) -> None:
        """Add the colour and marker of each series, at most seven per row."""
        shown = set(series)
        names = [name for name in looks if name in shown]
        entries = [
            (Line2D([], [], color=looks[name].color, marker=looks[name].marker, markersize=5.5), name) for name in names
        ]
        per_row = 7 if max((len(name) for name in names), default=0) < 18 else 4
        for start in range(0, len(entries), per_row):
            self.legend(entries[start : start + per_row])

    def legend_of_executions(
        self, drawn: pd.DataFrame, *extra: tuple[Artist, str], line: bool = True, oversubscribed: bool = True
    ) -> None:
        """Add the fill of each drawn execution and the cross of oversubscribed runs."""
        entries: list[tuple[Artist, str]] = []
        for execution in [name for name in EXECUTIONS if name in set(drawn["execution"])]:
            style = Look(NEUTRAL, "o", 0).line(execution) | ({} if line else {"linestyle": ""})
            entries.append((Line2D([], [], markersize=5.5, **style), EXECUTION_WORDS[execution]))
        if oversubscribed and drawn["oversubscribed"].any():
            entries.append((Line2D([], [], **CROSS), "oversubscribed (no baseline)"))
        self.legend([*entries, *extra])

    def say(self, *sentences: str) -> None:
        """Add sentences to the caption."""
        self._caption += [sentence for sentence in sentences if sentence]

    def data(self) -> pd.DataFrame:
        """Return the drawn data, one row per point or bar segment."""
        table = pd.concat([panel.data() for panel in self.panels], ignore_index=True).assign(figure=self.name)
        first = ["figure", "panel", "series", "execution", "engine", "workers", "oversubscribed", "quantity", "x", "y"]
        return table.reindex(columns=[*first, *(name for name in table.columns if name not in first)])

    def finish(self) -> Figure:
        """Set the heights, write legend and caption, and return the figure."""
        for panel in self.panels:
            panel.fit_intervals()
        if any(panel.cuts_intervals for panel in self.panels):
            self.say("Error bars that leave a panel go on; the CSV beside the figure has their ends.")
        lines = textwrap.wrap(
            " ".join(self._caption), _CAPTION_CHARACTERS, break_long_words=False, break_on_hyphens=False
        )
        panels = sum(height for _, height in self._grid)
        strip = _LEGEND_ROW_IN * len(self._legend) + 0.08
        foot = _CAPTION_LINE_IN * len(lines) + 0.16
        self._figure.set_size_inches(WIDTH_IN, panels + strip + foot)
        self._bands.set_height_ratios([panels, strip, foot])
        for index, row in enumerate(self._legend):
            handles, labels = zip(*row, strict=True)
            top = 1 - (0.02 + _LEGEND_ROW_IN * index) / strip
            legend = self._strip.legend(
                handles, labels, loc="upper center", ncols=len(row), bbox_to_anchor=(0.5, top), borderaxespad=0
            )
            legend.set_in_layout(False)
        text = self._foot.text(0.02, 1 - 0.05 / foot, "\n".join(lines), va="top", size=_CAPTION_SIZE, linespacing=1.25)
        text.set_in_layout(False)
        layout = self._figure.get_layout_engine()
        assert layout is not None
        layout.execute(self._figure)  # once for all formats
        self._figure.set_layout_engine("none")
        _round_places(self._figure)
        return self._figure


def _round_places(figure: FigureBase) -> None:
    """Round positions: the last digits of the layout depend on earlier figures, and equal records give equal bytes."""
    for part in figure.subfigs:
        part.bbox_relative.p0, part.bbox_relative.p1 = (np.round(p, 5) for p in part.bbox_relative.get_points())
        _round_places(part)
    for ax in figure.get_children():
        if isinstance(ax, Axes):
            ax.set_position(np.round(ax.get_position().bounds, 5).tolist())
