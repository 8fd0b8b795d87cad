"""Figures of the report, panel by panel: the page arranges them to its width and has captions and legends as HTML."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from scalebench.analysis import Results
from scalebench.figures.base import FIGURES, default_figures
from scalebench.figures.drawing.canvas import WIDTH_IN, Canvas
from scalebench.figures.drawing.caption import describe_machines, describe_study
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.styles import Handle
from scalebench.figures.plotting import drawing_processes, house_style, shared_results, slowest_first
from scalebench.formatting import digits
from scalebench.report.svg import StyleSheet, inline, write

ORDER = (
    *("time-reduction", "reduction-parts", "time-to-target", "strong-scaling", "weak-scaling", "convergence"),
    *("scaling-laws", "breakdown", "agreement"),
)
_WIDEST_IN = 4.0  # of a panel: letters of a wider one are too small on a phone
_KEY_IN = (0.36, 0.15)
_MOST_SERIES = 16  # in the text of a panel
_SERIES = ["series", "execution", "quantity"]


class Svg(NamedTuple):
    """A document of matplotlib, whose ids are to begin with `prefix` on the page."""

    document: str
    prefix: str


@dataclass(frozen=True)
class Picture:
    """One panel: title, text alternative with numbers, and picture, of which `inlined` makes an `<svg>` of the page."""

    title: str
    words: str
    svg: Svg | Markup


@dataclass(frozen=True)
class Drawing:
    """One figure, or the reason why it cannot be drawn (`absent`).

    `rows` holds the number of columns and the panels of each row, `keys` the text and picture of each legend entry.
    """

    name: str
    summary: str
    rows: Sequence[tuple[int, Sequence[Picture]]] = ()
    keys: Sequence[Sequence[tuple[str, Svg | Markup]]] = ()
    caption: str = ""
    absent: str = ""
    notes: tuple[str, ...] = ()  # of the results, once it is drawn


@contextmanager
def drawing_all(results: Results, jobs: int = 1) -> Iterator[Iterator[Drawing]]:
    """Give the default figures, in the order of `ORDER`; `jobs` other processes, if more than one, draw meanwhile."""
    names = sorted(default_figures(), key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    if jobs == 1:
        yield (_draw(results, name) for name in names)
        return
    with drawing_processes(jobs, results) as pool:
        drawn = {name: pool.submit(_draw_shared, name) for name in slowest_first(names)}
        yield (drawn[name].result() for name in names)


def inlined(drawing: Drawing, sheet: StyleSheet) -> Drawing:
    """Return `drawing` with pictures for the page, whose styles are those of `sheet`."""

    def on_page(svg: Svg | Markup) -> Markup:
        return svg if isinstance(svg, Markup) else Markup(inline(svg.document, svg.prefix, sheet))  # noqa: S704

    rows = [(count, [replace(one, svg=on_page(one.svg)) for one in pictures]) for count, pictures in drawing.rows]
    keys = [[(text, on_page(svg)) for text, svg in row] for row in drawing.keys]
    return replace(drawing, rows=rows, keys=keys)


def _draw_shared(name: str) -> Drawing:
    return _draw(shared_results(), name)


def _draw(results: Results, name: str) -> Drawing:
    kind = FIGURES.create(name, {})
    if absent := kind.absent(results):
        return Drawing(name, kind.summary, absent=absent, notes=tuple(results.notes))
    known = {describe_study(results), describe_machines(results)}  # sentences that the page states once
    canvas = PanelCanvas(name)
    with house_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the browser has other fonts
        kind.draw(results, canvas)
        drawing = canvas.drawing(kind.summary, known)
    return replace(drawing, notes=tuple(results.notes))


class PanelCanvas(Canvas):
    """A canvas that draws each panel as a separate figure."""

    def rows(self, *rows: tuple[int, float], together: int = 1) -> list[Panel]:
        self._grid = list(rows)
        for count, height in rows:
            width = min(WIDTH_IN / count, _WIDEST_IN)
            for _ in range(count):
                figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03))
                self.panels.append(Panel(figure.subplots(), width))
        return self.panels

    def drawing(self, summary: str, known: set[str]) -> Drawing:
        """Return the panels as SVG, and the caption without the sentences in `known`."""
        self.close()
        rows, panels = [], iter(self.panels)
        for count, _ in self._grid:
            band = list(islice(panels, count))
            # `Panel.blank` hides the axes.
            shown = [panel for panel in band if panel.ax.spines["left"].get_visible()]
            rows.append((count, [self._picture(panel, band[0]) for panel in shown]))
        keys = [
            [(text, Svg(_key(artist), f"{self.name}-k{row}-{place}-")) for place, (artist, text) in enumerate(entries)]
            for row, entries in enumerate(self._legend)
        ]
        caption = " ".join(sentence for sentence in self._caption if sentence not in known)
        return Drawing(self.name, summary, [row for row in rows if row[1]], keys, caption)

    def _picture(self, panel: Panel, first: Panel) -> Picture:
        ax, data = panel.ax, panel.data()
        title = _title(panel, data)
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
    return (letter[0] if letter else "") + str(data["panel"].iloc[0]) if len(data) else drawn


def _key(artist: Handle) -> str:
    """Draw a legend entry without its text; return the SVG document."""
    figure = Figure(figsize=_KEY_IN)
    figure.patch.set_visible(False)
    copy: Artist
    for part in artist if isinstance(artist, tuple) else (artist,):
        if isinstance(part, Line2D):
            copy = Line2D([0.06, 0.5, 0.94], [0.5, 0.5, 0.5], markevery=[1])
            copy.update_from(part)
            copy.set_markevery([1])
        else:
            copy = Rectangle((0.1, 0.12), 0.8, 0.76)
            copy.update_from(part)
        copy.set_transform(figure.transFigure)
        figure.add_artist(copy)
    return write(figure)


def describe(drawn: pd.DataFrame, x: str, y: str) -> str:
    """Describe a panel for readers who cannot see it: the first and the last point of each series.

    `drawn` holds the numbers of the panel (`Panel.data`); `x` and `y` are the labels of the axes.
    """
    axes = f"{y or 'value'} against {x or 'workers'}"
    if drawn.empty or "execution" not in drawn:
        return f"{axes}: nothing drawn."
    points: dict[tuple[str, ...], list[dict[Hashable, Any]]] = {}
    for point in drawn.dropna(subset=[*_SERIES, "y"]).to_dict("records"):
        points.setdefault(tuple(str(point[name]) for name in _SERIES), []).append(point)
    courses = [_course(key, own) for key, own in points.items()]
    more = f" And {len(courses) - _MOST_SERIES} more series." if len(courses) > _MOST_SERIES else ""
    return f"{axes}. {' '.join(courses[:_MOST_SERIES])}{more}" if courses else f"{axes}: not measured."


def _course(key: tuple[str, ...], points: list[dict[Hashable, Any]]) -> str:
    name, execution, quantity = key
    part = quantity.rpartition(": ")[2] if ": " in quantity else ""
    along = "x" if all(pd.notna(point.get("x")) for point in points) else "workers"
    ordered = sorted(points, key=itemgetter(along))
    ends = ordered if len(ordered) == 1 else [ordered[0], ordered[-1]]
    course = ", ".join(f"{digits(point['y'])} at {point[along]:.3g}" for point in ends)
    return f"{name}{f', {part}' if part else ''} ({execution}): {course}."
