"""Figures of the report, panel by panel: the page arranges them to its width and has captions and legends as HTML.

Each panel is a figure of matplotlib by itself, as SVG with text as text.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Hashable
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from scalebench.analysis import Results, loading
from scalebench.figures import plotting
from scalebench.figures.base import FIGURES
from scalebench.figures.drawing.canvas import WIDTH_IN, Canvas
from scalebench.figures.drawing.caption import describe_machines, describe_study
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.series_style import Handle
from scalebench.formatting import digits
from scalebench.report.pictures import Drawing, Picture, Svg

_WIDEST_IN = 4.0  # of a panel: letters of a wider one are too small on a phone
_PAD_IN = 0.03  # around a panel
_KEY_IN = (0.36, 0.15)
_MOST_SERIES = 16  # in the text of a panel
_SERIES = ["series", "execution", "quantity"]


def draw(results: Results, name: str) -> Drawing:
    """Return the figure `name` of a study, or why it cannot be drawn."""
    kind = FIGURES.create(name, {})
    if absent := kind.absent(results):
        return Drawing(name, kind.summary, absent=absent, notes=tuple(results.notes))
    canvas = PanelCanvas(name)
    with plotting.house_style(), warnings.catch_warnings():
        # the browser has other fonts
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        kind.draw(results, canvas)
        drawing = canvas.drawing(kind.summary, _stated_once(results))
    return replace(drawing, notes=tuple(results.notes))


@loading.cached
def _stated_once(results: Results) -> set[str]:
    """Sentences that the page has above all figures."""
    return {describe_study(results), describe_machines(results)}


class SingleAxesLayout(LayoutEngine):
    """Fit the axes of a figure, which has no others, and their labels into it.

    matplotlib's constrained layout measures all texts twice, as other axes may move
    these: a quarter of the time that a panel takes.
    """

    # `Figure.subplots_adjust`, by which `execute` moves the axes, warns otherwise
    _adjust_compatible = True
    _colorbar_gridspec = False

    def execute(self, fig: Figure) -> None:
        (ax,) = fig.axes
        ticks = _ticks(ax)
        self._fit(fig, ax)
        # a longer axis may have more ticks, whose labels may be wider
        if _ticks(ax) != ticks:
            self._fit(fig, ax)

    def _fit(self, fig: Figure, ax: Axes) -> None:
        drawn = ax.get_tightbbox(for_layout_only=True)
        assert drawn is not None
        width, height = fig.bbox.size
        inner = ax.bbox
        pad = _PAD_IN * fig.dpi
        fig.subplots_adjust(
            left=(pad + inner.x0 - drawn.x0) / width,
            right=1 - (pad + drawn.x1 - inner.x1) / width,
            bottom=(pad + inner.y0 - drawn.y0) / height,
            top=1 - (pad + drawn.y1 - inner.y1) / height,
        )


def _ticks(ax: Axes) -> list[list[float]]:
    return [list(axis.get_majorticklocs()) for axis in (ax.xaxis, ax.yaxis)]


class PanelCanvas(Canvas):
    """A canvas that draws each panel as a separate figure."""

    def rows(self, *rows: tuple[int, float], together: int = 1) -> list[Panel]:
        self._grid = list(rows)
        for count, height in rows:
            width = min(WIDTH_IN / count, _WIDEST_IN)
            for _ in range(count):
                figure = Figure(figsize=(width, height), layout=SingleAxesLayout())
                self.panels.append(Panel(figure.subplots(), width))
        return self.panels

    def drawing(self, summary: str, known: set[str]) -> Drawing:
        """Return the panels as SVG, and the caption without the sentences in `known`."""
        self.close()
        rows, panels = [], iter(self.panels)
        # Rows of the canvas stay rows: a narrow page puts their panels below each
        # other.
        for count, _ in self._grid:
            band = list(islice(panels, count))
            # `Panel.blank` hides the axes.
            shown = [panel for panel in band if panel.ax.spines["left"].get_visible()]
            rows.append((count, [self._picture(panel, band[0]) for panel in shown]))
        keys = []
        for row, entries in enumerate(self._legend):
            # Ids begin with the place of the picture: they are unique on the page.
            svgs = [
                Svg(_key(artist), f"{self.name}-k{row}-{at}-")
                for at, (artist, _) in enumerate(entries)
            ]
            keys.append(
                [(text, svg) for (_, text), svg in zip(entries, svgs, strict=True)]
            )
        caption = " ".join(
            sentence for sentence in self._caption if sentence not in known
        )
        return Drawing(
            self.name, summary, [row for row in rows if row[1]], keys, caption
        )

    def _picture(self, panel: Panel, first: Panel) -> Picture:
        ax, data = panel.ax, panel.data()
        title = _title(panel, data)
        # The page has it as text, above the picture.
        ax.set_title("", loc="left")
        if not ax.get_ylabel():  # only the first panel of a row has it
            ax.set_ylabel(first.ax.get_ylabel())
            ax.tick_params(labelleft=True)
        number = self.panels.index(panel)
        svg = Svg(write(ax.get_figure(root=True)), f"{self.name}-{number}-")
        return Picture(title, describe(data, ax.get_xlabel(), ax.get_ylabel()), svg)


def _title(panel: Panel, data: pd.DataFrame) -> str:
    """Return the full title with its letter; `data` are those of the panel."""
    drawn = panel.ax.get_title(loc="left")
    letter = re.match(r"\([a-z]\) ", drawn)
    if data.empty:
        return drawn
    return (letter[0] if letter else "") + str(data["panel"].iloc[0])


def _key(artist: Handle) -> str:
    """Draw a legend entry without its text; return the SVG document."""
    figure = Figure(figsize=_KEY_IN)
    figure.patch.set_visible(False)
    copy: Artist
    for part in artist if isinstance(artist, tuple) else (artist,):
        if isinstance(part, Line2D):
            # Three points, of which the middle one has the marker.
            copy = Line2D([0.06, 0.5, 0.94], [0.5, 0.5, 0.5], markevery=[1])
            copy.update_from(part)
            # `update_from` has taken that of the curve.
            copy.set_markevery([1])
        else:
            copy = Rectangle((0.1, 0.12), 0.8, 0.76)
            copy.update_from(part)
        copy.set_transform(figure.transFigure)
        figure.add_artist(copy)
    return write(figure)


def describe(drawn: pd.DataFrame, x: str, y: str) -> str:
    """Describe a panel for readers who cannot see it: the first and the last point of each series.

    `drawn` holds the numbers of the panel (`Panel.data`); `x` and `y` are the labels of
    the axes.
    """
    axes = f"{y or 'value'} against {x or 'workers'}"
    if drawn.empty or "execution" not in drawn:
        return f"{axes}: nothing drawn."
    points: dict[tuple[str, ...], list[dict[Hashable, Any]]] = {}
    for point in drawn.dropna(subset=[*_SERIES, "y"]).to_dict("records"):
        points.setdefault(tuple(str(point[name]) for name in _SERIES), []).append(point)
    # Read aloud, the ends of a course tell more than all of its points.
    courses = [_course(key, own) for key, own in points.items()]
    more = (
        f" And {len(courses) - _MOST_SERIES} more series."
        if len(courses) > _MOST_SERIES
        else ""
    )
    return (
        f"{axes}. {' '.join(courses[:_MOST_SERIES])}{more}"
        if courses
        else f"{axes}: not measured."
    )


def _course(key: tuple[str, ...], points: list[dict[Hashable, Any]]) -> str:
    name, execution, quantity = key
    part = quantity.rpartition(": ")[2] if ": " in quantity else ""
    along = "x" if all(pd.notna(point.get("x")) for point in points) else "workers"
    ordered = sorted(points, key=itemgetter(along))
    ends = ordered if len(ordered) == 1 else [ordered[0], ordered[-1]]
    course = ", ".join(f"{digits(point['y'])} at {point[along]:.3g}" for point in ends)
    return f"{name}{f', {part}' if part else ''} ({execution}): {course}."


def write(figure: Any) -> str:
    """Return a matplotlib figure as an SVG document with text elements instead of outlines."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    # texts as text; not a context, which copies all parameters for each of many keys
    fonts, rcParams["svg.fonttype"] = rcParams["svg.fonttype"], "none"
    try:
        canvas.print_svg(text, metadata={"Date": None})
    finally:
        rcParams["svg.fonttype"] = fonts
    return text.getvalue()
