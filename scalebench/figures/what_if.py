"""The what-if figure: training time along one axis, or over two axes with the borders of the binding components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from scalebench.figures.drawing.canvas import Entry
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.series_style import NEUTRAL, Look, cross, looks
from scalebench.figures.plotting import picture
from scalebench.figures.prediction import OUTSIDE

if TYPE_CHECKING:  # pricing imports torch
    from scalebench.pricing.what_if import Plane

_HATCH = "xx"
_BESIDE = 0.006  # of an axis, between the bars of two strategies
COLORS = {
    "compute": "#4477AA",
    "network bandwidth": "#EE6677",
    "network latency": "#CCBB44",
    "memory bandwidth": "#228833",
    "launch overhead": "#66CCEE",
    "engine": "#AA3377",
    "Horovod cycle": "#882255",
    "input": "#BBBBBB",
    "epoch overhead": "#777777",
    "jitter": "#000000",
}


def draw_what_if(path: Path, planes: Mapping[str, Plane], what: str) -> None:
    """Write the figure of the `planes` of one or more strategies, all over the same axes; `what` says what was priced.

    Strategies share the panel of one axis, and each has its own over two axes, in one scale of greys.

    Raises:
        ResultsError: the file cannot be written, or its ending is not that of a figure.
    """
    (first, *_), look = planes.values(), looks(planes)
    bound = dict.fromkeys(plane.components[place] for plane in planes.values() for place in np.unique(plane.bound))
    entries: list[Entry] = [(Patch(color=COLORS[name], alpha=0.6), f"bound by {name}") for name in bound]
    with picture(path, "what-if") as canvas:
        lines = len(first.axes) == 1
        [panels] = canvas.grids((1, 1, 3.6) if lines else (len(planes), canvas.fits(2), 3.6))
        if lines:
            [panel] = panels
            for place, (name, plane) in enumerate((name, planes[name]) for name in look):
                beside = _BESIDE * (place - (len(planes) - 1) / 2) * (plane.low is not None)
                _draw_line(panel, plane, look[name] if len(planes) > 1 else None, beside)
            panel.seconds_axis(label="training time (s)")
            _label(panel, "x", first.axes[0].title, first.axes[0].values)
            canvas.legend([(look[name].sample(), name) for name in look] if len(planes) > 1 else [])
        else:
            everything = np.concatenate([plane.train_s.ravel() for plane in planes.values()])
            scale = LogNorm(everything.min(), everything.max())
            for panel, (name, plane) in zip(panels, planes.items(), strict=True):
                panel.title(name)
                _draw_map(panel, plane, scale)
        if any(plane.marked.any() for plane in planes.values()):
            mark = Line2D([], [], **cross()) if lines else Patch(facecolor="none", hatch=_HATCH)
            entries.append((mark, OUTSIDE))
        canvas.legend(entries)
        bars = "Bars: the interval of the prediction." if lines and first.low is not None else ""
        canvas.say(f"Modelled: {what}.", bars)


def _draw_line(panel: Panel, plane: Plane, look: Look | None, beside: float) -> None:
    """Draw the times along one axis, each mark in the colour of what binds; the line is grey for a lone strategy.

    All is shifted by `beside`, a share of the axis, so that bars at the same value do not cover each other.
    """
    (axis,) = plane.axes
    x, y = np.asarray(axis.values), plane.train_s[:, 0]
    x = x * (x.max() / x.min()) ** beside if _logarithmic(axis.values) else x + beside * (x.max() - x.min())
    style = look.line("modelled") if look else Look(NEUTRAL, "o", 0).line("modelled")
    panel.ax.plot(x, y, **style | {"marker": ""})
    if plane.low is not None and plane.high is not None:
        panel.ax.vlines(x, plane.low[:, 0], plane.high[:, 0], colors=style["color"], linewidths=0.8)
    for place in np.unique(plane.bound):
        here = plane.bound[:, 0] == place
        color = COLORS[plane.components[place]]
        panel.ax.scatter(x[here], y[here], s=14, marker=style["marker"], color=color, zorder=3)
    panel.ax.plot(x[plane.marked[:, 0]], y[plane.marked[:, 0]], **cross(), zorder=4)


def _draw_map(panel: Panel, plane: Plane, scale: LogNorm) -> None:
    rows, columns = plane.axes
    x, y = np.asarray(columns.values), np.asarray(rows.values)
    ax, top = panel.ax, len(plane.components) - 0.5
    mesh = ax.pcolormesh(x, y, plane.train_s, norm=scale, cmap="Greys", shading="nearest", rasterized=True)
    ticks = LogLocator(subs=(1.0, 2.0, 5.0))
    ax.figure.colorbar(mesh, ax=ax, label="training time (s)", ticks=ticks, format=lambda value, _: f"{value:,.10g}")
    colors = ListedColormap([COLORS[name] for name in plane.components])
    ax.pcolormesh(x, y, plane.bound, cmap=colors, alpha=0.35, shading="nearest", rasterized=True, vmin=-0.5, vmax=top)
    used = np.unique(plane.bound)
    for place in used if len(used) > 1 else ():
        ax.contour(x, y, (plane.bound == place).astype(float), levels=[0.5], colors="black", linewidths=0.8)
    if plane.marked.any():
        ax.contourf(x, y, plane.marked.astype(float), levels=[0.5, 1.5], colors="none", hatches=[_HATCH])
    ax.grid(visible=False)
    _label(panel, "x", columns.title, columns.values)
    _label(panel, "y", rows.title, rows.values)


def _label(panel: Panel, which: str, title: str, values: Sequence[float]) -> None:
    """Name an axis, which is logarithmic for values over a decade or more."""
    if _logarithmic(values):
        panel.seconds_axis(which, label=title)
    else:
        getattr(panel.ax, f"set_{which}label")(title)


def _logarithmic(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= 10
