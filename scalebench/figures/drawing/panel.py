"""One panel of curves or stacked bars, with the numbers that it shows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams, ticker
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis.intervals import METRIC_RANGE
from scalebench.figures.drawing import series_style
from scalebench.figures.drawing.series_style import Look, width
from scalebench.figures.style import REPORT, Style
from scalebench.formatting import digits, metric_word
from scalebench.study.cell import BATCH, columns_without
from scalebench.study.spec import SIMULATED

_LABEL_PER_POINT_IN = 0.03  # width of a tick label
_LETTER_PER_POINT_IN = 0.0085  # width of a digit
_MOST_LABELS = 10  # of a y axis
_TITLE_SHARE = 0.8  # of a panel's width: titles begin where the axes do
_BAR = 0.78
# zorder of crosses and plus signs, whose arms show around the point that they would
# hide
_BEHIND = 2.5
_CONTEXT = "#D0D0D0"
_LINE_WIDTH = 0.005  # of the range of a panel's values: a difference that is not seen
_MOST_SHIFT = 0.4  # of the gap between neighbouring points
# columns of every drawn point: its cell, under the name of the series
POINT = ["series", *columns_without("label", *BATCH), "oversubscribed"]
Bar = tuple[tuple[float, float], tuple[float, float]]
Values = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Segment:
    """One part of a stacked bar; negative parts lie below zero. `pattern` tells it from others in grey."""

    part: str
    value: float
    color: str
    pattern: str = ""
    measured: bool = True


@dataclass(frozen=True)
class Curve:
    """A quantity along an axis: the columns of a table that are drawn, and how their lines are told apart.

    `band` has the columns of the ends of error bars; `scale` turns the unit of the
    quantity into that of the axis. Points at one worker count are set apart sideways
    (`shift`), but not where the quantity falls with workers: there a point set aside
    would stand on the line of a faster series. Lines that cover each other are drawn
    `apart_pt` points apart, each a little higher than the one before, or `aside`, by
    this times the shift of their look. A `sparse` line has error bar, cross and plus
    sign at its last point only.
    """

    quantity: str
    over: str = "workers"
    band: tuple[str, str] | None = None
    scale: float = 1.0
    shift: bool = True
    connect: bool = True
    sparse: bool = False
    apart_pt: float = 0.0
    aside: float = 0.0

    def places(self, rows: pd.DataFrame, look: Look, crowded: float) -> Values:
        """Return where along the axis the points of one series are drawn, (n,)."""
        # Counts lie an octave apart, so a shift along them is a factor; one along times
        # is added.
        factor = 2 ** (look.shift * crowded) if self.shift else 1
        at: Values = rows[self.over].astype(float).to_numpy()
        return at * factor + self.aside * look.shift

    def values(self, rows: pd.DataFrame) -> Values:
        """Return the quantity in the unit of the axis, (n,)."""
        numbers: Values = rows[self.quantity].astype(float).to_numpy()
        return self.scale * numbers


REDUCTION = Curve("reduction", band=("reduction_low", "reduction_high"), scale=100)


class Panel:
    """Axes with a title, and a record of the drawn numbers."""

    def __init__(self, ax: Axes, width_in: float, style: Style = REPORT) -> None:
        self.ax = ax
        self.width_in = width_in
        self.style = style
        self.letter = ""
        self.leftmost = True
        self.name = ""
        self._title = ""
        self.series: set[str] = set()  # drawn as curves
        # words of the legend for what is drawn here besides curves
        self.explained: set[str] = set()
        self.marks: set[str] = set()  # of MARKS, over points
        self._tables: list[pd.DataFrame] = []
        self._rows: list[dict[str, object]] = []
        # with colour and point
        self._bars: list[tuple[Bar, str, tuple[float, float]]] = []
        self._ends: list[float] = []
        self._lines: list[Line2D] = []
        self.has_context = False
        self._top = math.inf
        self._fitted = False
        self.marks_wide = False  # an interval is wider than the panel

    def title(self, text: str, name: str = "") -> None:
        """Set the title `(a) training time`, in as many lines as it takes; `name` (default: `text`) labels the data."""
        self.name = name or text
        letter = f"({self.letter}) " if self.letter else ""
        self._title = letter + text if self.style.titles else letter.strip()
        self.fit_title(72 * _TITLE_SHARE * self.width_in)

    @property
    def title_pt(self) -> float:
        """Return the width of the title's widest line."""
        lines = self.ax.get_title(loc="left").split("\n")
        return max(width(line, rcParams["axes.titlesize"]) for line in lines)

    def fit_title(self, points: float) -> bool:
        """Wrap the title to lines of at most `points`; return True if that changes it."""
        before = self.ax.get_title(loc="left")
        lines = series_style.wrapped(self._title, points, rcParams["axes.titlesize"])
        self.ax.set_title(lines, linespacing=1.05)
        return lines != before

    def fit_label(self, points: float) -> bool:
        """Wrap the label of the y axis to lines of at most `points`; return True if that changes it."""
        before = self.ax.get_ylabel()
        lines = series_style.wrapped(
            before.replace("\n", " "), points, rcParams["axes.labelsize"]
        )
        self.ax.yaxis.label.set(text=lines, linespacing=1.05)
        return lines != before

    def curves(
        self,
        frame: pd.DataFrame,
        group: Sequence[str],
        curve: Curve,
        looks: Mapping[str, Look],
    ) -> None:
        """Draw the series of `group`, over all others of `frame` in grey."""
        inside = frame["series"].isin(group)
        self.context(frame[~inside], curve)
        self.curve(frame[inside], curve, looks)

    def curve(
        self, frame: pd.DataFrame, curve: Curve, looks: Mapping[str, Look]
    ) -> None:
        """Draw a line with markers for each series and execution of `frame`, with its error bars.

        `frame` has the columns execution, engine, series, workers, oversubscribed and,
        of measured times, disturbed; rows without a value are left out. The drawn data
        has the unit of the axis.
        """
        own = [name for name in looks if name in set(frame["series"])]
        crowded = _fitting_shift(frame[curve.over]) if curve.shift else 1.0
        lifts = _lifts(frame, curve, own) if curve.apart_pt else {}
        shown = slice(-1 if curve.sparse else 0, None)
        marked: dict[str, list[tuple[float, float]]] = {
            name: [] for name in MARKS if name in frame
        }
        known = frame[frame[curve.quantity].notna()]
        for (execution, name), group in known.groupby(
            ["execution", "series"], sort=False
        ):
            group = group.sort_values(curve.over)
            look = looks[str(name)]
            at = curve.places(group, look, crowded)
            y = curve.values(group)
            if curve.band:
                bounds = curve.scale * group[list(curve.band)].to_numpy(dtype=float)
                self._upright_bars(at[shown], y[shown], bounds[shown], look.color)
            drawn = self._line(at, y, look, str(execution), connect=curve.connect)
            self.series.add(str(name))
            self.explained.add(series_style.EXECUTION_WORDS.get(str(execution), ""))
            for mark, places in marked.items():
                flags = group[mark].fillna(False).to_numpy(dtype=bool)
                hit = np.flatnonzero(flags)[shown]
                if len(hit):
                    self.marks.add(mark)
                # Marks of lines that are set apart move with their line; others are
                # drawn at once, which is many times faster.
                if curve.apart_pt:
                    drawn += self._mark(mark, at[hit], y[hit])
                else:
                    places += list(zip(at[hit], y[hit], strict=True))
            if str(name) in lifts:
                self._lift(drawn, lifts[str(name)])
            self._lines += drawn
        self._keep_curves(known, curve)
        for mark in filter(marked.get, marked):
            self._mark(mark, *zip(*marked[mark], strict=True))

    def _mark(self, mark: str, x: ArrayLike, y: ArrayLike) -> list[Line2D]:
        return self.ax.plot(x, y, **MARKS[mark](), zorder=_BEHIND)

    def _upright_bars(self, x: Values, y: Values, bounds: Values, color: str) -> None:
        """Add the error bars through the points (x, y) with `bounds` (n, 2)."""
        bars = [
            ((at, bottom), (at, top))
            for at, (bottom, top) in zip(x, bounds, strict=True)
        ]
        self.intervals(bars, [color] * len(bars), list(zip(x, y, strict=True)))

    def _line(
        self,
        x: Values,
        y: Values,
        look: Look,
        execution: str,
        *,
        connect: bool,
    ) -> list[Line2D]:
        """Draw points with their markers, and connect them; native ones lie over the others."""
        style = look.line(execution) | ({} if connect else {"linestyle": ""})
        # Measured points must not be hidden by computed ones at the same place.
        order = 4 if execution == "native" else 3
        drawn = self.ax.plot(x, y, zorder=order, **style)
        if look.inside:
            drawn += self.ax.plot(x, y, zorder=order + 0.1, **look.inner(execution))
        return drawn

    def _lift(self, lines: Sequence[Line2D], points: float) -> None:
        """Draw lines higher by `points`, the same on all axes; limits remain those of their values."""
        figure = self.ax.get_figure(root=True)
        assert figure is not None
        # In points of the page, and behind the data: the CSV has the values.
        lifted = self.ax.transData + ScaledTranslation(
            0, points / 72, figure.dpi_scale_trans
        )
        for line in lines:
            line.set_transform(lifted)

    def context(self, frame: pd.DataFrame, curve: Curve) -> None:
        """Draw the curves, or points, of other panels in pale grey behind those of this one; they are not recorded."""
        style = (
            {"linewidth": 0.7 * rcParams["lines.linewidth"]}
            if curve.connect
            else {"marker": ".", "linestyle": ""}
        )
        for _, group in frame[frame[curve.quantity].notna()].groupby(
            ["execution", "series"], sort=False
        ):
            group = group.sort_values(curve.over)
            self.has_context = True
            self.ax.plot(
                group[curve.over],
                curve.scale * group[curve.quantity],
                color=_CONTEXT,
                zorder=1,
                **style,
            )

    def reductions(
        self,
        frame: pd.DataFrame,
        group: Sequence[str],
        looks: Mapping[str, Look],
        workers: Iterable[float],
    ) -> None:
        """Draw the reductions of `group` against a baseline in per cent, over all others in grey."""
        self.curves(frame, group, REDUCTION, looks)
        self.level(0.0, "no reduction", workers)
        self.ax.set_ylabel("time saved (%)")

    def intervals(
        self,
        bars: Sequence[Bar],
        colors: Sequence[str],
        points: Sequence[tuple[float, float]],
    ) -> None:
        """Add error bars, each through one of the `points`; they are drawn by `close` and do not set the limits."""
        for bar, color, point in zip(bars, colors, points, strict=True):
            # An open end, as of an interval without an upper bound, has no bar.
            if np.isfinite(bar).all():
                self._bars.append((bar, color, point))
                self._ends += [y for _, y in bar]

    def close(self) -> None:
        """Draw the error bars, and a mark in place of those that do not fit into the panel."""
        self.fit_intervals()
        (left, right), (low, high) = self.ax.get_xlim(), self.ax.get_ylim()

        def fits(bar: Bar) -> bool:
            return all(left <= x <= right and low <= y <= high for x, y in bar)

        fitting = [one for one in self._bars if fits(one[0])]
        if fitting:
            # One artist is many times faster than `errorbar`.
            segments, shades, _ = zip(*fitting, strict=True)
            lines = LineCollection(
                segments,
                colors=shades,
                linewidths=0.7 * rcParams["lines.linewidth"],
                zorder=2,
            )
            # Limits are set by `fit_intervals`, which does not let one wide bar flatten
            # the curves.
            self.ax.add_collection(lines, autolim=False)
        for (start, end), color, (x, y) in [
            one for one in self._bars if one not in fitting
        ]:
            self.marks_wide = True
            mark = series_style.wide_interval(color, upright=start[0] == end[0])
            self.ax.plot([x], [y], zorder=2, scalex=False, scaley=False, **mark)
        self._bars = []
        for line in self._lines:
            x, y = np.array(line.get_data(), dtype=float)
            # Marks at the edge of the panel, as of an accuracy of 1, are drawn whole.
            outside = (x < left) | (x > right) | (y < low) | (y > high)
            line.set_clip_on(bool(outside.any()))
            line.set_in_layout(False)

    def fit_intervals(self) -> None:
        """Widen the y limits towards the ends of error bars, by at most half the range of the points.

        The t interval of two repetitions is 12.7 standard errors wide and would flatten
        all curves.
        """
        if self._fitted:
            return
        self._fitted = True
        low, high = self.ax.get_ylim()
        if self._ends:
            log = self.ax.get_yscale() == "log"
            low, high, *ends = (
                np.log10([low, high, *self._ends]) if log else (low, high, *self._ends)
            )
            reach = 0.5 * max(
                high - low, 0.3 if log else 0.05 * max(abs(low), abs(high))
            )
            edge = 0.02 * (high - low)
            low = min(low, max(min(ends) - edge, low - reach))
            high = max(high, min(max(ends) + edge, high + reach))
            low, high = np.power(10, (low, high)) if log else (low, high)
        if math.isfinite(self._top):
            # A little above the largest possible value, so that marks there are whole.
            high = min(high, self._top + 0.03 * (self._top - low))
        self.ax.set_ylim(low, high)

    def reference(self, xs: Sequence[float], ys: Sequence[float], name: str) -> None:
        """Draw a dotted reference line, such as ideal scaling."""
        self.ax.plot(xs, ys, color="#888888", linestyle=":", linewidth=1.2, zorder=1)
        self._rows += [
            {"panel": self.name, "series": name, "x": x, "y": y}
            for x, y in zip(xs, ys, strict=True)
        ]

    def stack(
        self,
        at: float,
        segments: Sequence[Segment],
        key: Mapping[str, object],
        quantity: str,
    ) -> None:
        """Draw a stacked bar at x = `at`: positive parts above zero, negative parts below.

        Simulated times are pale, those of modelled runs with a dashed edge.
        """
        ends = {True: 0.0, False: 0.0}
        edge = 0.7 * rcParams["lines.linewidth"]
        self.explained.add(series_style.EXECUTION_WORDS[str(key["execution"])])
        for segment in segments:
            shown = segment.value if segment.measured else math.nan
            self._rows.append(
                {
                    "panel": self.name,
                    **key,
                    "quantity": f"{quantity}: {segment.part}",
                    "y": shown,
                }
            )
            if not math.isfinite(segment.value) or segment.value == 0:
                continue
            self.explained.add(segment.part)
            up = segment.value > 0
            corner = (at - _BAR / 2, ends[up])
            face: Any = segment.color
            if not segment.measured:
                face = "white"
            elif key["execution"] in SIMULATED:
                face = tint(segment.color)
            bar = Rectangle(
                corner,
                _BAR,
                segment.value,
                fc=face,
                ec=segment.color,
                lw=edge,
                ls="--" if key["execution"] == "modelled" else "-",
                hatch=hatch_of(segment, self.style),
                zorder=2,
            )
            self.ax.add_artist(bar)
            ends[up] += segment.value
        # Once for all parts: `add_patch`, for each, takes as long as their drawing.
        if ends[True] > ends[False]:
            self.ax.update_datalim(
                [(at - _BAR / 2, ends[False]), (at + _BAR / 2, ends[True])]
            )

    def level(self, y: float, name: str, counts: Iterable[float]) -> None:
        """Draw a dotted horizontal line over the worker counts."""
        ends = [min(counts), max(counts)]
        self.reference(ends, [y, y], name)

    def metric_axis(self, metric: str) -> None:
        """Label the y axis, which ends beyond the range of the metric."""
        self.ax.set_ylabel(metric_label(metric))
        self._top = METRIC_RANGE.get(metric, (-math.inf, math.inf))[1]

    def workers_axis(self, workers: Iterable[float]) -> None:
        """Set a log2 x axis with ticks at the measured counts, without labels that would touch."""
        counts = sorted({int(count) for count in workers})
        self.ax.set_xscale("log", base=2)
        self.ax.set_xlim(min(counts) * 2**-0.45, max(counts) * 2**0.45)
        octave_in = 0.72 * self.width_in / (math.log2(max(counts) / min(counts)) + 0.9)
        room = _LABEL_PER_POINT_IN * rcParams["xtick.labelsize"] / octave_in
        labelled: list[int] = []
        for count in reversed(counts):  # the largest count is always labelled
            if not labelled or math.log2(labelled[-1] / count) >= room:
                labelled.append(count)
        self.ax.xaxis.set_major_locator(ticker.FixedLocator(counts))
        self.ax.xaxis.set_major_formatter(
            ticker.FuncFormatter(
                lambda x, _: f"{x:.0f}" if round(x) in labelled else ""
            )
        )
        self.ax.xaxis.set_minor_locator(ticker.NullLocator())
        self.ax.set_xlabel("workers")

    def seconds_axis(self, which: str = "y", label: str = "training time (s)") -> None:
        """Set a log axis, as of seconds, with plain numbers."""
        axis = getattr(self.ax, f"{which}axis")
        getattr(self.ax, f"set_{which}scale")("log")
        if which == "y":
            self.fit_intervals()
        low, high = getattr(self.ax, f"get_{which}lim")()
        dense = [tuple(map(float, range(1, 10))), (1.0, 3.0, 5.0, 7.0)]
        usual = [(1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)]
        few = len(_ticks(usual[0], low, high))
        # A short axis, which has fewer than three of the ticks 1, 2 and 5, has more.
        denser = [
            subs for subs in dense if few < 3 and len(_ticks(subs, low, high)) > few
        ]
        fitting = [
            subs
            for subs in denser + usual
            if self._has_room(_ticks(subs, low, high), low, high, which)
        ]
        # so short that it is nearly linear
        if len(_ticks(range(1, 10), low, high)) < 2:
            letters = len(_plain(low)) + 2
            room = (
                0.72
                * self.width_in
                / (letters * _LETTER_PER_POINT_IN * rcParams["xtick.labelsize"])
            )
            locator = ticker.MaxNLocator(
                max(1, int(room)) if which == "x" else _MOST_LABELS // 2,
                steps=[1, 2, 5, 10],
            )
            axis.set_major_locator(locator)
            decimals = _decimals(locator.tick_values(low, high))
            axis.set_major_formatter(
                ticker.FuncFormatter(lambda value, _: f"{value:,.{decimals}f}")
            )
        else:
            axis.set_major_locator(
                ticker.LogLocator(subs=(fitting or usual[-1:])[0], numticks=20)
            )
            # 1000 in place of 10^3: readers compare times, not exponents.
            axis.set_major_formatter(
                ticker.FuncFormatter(lambda value, _: _plain(value))
            )
        # Minor ticks of a log axis would have labels of their own on short ones.
        axis.set_minor_locator(ticker.NullLocator())
        getattr(self.ax, f"set_{which}label")(label)

    def _has_room(
        self, ticks: Sequence[float], low: float, high: float, which: str
    ) -> bool:
        """Return True if the labels of these ticks do not touch on a log axis."""
        if which == "y":
            return len(ticks) <= _MOST_LABELS
        decade_in = 0.72 * self.width_in / math.log10(high / low)
        letter_in = _LETTER_PER_POINT_IN * rcParams["xtick.labelsize"]
        return all(
            math.log10(after / before) * decade_in
            >= letter_in * (1 + (len(_plain(before)) + len(_plain(after))) / 2)
            for before, after in pairwise(ticks)
        )

    def hide(self) -> None:
        """Hide a spare panel, which keeps its place in the grid."""
        self.ax.set_axis_off()
        self.ax.spines[:].set_visible(False)

    def keep(self, rows: Sequence[Mapping[Hashable, object]], **more: object) -> None:
        """Record numbers that were drawn directly on `ax`."""
        self._rows += [
            {"panel": self.name, **{str(name): row[name] for name in row}, **more}
            for row in rows
        ]

    def data(self) -> pd.DataFrame:
        """Return the drawn numbers, one row per point or bar segment."""
        return pd.concat([*self._tables, pd.DataFrame(self._rows)], ignore_index=True)

    def _keep_curves(self, frame: pd.DataFrame, curve: Curve) -> None:
        beside = _BESIDE.get(curve.quantity, ())
        also = ("disturbed", "interval", "n", *beside)
        kept = [*POINT, *(name for name in also if name in frame)]
        table = frame[kept].assign(
            panel=self.name,
            quantity=curve.quantity,
            x=frame[curve.over],
            y=curve.scale * frame[curve.quantity],
        )
        if curve.band:
            bounds = frame[list(curve.band)].to_numpy(dtype=float)
            table[["low", "high"]] = curve.scale * bounds
        self._tables.append(table)


