"""The what-if figure: training time along one axis, or over two axes with the borders of the binding components."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from scalebench.figures.drawing.canvas import Entry
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.styles import cross
from scalebench.figures.plotting import picture
from scalebench.figures.prediction import OUTSIDE

if TYPE_CHECKING:  # pricing imports torch
    from scalebench.pricing.what_if import Plane

_HATCH = "xx"
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


def draw_what_if(path: Path, plane: Plane, what: str) -> None:
    """Write the figure of `plane` to `path`; `what` says what was priced.

    Raises:
        ResultsError: the file cannot be written, or its ending is not that of a figure.
    """
    used = [place for place in range(len(plane.components)) if (plane.bound == place).any()]
    with picture(path, "what-if") as canvas:
        [[panel]] = canvas.grids((1, 1, 3.6))
        (_draw_line if len(plane.axes) == 1 else _draw_map)(panel, plane, used)
        names = [plane.components[place] for place in used]
        entries: list[Entry] = [(Patch(color=COLORS[name], alpha=0.6), f"bound by {name}") for name in names]
        if plane.marked.any():
            mark = Line2D([], [], **cross()) if len(plane.axes) == 1 else Patch(facecolor="none", hatch=_HATCH)
            entries.append((mark, OUTSIDE))
        canvas.legend(entries)
        canvas.say(f"Modelled: {what}.")


def _draw_line(panel: Panel, plane: Plane, used: Sequence[int]) -> None:
    (axis,) = plane.axes
    x, y = np.asarray(axis.values), plane.train_s[:, 0]
    panel.ax.plot(x, y, color="#444444", linestyle="--")
    for place in used:
        here = plane.bound[:, 0] == place
        panel.ax.scatter(x[here], y[here], s=14, color=COLORS[plane.components[place]], zorder=3)
    panel.ax.plot(x[plane.marked[:, 0]], y[plane.marked[:, 0]], **cross(), zorder=4)
    panel.seconds_axis(label="training time (s)")
    _label(panel, "x", axis.title, axis.values)


def _draw_map(panel: Panel, plane: Plane, used: Sequence[int]) -> None:
    rows, columns = plane.axes
    x, y = np.asarray(columns.values), np.asarray(rows.values)
    ax, top = panel.ax, len(plane.components) - 0.5
    mesh = ax.pcolormesh(x, y, plane.train_s, norm=LogNorm(), cmap="Greys", shading="nearest", rasterized=True)
    ticks = LogLocator(subs=(1.0, 2.0, 5.0))
    ax.figure.colorbar(mesh, ax=ax, label="training time (s)", ticks=ticks, format=lambda value, _: f"{value:,.10g}")
    colors = ListedColormap([COLORS[name] for name in plane.components])
    ax.pcolormesh(x, y, plane.bound, cmap=colors, alpha=0.35, shading="nearest", rasterized=True, vmin=-0.5, vmax=top)
    for place in used if len(used) > 1 else ():
        ax.contour(x, y, (plane.bound == place).astype(float), levels=[0.5], colors="black", linewidths=0.8)
    if plane.marked.any():
        ax.contourf(x, y, plane.marked.astype(float), levels=[0.5, 1.5], colors="none", hatches=[_HATCH])
    ax.grid(visible=False)
    _label(panel, "x", columns.title, columns.values)
    _label(panel, "y", rows.title, rows.values)


def _label(panel: Panel, which: str, title: str, values: Sequence[float]) -> None:
    """Name an axis, which is logarithmic for values over a decade or more."""
    if min(values) > 0 and max(values) / min(values) >= 10:
        panel.seconds_axis(which, label=title)
    else:
        getattr(panel.ax, f"set_{which}label")(title)
