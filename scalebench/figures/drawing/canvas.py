"""Pages of panels, legend and caption, one below the other, with the drawn data."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase
from matplotlib.gridspec import GridSpec, GridSpecBase
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from scalebench.analysis import Results
from scalebench.figures.drawing import caption, series_style
from scalebench.figures.drawing.panel import Panel, lettered, share_y
from scalebench.figures.drawing.series_style import Look, looks
from scalebench.figures.selection import EVERYTHING, EXECUTION, Added, Selection
from scalebench.figures.style import REPORT, Style

WIDTH_IN = REPORT.width_in
_LEGEND_ROW_IN = 0.22
# per point of text size; narrow panels have few ticks and share the label of the y axis
_LEAST_PANEL_IN = 0.24
_LEAST_NARROW_IN = 0.2
_CAPTION_PT, _CAPTION_LINE = 7.6, 1.4
_CHARACTERS_PER_POINT_AND_IN = 130.0  # times inches, divided by points
_MOST_IN_ROW = 7  # entries of a legend
_MOST_LAYOUTS = 3
_TITLE_LINE = 1.25  # times the size of titles
_TITLE_GAP_PT = 3.0  # to the next title, or the end of the page
_MOST_LINES = 4  # of a caption in the picture
WIDE = "interval wider than the panel"
T = TypeVar("T")
Entry = tuple[series_style.Handle, str]


@dataclass
class Page:
    """One figure: panels of the height `panels_in`, below them the legend and, in some styles, the caption."""

    figure: Figure
    bands: GridSpec
    strip: FigureBase
    foot: Sequence[FigureBase]
    panels: list[Panel]
    panels_in: float

    @property
    def series(self) -> set[str]:
        """Return the series that are drawn as curves."""
        return {name for panel in self.panels for name in panel.series}


class Canvas:
    """Collect panels, legend and caption; `finish` builds the figures, one for each page.

    `selection` is the part of the study to draw, `chosen` the names of the panels to
    draw (empty: all).
    """

    def __init__(
        self,
        name: str,
        style: Style = REPORT,
        selection: Selection = EVERYTHING,
        chosen: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.style = style
        self.selection = selection
        self.chosen = tuple(chosen)
        self.panels: list[Panel] = []
        self.shown: list[Panel] = []  # without the spare ones of a grid
        self.added: Sequence[Added] = ()  # studies and curves beside that of the figure
        self.names: dict[str, str] = {}  # of series, as titles and legends have them
        self._caption: list[str] = []
        self._method: list[str] = []
        self._grid: list[tuple[int, float]] = []
        self._legend: list[list[Entry]] = []
        self._pages: list[Page] = []

    def series_of(
        self,
        table: pd.DataFrame,
        most: int = series_style.MOST_SERIES,
        of: Results | None = None,
    ) -> tuple[pd.DataFrame, dict[str, Look], list[list[str]]]:
        """Name and select the series of `table`: return its selected rows, the look of each series, and the groups.

        A group has at most `most` series. Looks and names are those of all series of the study `of`, by default of the
        table: they are the same in all its figures.
        """
        named = series_style.name_series(table)
        everything = list(named["series"])
        if of is not None:
            # A figure may leave strategies out, and must not give their colours to
            # others.
            everything += list(series_style.name_series(of.completed)["series"])
        look = looks(everything)
        shown = self.selection.of(named)
        if self.added:
            # Rows of files have no strategy that a selection could name.
            shown = named.loc[
                shown.index.union(named.index[named["execution"] == EXECUTION])
            ]
        self.names = series_style.short_names(look)
        return (
            shown,
            look,
            series_style.grouped(
                [name for name in look if name in set(shown["series"])], most
            ),
        )

    def wanted(self, panels: Sequence[str]) -> list[str]:
        """Return those of the figure's `panels` that are to be drawn."""
        return [name for name in panels if not self.chosen or name in self.chosen]

    def fits(self, most: int, *, narrow: bool = False) -> int:
        """Return how many panels stay legible side by side, at least one and at most `most`."""
        least = self.style.size * (_LEAST_NARROW_IN if narrow else _LEAST_PANEL_IN)
        return max(1, min(most, int(self.style.width_in / least)))

    def grids(
        self, *grids: tuple[int, int, float], together: int = 1
    ) -> list[list[Panel]]:
        """Lay out grids of (number of panels, columns, height in inches of a panel); return the panels of each grid.

        Panels are lettered in order; a single one has no letter. Rows of `together`
        panels that follow one another, as those of one group of series, stay on one
        page if they fit.
        """
        rows = []
        for count, columns, height in grids:
            # Rounded up: the last row may have spare panels.
            rows += [(columns, height)] * -(-count // columns)
        whole = all(
            count % together == 0 and together % columns == 0
            for count, columns, _ in grids
        )
        everything = iter(
            self.rows(*rows, together=together // grids[0][1] if whole else 1)
        )
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

    def rows(self, *rows: tuple[int, float], together: int = 1) -> list[Panel]:
        """Lay out one row of panels for each (number of panels, height in inches); return all panels in order.

        Rows that do not fit the height of the style's page go to further pages;
        `together` rows are not parted.
        """
        self._grid = list(rows)
        for own in self._paged(rows, together):
            page = self._new_page(sum(height for _, height in own) * self.style.height)
            body = page.figure.add_subfigure(page.bands[0])
            # neighbouring rows of as many panels share a grid, so that their panels are
            # aligned
            groups = []
            for count, part in itertools.groupby(own, itemgetter(0)):
                groups.append((count, [height for _, height in part]))
            shares = [sum(heights) for _, heights in groups]
            bands = body.subfigures(len(groups), 1, squeeze=False, height_ratios=shares)
            for (count, heights), band in zip(groups, bands[:, 0], strict=True):
                axes = band.subplots(
                    len(heights),
                    count,
                    squeeze=False,
                    gridspec_kw={"height_ratios": heights},
                )
                page.panels += [
                    Panel(ax, self.style.width_in / count, self.style)
                    for ax in axes.flat
                ]
            self.panels += page.panels
        return self.panels

    def _new_page(self, panels_in: float) -> Page:
        layout = ConstrainedLayoutEngine(
            w_pad=0.09 * self.style.scale, h_pad=0.06 * self.style.scale
        )
        figure = Figure(figsize=(self.style.width_in, 4), layout=layout)
        # texts that it measures for the layout are not measured again for a PNG
        FigureCanvasAgg(figure)
        parts = 3 if self.style.caption == "below" else 2
        bands = figure.add_gridspec(parts, 1)
        strip, *foot = (figure.add_subfigure(bands[row]) for row in range(1, parts))
        self._pages.append(Page(figure, bands, strip, foot, [], panels_in))
        return self._pages[-1]

    def _paged(
        self, rows: Sequence[tuple[int, float]], together: int
    ) -> Iterator[list[tuple[int, float]]]:
        """Yield the rows of each page; what legend and caption will take is estimated."""
        # Of all names: which are drawn is known when the panels are filled.
        entries: list[Entry] = [(Line2D([], []), name) for name in self.names.values()]
        legend = (
            _LEGEND_ROW_IN
            * self.style.scale
            * (1.5 + len(self._wrap(entries)) if entries else 2)
        )
        foot = (_CAPTION_LINE * self._caption_pt / 72 * _MOST_LINES + 0.16) * (
            self.style.caption == "below"
        )
        # `finish` makes panels fit
        room = 1.05 * (self.style.page_in - legend - foot) / self.style.height
        parts = [
            rows[start : start + together] for start in range(0, len(rows), together)
        ]
        # A group of rows that is higher than a page is parted after all.
        if max(map(_height, parts)) > room:
            parts = [[row] for row in rows]
        pages = _filled(parts, room)
        # As many rows on each page look better than full pages and a short last one, if
        # they fit.
        even = -(-len(parts) // len(pages))
        alike = []
        for start in range(0, len(parts), even):
            alike.append(list(itertools.chain(*parts[start : start + even])))
        yield from alike if max(map(_height, alike)) <= room else pages

    def rows_of_groups(
        self,
        groups: Sequence[T],
        names: Sequence[str],
        columns: int = 0,
        heights: tuple[float, float] = (2.75, 2.1),
    ) -> list[tuple[Panel, T, str]]:
        """Lay out the panels `names` for each group of series; return each panel with its group and name.

        `heights` are those of the panels of one group and of several.
        """
        across = columns or self.fits(len(names))
        (panels,) = self.grids(
            (len(groups) * len(names), across, heights[len(groups) > 1]),
            together=len(names),
        )
        places = itertools.product(groups, names)
        return [
            (panel, group, name)
            for panel, (group, name) in zip(panels, places, strict=True)
        ]

    def share_y_in_columns(self, columns: int) -> None:
        """Give the panels of each column, one for each group of series, the same y range."""
        for place in range(columns):
            share_y(self.shown[place::columns])

    def legend(self, entries: Sequence[Entry]) -> None:
        """Add a row of entries to the legend, or more if they need it."""
        if entries:
            self._legend.append(list(entries))

    def legends(
        self,
        looks: dict[str, Look],
        drawn: pd.DataFrame,
        *extra: Entry,
        line: bool = True,
        crossed: str = series_style.MARK_WORDS["oversubscribed"],
    ) -> None:
        """Add colour and marker of each drawn series, and a row with the fill of each execution of `drawn`.

        Crosses, if any, of oversubscribed runs or of what else is `crossed`, plus signs
        of disturbed ones, and `extra` entries follow in that row.
        """
        shown = {name for panel in self.panels for name in panel.series}
        self.names = self.names or series_style.short_names(looks)
        self.legend(
            [
                (looks[name].sample(), self.names[name])
                for name in looks
                if name in shown
            ]
        )
        entries: list[Entry] = []
        for execution in [
            name
            for name in series_style.EXECUTION_WORDS
            if name in set(drawn["execution"])
        ]:
            style = Look(series_style.NEUTRAL, "o", 0).line(execution) | (
                {} if line else {"linestyle": ""}
            )
            entries.append(
                (Line2D([], [], **style), series_style.EXECUTION_WORDS[execution])
            )
        marks = {
            "oversubscribed": (series_style.cross(), crossed),
            "disturbed": (
                series_style.plus(),
                "disturbed by other programs (no baseline)",
            ),
        }
        for mark, (style, words) in marks.items():
            marked = [panel for panel in self.panels if mark in panel.marks]
            entries += [(Line2D([], [], **style), words)] * bool(marked)
            for panel in marked:
                panel.explained.add(words)
        self.legend([*entries, *extra])

    def say(self, *sentences: str) -> None:
        """Add sentences to the caption, the most important first: a picture shows those that fit into four lines."""
        self._caption += [sentence for sentence in sentences if sentence]

    def method(self, *sentences: str) -> None:
        """Add sentences to the protocol, which stands in the caption's file only."""
        self._method += [sentence for sentence in sentences if sentence]

    def describe(
        self,
        results: Results,
        drawn: pd.DataFrame,
        *sentences: str,
        method: Sequence[str] = (),
        bars: bool = True,
        signs: tuple[str, str] = ("Crosses", "Plus signs"),
    ) -> None:
        """Append to the caption: model and data, executions and their bars, `sentences`, and the marks of `drawn`.

        The protocol is that of the study and its machines, then the sentences of
        `method`. `signs` are the marks of oversubscribed and disturbed points.
        """
        context = any(panel.has_context for panel in self.panels)
        self.say(
            caption.describe_label(results),
            caption.describe_executions(results, drawn, bars=bars),
            *(caption.describe_added(one, bars=bars) for one in self.added),
            *sentences,
            caption.describe_marks(drawn, *signs),
            "Pale grey: the series of the other panels." if context else "",
        )
        shortened = {name: short for name, short in self.names.items() if name != short}
        longer = [
            f"{shortened[name]} is {name}"
            for name in drawn["series"].unique()
            if name in shortened
        ]
        self.method(
            caption.describe_study(results, drawn),
            caption.describe_machines(results, drawn),
            *method,
            f"Names: {'; '.join(longer)}." if longer else "",
        )

    def data(self) -> pd.DataFrame:
        """Return the drawn data, one row per point or bar segment."""
        table = pd.concat([panel.data() for panel in self.panels], ignore_index=True)
        table = table.assign(figure=self.name)
        # The columns that every figure has stand first.
        first = [
            "figure",
            "panel",
            "series",
            "execution",
            "engine",
            "workers",
            "oversubscribed",
            "quantity",
            "x",
            "y",
        ]
        others = [name for name in table.columns if name not in first]
        return table.reindex(columns=[*first, *others])

    def caption(self) -> str:
        """Return the whole caption: the panels, what was run, what the marks mean, and the method."""
        method = f"Method: {' '.join(self._method)}" if self._method else ""
        return " ".join(
            part for part in (self._panel_names(), *self._caption, method) if part
        )

    def captions(self) -> list[str]:
        """Return the caption of each page; those of further pages name their panels only."""
        return [
            self.caption(),
            *(self._panel_names(page.panels) for page in self._pages[1:]),
        ]

    def _panel_names(self, panels: Sequence[Panel] = ()) -> str:
        letters: dict[str, list[str]] = {}
        for panel in panels or self.panels:
            letters.setdefault(panel.name, []).append(
                f"({panel.letter})" if panel.letter else ""
            )
        names = "; ".join(
            f"{', '.join(own)} {name}".strip() for name, own in letters.items() if name
        )
        return f"{names[:1].upper()}{names[1:]}." if names else ""

    def close(self) -> None:
        """Draw the error bars."""
        for panel in self.panels:
            panel.close()

    def finish(self, *, fixed: bool = True) -> list[Figure]:
        """Set the heights, write legend and caption, and return the figure of each page.

        Ticks are `fixed` as the layout has them: a rounded position may have room for
        others. Axes that are given to a reader, who may set other limits, keep their
        locators.
        """
        # Before the ticks are fixed, as error bars widen the limits.
        self.close()
        for number, page in enumerate(self._pages):
            self._finish(page, first=number == 0)
            for panel in page.panels if fixed else ():
                ticks = panel.ax.yaxis.get_majorticklocs()
                panel.ax.yaxis.set_major_locator(FixedLocator(ticks.tolist()))
            _round_places(page.figure)
        return [page.figure for page in self._pages]

    def _finish(self, page: Page, *, first: bool) -> None:
        size = self._caption_pt
        names = [] if self.style.titles else [self._panel_names(page.panels)]
        sentences = [*names, *self._caption] if first else names
        lines = self._fitting(sentences) if page.foot else []
        legends = []
        for entries in self._legend_of(page):
            legends += self._wrap(entries)
        row_in = _LEGEND_ROW_IN * self.style.scale
        # lines of each row
        tall = [max(name.count("\n") + 1 for _, name in row) for row in legends]
        strip = row_in * sum(tall) + 0.08 * self.style.scale
        feet = [_CAPTION_LINE * size / 72 * len(lines) + 0.16] * len(page.foot)
        # What legend and caption took more than was estimated, the panels give up.
        panels = min(page.panels_in, self.style.page_in - strip - sum(feet))
        heights = [max(panels, 0.5 * page.panels_in), strip, *feet]
        for row, above in zip(
            legends, itertools.accumulate(tall, initial=0), strict=False
        ):
            handles, labels = zip(*row, strict=True)
            top = 1 - (0.02 + row_in * above) / strip
            legend = page.strip.legend(
                handles,
                labels,
                loc="upper center",
                ncols=len(row),
                bbox_to_anchor=(0.5, top),
                borderaxespad=0,
            )
            # It has a strip of its own; the layout would make room for it twice.
            legend.set_in_layout(False)
        for foot in page.foot:
            at = 1 - 0.05 / heights[-1]
            foot.text(
                0.02, at, "\n".join(lines), va="top", size=size, linespacing=1.25
            ).set_in_layout(False)
        layout = page.figure.get_layout_engine()
        assert layout is not None
        self._set_heights(page, heights)
        layout.execute(page.figure)  # once for all formats
        # a wrapped label takes from the width of the titles
        for _ in range(_MOST_LAYOUTS):
            if not _fit_texts(page):
                break
            self._set_heights(page, heights)
            layout.execute(page.figure)
        # Drawing would lay it out again for each format, with other roundings.
        page.figure.set_layout_engine("none")

    def _set_heights(self, page: Page, heights: Sequence[float]) -> None:
        """Set the heights of panels, legend and caption; further lines of titles take further room, if there is."""
        panels, *below = heights
        titles = _further_lines(page) * _TITLE_LINE * rcParams["axes.titlesize"] / 72
        more = max(0.0, min(titles, self.style.page_in - sum(heights)))
        page.figure.set_size_inches(self.style.width_in, sum(heights) + more)
        page.bands.set_height_ratios([panels + more, *below])

    @property
    def _caption_pt(self) -> float:
        return max(
            self.style.small,
            _CAPTION_PT * self.style.scale * (self.style.size >= REPORT.size),
        )

    def _fitting(self, sentences: Sequence[str]) -> list[str]:
        """Return the lines of the caption in the picture: the sentences that fit, a first one that does not cut."""
        across = int(
            _CHARACTERS_PER_POINT_AND_IN * self.style.width_in / self._caption_pt
        )
        lines: list[str] = []
        text = ""
        for sentence in sentences:
            longer = textwrap.wrap(
                f"{text} {sentence}".strip(), across, break_on_hyphens=False
            )
            if len(longer) <= _MOST_LINES:
                text = f"{text} {sentence}".strip()
                lines = longer
            elif not lines:
                lines = textwrap.wrap(
                    sentence,
                    across,
                    max_lines=_MOST_LINES,
                    placeholder=" …",
                    break_on_hyphens=False,
                )
        return lines

    def _legend_of(self, page: Page) -> Iterator[list[Entry]]:
        """Yield the rows of a page's legend, without what is drawn on other pages only."""
        everywhere = set.union(*map(self._explained, self._pages))
        here = self._explained(page)
        wide = any(panel.marks_wide for panel in page.panels)
        marks = [(Line2D([], [], **series_style.wide_interval()), WIDE)] if wide else []
        *rows, last = self._legend or [[]]
        for entries in [*rows, [*last, *marks]]:
            # A page explains what is drawn on it, and what no page draws as a series.
            kept = [
                entry
                for entry in entries
                if entry[1] in here or entry[1] not in everywhere
            ]
            if kept:
                yield kept

    def _explained(self, page: Page) -> set[str]:
        """Return the words of the legend for what is drawn on a page."""
        series = {self.names.get(name, name) for name in page.series}
        return series.union(*(panel.explained for panel in page.panels))

    def _wrap(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Break one row of the legend into rows that fit the width, and names that are wider into lines."""
        size = rcParams["legend.fontsize"]
        around = (
            rcParams["legend.handlelength"]
            + rcParams["legend.handletextpad"]
            + rcParams["legend.columnspacing"]
        )
        widest = 72 * self.style.width_in - around * size
        entries = [
            (handle, series_style.wrapped(name, widest, size))
            for handle, name in entries
        ]
        taken = [
            around * size
            + max(series_style.width(line, size) for line in name.split("\n"))
            for _, name in entries
        ]
        rows: list[list[Entry]] = []
        room = 0.0
        for entry, needed in zip(entries, taken, strict=True):
            # Rows of many short entries are hard to read, though they fit.
            if not rows or needed > room or len(rows[-1]) == _MOST_IN_ROW:
                rows.append([])
                room = 72 * self.style.width_in
            rows[-1].append(entry)
            room -= needed
        return rows


def _further_lines(page: Page) -> int:
    """Return how many lines the titles of a page take besides one for each row of panels."""
    lines: dict[tuple[GridSpecBase, int], int] = {}  # by grid and row
    for panel in page.panels:
        place = panel.ax.get_subplotspec()
        assert place is not None
        row = place.get_gridspec(), place.rowspan.start
        lines[row] = max(lines.get(row, 0), panel.ax.get_title(loc="left").count("\n"))
    return sum(lines.values())


def _fit_texts(page: Page) -> bool:
    """Wrap titles and labels that are longer than their panel; return True if there are any."""
    labels = [
        panel.fit_label(panel.ax.get_window_extent().height * 72 / page.figure.dpi)
        for panel in page.panels
    ]
    return _fit_titles(page) or any(labels)


def _fit_titles(page: Page) -> bool:
    """Wrap the titles that reach over the next panel or the end of the page; return True if there are any.

    Where a panel begins follows from the layout: labels of its y axis take more of its
    width in small figures.
    """
    places = [
        (panel, panel.ax.get_window_extent())
        for panel in page.panels
        if panel.ax.get_visible()
    ]
    end = page.figure.bbox.x1
    changed = False
    for panel, own in places:
        alongside = [
            other for _, other in places if other.y0 < own.y1 and other.y1 > own.y0
        ]
        beside = [other.x0 for other in alongside if other.x0 > own.x0]
        room = (min([end, *beside]) - own.x0) * 72 / page.figure.dpi - _TITLE_GAP_PT
        # All panels of a page, also behind one that changed: one layout for all.
        changed |= panel.title_pt > room and panel.fit_title(room)
    return changed


def _height(rows: Sequence[tuple[int, float]]) -> float:
    """Return the height of rows of panels, each (number of panels, height)."""
    return sum(height for _, height in rows)


def _filled(
    parts: Sequence[Sequence[tuple[int, float]]], room: float
) -> list[list[tuple[int, float]]]:
    """Return the rows of as few pages as possible, each with at most `room` for its parts, or with one part."""
    pages: list[list[tuple[int, float]]] = [[]]
    for part in parts:
        if pages[-1] and _height(pages[-1]) + _height(part) > room:
            pages.append([])
        pages[-1] += part
    return pages


def _round_places(figure: FigureBase) -> None:
    """Round positions: the last digits of the layout depend on earlier figures, and equal records give equal bytes."""
    for part in figure.subfigs:
        part.bbox_relative.p0, part.bbox_relative.p1 = (
            np.round(p, 5) for p in part.bbox_relative.get_points()
        )
        _round_places(part)
    for ax in figure.get_children():
        if isinstance(ax, Axes):
            ax.set_position(np.round(ax.get_position().bounds, 5).tolist())