MARKS = {
    "oversubscribed": series_style.cross,
    "disturbed": series_style.plus,
}  # over points

# Further columns of the CSV beside a figure, for quoting medians.
_BESIDE = {
    "train_s": ("median_s", "median_low_s", "median_high_s", "spread"),
    "reduction": ("median_ratio", "median_ratio_low", "median_ratio_high", "paired"),
}


def _lifts(frame: pd.DataFrame, curve: Curve, order: Sequence[str]) -> dict[str, float]:
    """Return the points by which lines are drawn higher that cover each other for the most part, in `order`."""
    known = frame[frame[curve.quantity].notna()]
    width = _LINE_WIDTH * (known[curve.quantity].max() - known[curve.quantity].min())
    heights = known.pivot_table(
        index=["execution", curve.over],
        columns="series",
        values=curve.quantity,
        aggfunc="first",
    )
    names = [name for name in order if name in heights]
    table = heights[names].to_numpy(dtype=float)  # (points, series)
    distances = np.abs(table[:, :, None] - table[:, None, :])
    with warnings.catch_warnings():
        # The median: lines may part at a few points and still look like one.
        # Series without a common point are not alike.
        warnings.filterwarnings("ignore", "All-NaN slice encountered")
        covered = np.nanmedian(distances, axis=0) <= width
    lifts: dict[str, float] = {}
    for name, covers in zip(names, covered, strict=True):
        alike = [other for other, hit in zip(names, covers, strict=True) if hit]
        if len(alike) > 1:
            middle = (len(alike) - 1) / 2
            lifts[name] = curve.apart_pt * (alike.index(name) - middle)
    return lifts


