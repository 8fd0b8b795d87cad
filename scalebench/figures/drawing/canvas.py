"""A figure under construction: panels, a legend strip and a caption below each other, and the data that is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from scalebench.analysis.grouping import EXECUTIONS
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.styles import EXECUTION_WORDS, NEUTRAL, Look

WIDTH_IN = 9.6
_LEGEND_ROW_IN = 0.22
_CAPTION_LINE_IN = 0.148
_CAPTION_SIZE = 7.6
_CAPTION_CHARACTERS = 164


class Canvas:
    """Collects panels; `finish` puts the figure together."""

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
        """Lay out one row of panels for each (number of panels, height in inches); returns all panels in order."""
        self._grid = list(rows)
        bands = self._body.subfigures(len(rows), 1, squeeze=False, height_ratios=[height for _, height in rows])
        for (count, _), band in zip(self._grid, bands[:, 0], strict=True):
            axes = band.subplots(1, count, squeeze=False)
            self.panels += [Panel(ax, WIDTH_IN / count) for ax in axes[0]]
        return self.panels

    def legend(self, entries: Sequence[tuple[Artist, str]]) -> None:
        """Add one row of entries to the legend self._strip."""
        if entries:
            self._legend.append(entries)

    def legend_of_series(self, series: Iterable[str], looks: dict[str, Look]) -> None:
        """Which colour and marker is which strategy, at most seven a row."""
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
        """Which fill is which execution, and the cross of oversubscribed runs, as far as they are drawn."""
        entries: list[tuple[Artist, str]] = []
        for execution in [name for name in EXECUTIONS if name in set(drawn["execution"])]:
            style = Look(NEUTRAL, "o", 0).line(execution) | ({} if line else {"linestyle": ""})
            entries.append((Line2D([], [], markersize=5.5, **style), EXECUTION_WORDS[execution]))
        if oversubscribed and drawn["oversubscribed"].any():
            entries.append((cross_mark(), "oversubscribed (no baseline)"))
        self.legend([*entries, *extra])

    def say(self, *sentences: str) -> None:
        """Write the caption."""
        self._caption += [sentence for sentence in sentences if sentence]

    def data(self) -> pd.DataFrame:
        """What is drawn: one row per point or bar segment."""
        rows = [row | {"figure": self.name} for panel in self.panels for row in panel.drawn]
        table = pd.DataFrame(rows)
        return table[["figure", *(name for name in table.columns if name != "figure")]]

    def finish(self) -> Figure:
        """Set the heights, write legend and caption, and return the figure."""
        lines = textwrap.wrap(" ".join(self._caption), _CAPTION_CHARACTERS, break_long_words=False)
        panels = sum(height for _, height in self._grid)
        legend = _LEGEND_ROW_IN * len(self._legend) + 0.08
        caption = _CAPTION_LINE_IN * len(lines) + 0.16
        self._figure.set_size_inches(WIDTH_IN, panels + legend + caption)
        self._bands.set_height_ratios([panels, legend, caption])
        for index, row in enumerate(self._legend):
            handles, labels = zip(*row, strict=True)
            top = 1 - (0.02 + _LEGEND_ROW_IN * index) / legend
            self._strip.add_artist(
                self._strip.legend(
                    handles, labels, loc="upper center", ncols=len(row), bbox_to_anchor=(0.5, top), borderaxespad=0
                )
            )
        self._foot.text(
            0.02, 1 - 0.05 / caption, "\n".join(lines), va="top", ha="left", size=_CAPTION_SIZE, linespacing=1.25
        )
        layout = self._figure.get_layout_engine()
        assert layout is not None
        layout.execute(self._figure)  # once is enough for all formats
        self._figure.set_layout_engine("none")
        return self._figure


def cross_mark() -> Line2D:
    """The legend's sample of an oversubscribed point."""
    return Line2D([], [], color=NEUTRAL, linestyle="", marker="x", markersize=7, markeredgewidth=1.3)
