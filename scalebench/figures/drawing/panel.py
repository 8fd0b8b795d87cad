"""One panel: draws curves and stacked bars, and keeps every number it draws."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from scalebench.analysis.formatting import digits
from scalebench.figures.drawing.styles import NEUTRAL, Look

_INCHES_PER_LABEL = 0.24
Row = dict[str, object]


@dataclass(frozen=True)
class Segment:
    """One part of a stacked bar; a signed part hangs below zero."""

    part: str
    value: float
    color: str
    hatch: str = ""


class Panel:
    """Axes with a title, an x of worker counts if wanted, and the list of what was drawn."""

    def __init__(self, ax: Axes, width_in: float) -> None:
        self.ax = ax
        self.drawn: list[Row] = []
        self._width_in = width_in
        self._title = ""

    def title(self, letter: str, text: str) -> None:
        """`(a) training time`, the text also naming the panel in the drawn data."""
        self._title = text
        self.ax.set_title(f"({letter}) {text}" if letter else text)

    def curve(
        self,
        frame: pd.DataFrame,
        quantity: str,
        looks: Mapping[str, Look],
        *,
        x: str = "workers",
        low: str = "",
        high: str = "",
        scale: float = 1.0,
        shift: bool = True,
        connect: bool = True,
        crosses: str = "all",
    ) -> None:
        """A line with markers for each series and execution of `frame`, with error bars from `low` to `high`.

        `frame` has the columns execution, engine, series, workers and oversubscribed; rows without a value are left
        out. `scale` turns its unit into that of the axis; the drawn data has the unit of the axis. `crosses` marks all
        oversubscribed points or only the `last` of each line.
        """
        for (execution, name), group in frame[frame[quantity].notna()].groupby(["execution", "series"], sort=False):
            group = group.sort_values(x)
            look = looks[str(name)]
            at = group[x].astype(float).to_numpy() * (2**look.shift if shift else 1)
            y = scale * group[quantity].astype(float).to_numpy()
            bounds = [scale * group[name].astype(float).to_numpy() for name in (low, high)] if low else None
            if bounds:
                known = np.isfinite(bounds[0]) & np.isfinite(bounds[1])
                error = np.abs(np.array(bounds) - y)[:, known]
                self.ax.errorbar(
                    at[known], y[known], error, fmt="none", ecolor=look.color, elinewidth=0.8, alpha=0.8, zorder=2
                )
            style = look.line(str(execution)) | ({} if connect else {"linestyle": ""})
            self.ax.plot(at, y, zorder=4 if execution == "native" else 3, **style)
            crossed = np.flatnonzero(group["oversubscribed"].to_numpy(dtype=bool))[-1 if crosses == "last" else 0 :]
            self.mark_oversubscribed(at[crossed], y[crossed])
            self._keep(group, quantity, x, y, bounds)

    def mark_oversubscribed(self, at: Any, y: Any) -> None:
        """Crosses over points that the machine could not feed."""
        self.ax.plot(at, y, linestyle="", marker="x", markersize=7, markeredgewidth=1.3, color=NEUTRAL, zorder=5)

    def reference(self, xs: Sequence[float], ys: Sequence[float], name: str) -> None:
        """A dotted line that no run drew, such as ideal scaling."""
        self.ax.plot(xs, ys, color="#888888", linestyle=":", linewidth=1.2, zorder=1)
        self.drawn += [{"panel": self._title, "series": name, "x": x, "y": y} for x, y in zip(xs, ys, strict=True)]

    def stack(
        self, at: float, segments: Sequence[Segment], key: Mapping[str, object], *, hollow: bool, quantity: str
    ) -> None:
        """A stacked bar at `at`: positive parts upwards from zero, negative ones downwards."""
        ends = {True: 0.0, False: 0.0}
        for segment in segments:
            self.drawn.append(
                {"panel": self._title, **key, "quantity": f"{quantity}: {segment.part}", "y": segment.value}
            )
            if not math.isfinite(segment.value) or segment.value == 0:
                continue
            up = segment.value > 0
            self.ax.bar(
                at,
                segment.value,
                0.78,
                bottom=ends[up],
                facecolor="white" if segment.hatch else _tint(segment.color) if hollow else segment.color,
                edgecolor=segment.color,
                linewidth=0.9,
                hatch=segment.hatch,
                zorder=2,
            )
            ends[up] += segment.value

    def workers_axis(self, counts: Sequence[int]) -> None:
        """log2 x with ticks at the measured counts; labels that would touch are left out."""
        self.ax.set_xscale("log", base=2)
        self.ax.set_xlim(min(counts) * 2**-0.45, max(counts) * 2**0.45)
        octave_in = 0.72 * self._width_in / (math.log2(max(counts) / min(counts)) + 0.9)
        room = _INCHES_PER_LABEL / octave_in
        labelled: list[int] = []
        for count in sorted(counts, reverse=True):  # the largest count is what a reader looks for
            if not labelled or math.log2(labelled[-1] / count) >= room:
                labelled.append(count)
        self.ax.xaxis.set_major_locator(FixedLocator(sorted(counts)))
        self.ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}" if round(x) in labelled else ""))
        self.ax.xaxis.set_minor_locator(NullLocator())
        self.ax.set_xlabel("workers")

    def seconds_axis(self, which: str = "y", label: str = "training time (s)") -> None:
        """A log axis of seconds with plain numbers."""
        axis = getattr(self.ax, f"{which}axis")
        getattr(self.ax, f"set_{which}scale")("log")
        low, high = getattr(self.ax, f"get_{which}lim")()
        room = self._width_in * 0.72 / 0.4 if which == "x" else 10
        crowded = 3 * math.log10(high / low) > room
        axis.set_major_locator(LogLocator(subs=(1.0,) if crowded else (1.0, 2.0, 5.0), numticks=20))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
        axis.set_minor_locator(NullLocator())
        getattr(self.ax, f"set_{which}label")(label)

    def empty(self, why: str) -> None:
        """Say why there is nothing to see."""
        self.ax.text(0.5, 0.5, why, transform=self.ax.transAxes, ha="center", va="center", color="#777777", wrap=True)
        self.ax.set_xticks([])
        self.ax.set_yticks([])

    def keep(self, rows: Sequence[Mapping[Hashable, object]], **more: object) -> None:
        """Remember numbers that were drawn by other means."""
        self.drawn += [
            {"panel": self._title, **{str(name): value for name, value in row.items()}, **more} for row in rows
        ]

    def _keep(self, group: pd.DataFrame, quantity: str, x: str, y: Any, bounds: list[Any] | None) -> None:
        kept = ["series", "execution", "engine", "workers", "oversubscribed"]
        kept += [name for name in ("interval", "n") if name in group]
        rows = group[kept].assign(quantity=quantity, x=group[x], y=y)
        if bounds:
            rows = rows.assign(low=bounds[0], high=bounds[1])
        self.keep(rows.to_dict("records"))


def _plain(value: float) -> str:
    return digits(value, 1) if value < 1000 else f"{value:g}"


def _tint(color: str) -> tuple[float, float, float]:
    """The colour mixed with white, for what was not measured."""
    red, green, blue = (int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return (0.62 + 0.38 * red, 0.62 + 0.38 * green, 0.62 + 0.38 * blue)
