"""Figures of the report, panel by panel: the page arranges them to its width and has captions and legends as HTML.

Each is matplotlib's SVG inlined: text as text, styles as classes, colours for light and
dark pages. The content security policy of the page forbids `style` attributes, so each
distinct style becomes one class of one style sheet for all pictures of the page.
"""

from __future__ import annotations

import colorsys
import io
import re
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pandas as pd
from markupsafe import Markup
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import LayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from scalebench.analysis import Results
from scalebench.analysis.loading import cached
from scalebench.figures import plotting
from scalebench.figures.base import FIGURES, default_figures
from scalebench.figures.drawing.canvas import WIDTH_IN, Canvas
from scalebench.figures.drawing.caption import describe_machines, describe_study
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.series_style import Handle
from scalebench.formatting import digits

ORDER = (
    "time-reduction",
    "reduction-parts",
    "time-to-target",
    "strong-scaling",
    "weak-scaling",
    "convergence",
    "scaling-laws",
    "breakdown",
    "agreement",
)
# Drawn by the process that writes the words: these fit the laws, too, which takes as
# long as the rest of the figure.
_OWN = ("scaling-laws",)
_WIDEST_IN = 4.0  # of a panel: letters of a wider one are too small on a phone
_PAD_IN = 0.03  # around a panel
_KEY_IN = (0.36, 0.15)
_MOST_SERIES = 16  # in the text of a panel
_SERIES = ["series", "execution", "quantity"]

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_COLOR = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"(?:url\(#|^#)([^)]+)\)?")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PAPER = "#ffffff"
_LIGHT, _GREY = (
    0.74,
    0.12,
)  # lightness from which a colour is a background, saturation up to which it is a grey
_VISIBLE = 0.58  # least lightness on a dark page


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

    `rows` holds the number of columns and the panels of each row, `keys` the text and
    picture of each legend entry.
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
    rank = {name: place for place, name in enumerate(ORDER)}
    # Those that ORDER does not know, of third parties, follow by name.
    names = sorted(
        default_figures(), key=lambda name: (rank.get(name, len(rank)), name)
    )
    if jobs == 1:
        yield (_draw(results, name) for name in names)
        return
    others = [name for name in plotting.slowest_first(names) if name not in _OWN]
    with plotting.drawing_processes(jobs, results) as pool:
        drawn = {name: pool.submit(_draw_shared, name) for name in others}

        def in_order() -> Iterator[Drawing]:
            own = {name: _draw(results, name) for name in names if name in _OWN}
            for name in names:
                yield own[name] if name in own else drawn[name].result()

        yield in_order()


def inlined(drawing: Drawing, sheet: StyleSheet) -> Drawing:
    """Return `drawing` with pictures for the page, whose styles are those of `sheet`."""

    def on_page(svg: Svg | Markup) -> Markup:
        if isinstance(svg, Markup):
            return svg
        return Markup(inline(svg.document, svg.prefix, sheet))  # noqa: S704

    rows = []
    for count, pictures in drawing.rows:
        rows.append((count, [replace(one, svg=on_page(one.svg)) for one in pictures]))
    keys = [[(text, on_page(svg)) for text, svg in row] for row in drawing.keys]
    return replace(drawing, rows=rows, keys=keys)


def _draw_shared(name: str) -> Drawing:
    return _draw(plotting.shared_results(), name)


def _draw(results: Results, name: str) -> Drawing:
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


@cached
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


class StyleSheet:
    """Classes for the styles of the pictures, and variables for their colours."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def class_of(self, style: str) -> str:
        """Return the class for `style`, adding one if it is new."""
        return self._classes.setdefault(style, f"s{len(self._classes)}")

    def rules(self) -> str:
        """Return the rules, such as `.s0{fill:var(--c222222)}`, one per line."""
        return "\n".join(
            f".{name}{{{_COLOR.sub(lambda color: f'var(--{_variable(color[0])})', style)}}}"
            for style, name in self._classes.items()
        )

    def colors(self, *, dark: bool) -> str:
        """Return the values of the variables for a light or a dark page."""
        met = sorted(
            {color for style in self._classes for color in _COLOR.findall(style)}
            - {_PAPER}
        )
        return "\n".join(
            f"--{_variable(color)}:{in_the_dark(color) if dark else color};"
            for color in met
        )


def _variable(color: str) -> str:
    # white becomes the background of the card
    return "card" if color == _PAPER else f"c{color[1:]}"


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


def inline(svg: str, prefix: str, sheet: StyleSheet) -> str:
    """Return the `<svg>` element of matplotlib's document `svg`, without a size, with ids that begin with `prefix`."""
    root = ET.fromstring(_NOT_XML.sub("\ufffd", svg))  # noqa: S314 - matplotlib wrote it
    for parent in list(root.iter()):
        for child in list(parent):
            # Metadata names the version of matplotlib; a style sheet would hold for the
            # whole page.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    # Ids that nothing refers to would only make the page longer.
    used = {
        name
        for element in root.iter()
        for value in element.attrib.values()
        for name in _REFERENCE.findall(value)
    }
    for element in root.iter():
        _rewrite(element, prefix, used, sheet)
    # Without a size a picture is as wide as its place on the page.
    view = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib["viewBox"] = view
    return ET.tostring(root, encoding="unicode")


def _rewrite(
    element: ET.Element, prefix: str, used: set[str], sheet: StyleSheet
) -> None:
    element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    old = dict(element.attrib)
    element.attrib.clear()
    for name, value in old.items():
        name = "href" if name == f"{{{_XLINK}}}href" else name
        if name == "id":
            if value in used:
                element.attrib["id"] = prefix + value
        elif name == "style":
            element.attrib["class"] = sheet.class_of(_style(value, prefix))
        elif name == "fill":  # background of a hatch
            element.attrib["class"] = sheet.class_of(f"fill:{value}")
        # matplotlib writes a rotation by nothing for each text.
        elif name == "transform" and value.startswith("rotate(-0 "):
            continue
        elif name in ("href", "clip-path"):
            element.attrib[name] = value.replace("#", f"#{prefix}")
        else:
            # A hundredth of a point is not seen, and pages are shorter.
            text = _NUMBER.sub(lambda number: f"{float(number[0]):.2f}", value)
            element.attrib[name] = " ".join(text.split()) if name == "d" else text
    # White space between elements, of which there are thousands.
    if element.tag != "text":
        element.text = None
    element.tail = None


def _style(value: str, prefix: str) -> str:
    """Normalise a style attribute: no spaces, and no font, so that the page's applies."""
    parts = [part.split(":", 1) for part in value.split(";") if part.strip()]
    kept = [
        (name.strip(), text.strip())
        for name, text in parts
        if name.strip() != "font-family"
    ]
    return ";".join(f"{name}:{text}" for name, text in kept).replace(
        "url(#", f"url(#{prefix}"
    )


def in_the_dark(color: str) -> str:
    """Return `color` for a dark page: greys inverted, backgrounds darkened, hues lightened to stay visible."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    spread = max(red, green, blue) - min(red, green, blue)
    if spread <= _GREY:
        light = 0.09 + 0.85 * (1 - light)
    elif light > _LIGHT:
        light = 0.12 + 0.6 * (1 - light)
        saturation = min(saturation, 0.6)
    else:
        saturation = min(saturation, 0.75) if light < _VISIBLE else saturation
        # keeps shades of one hue apart
        light = _VISIBLE + (_LIGHT - _VISIBLE) * light / _LIGHT
    turned = colorsys.hls_to_rgb(hue, light, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in turned)