def metric_label(metric: str) -> str:
    """Return the name of a metric on held-out data, such as `test accuracy`."""
    return f"test {metric_word(metric)}"


def lettered(place: int) -> str:
    """Return the letter of a panel: a, b ... z, aa, ab ..."""
    after, letter = divmod(place, 26)
    return (lettered(after - 1) if after else "") + chr(ord("a") + letter)


def share_y(panels: Sequence[Panel], *, least: float = -math.inf) -> None:
    """Set the y range of all panels to the union of theirs; those that reach below `least` keep their own."""
    for panel in panels:
        panel.fit_intervals()
    alike = [panel for panel in panels if panel.ax.get_ylim()[0] >= least]
    if alike:
        low, high = zip(*(panel.ax.get_ylim() for panel in alike), strict=True)
        for panel in alike:
            panel.ax.set_ylim(min(low), max(high))


def hatch_of(segment: Segment, style: Style) -> str | None:
    """Return the hatch of a segment: `////` if it was not measured, else its pattern in styles that are printed."""
    if not segment.measured:
        return "////"
    return segment.pattern or None if style.patterns else None


def _fitting_shift(counts: pd.Series[int]) -> float:
    """Return the factor of sideways shifts (at most 0.2 octaves) that keeps points apart from the next count's."""
    # Counts may be closer than an octave, as 6 and 8 are.
    octaves = np.diff(np.log2(np.unique(counts.astype(float))))
    return min(1.0, float(octaves.min()) * _MOST_SHIFT / 0.2) if len(octaves) else 1.0


def _ticks(subs: Sequence[float], low: float, high: float) -> list[float]:
    """Return the multiples of powers of ten that lie on an axis, in order."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [sub * 10.0**power for power in powers for sub in subs]
    return [tick for tick in ticks if low <= tick <= high]


def _decimals(ticks: Sequence[float]) -> int:
    """Return the decimals that tell equally distant ticks apart, at distances of 1, 2 or 5 times a power of ten."""
    # 0.1 is the difference of two numbers, and a little less
    power = math.floor(math.log10(ticks[1] - ticks[0]) + 1e-6)
    return max(0, -power)


def _plain(value: float) -> str:
    return digits(value, 1 if math.isclose(value, float(f"{value:.0e}")) else 2)


def tint(color: str) -> tuple[float, float, float]:
    """Return the colour mixed with white, for simulated times."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return (0.62 + 0.38 * red, 0.62 + 0.38 * green, 0.62 + 0.38 * blue)
