"""The figure of a prediction: speedup, efficiency, and iso-efficiency: the batch and interval that hold one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.lines import Line2D

from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.series_style import looks
from scalebench.figures.plotting import picture

if TYPE_CHECKING:  # pricing imports torch
    from scalebench.pricing.advice import Held
    from scalebench.pricing.grid import Grid


OUTSIDE = "outside what the inputs hold for, or too large"

_APART_PT = 1.6  # between equal lines


def draw_prediction(path: Path, grid: Grid, held: Sequence[Held], what: str, of_all: bool) -> None:
    """Write the figure of `grid` to `path`, with what is `held` at each of its points.

    `what` says what was priced, and `of_all` that batches are those of all workers.

    Raises:
        ResultsError: the file cannot be written, or its ending is not that of a figure.
    """
    with picture(path, "prediction") as canvas:
        fill_prediction(canvas, grid, held, what, of_all)


def fill_prediction(canvas: Canvas, grid: Grid, held: Sequence[Held], what: str, of_all: bool) -> None:
    """Draw the panels of `draw_prediction` on `canvas`."""
    each = f"of {'all workers' if of_all else 'a worker'}"
    table = pd.DataFrame(
        {
            "execution": "modelled",
            "engine": "virtual",
            "series": [str(point.strategy) for point in grid.points],
            "workers": [point.workers for point in grid.points],
            "oversubscribed": [point.marked for point in grid.points],  # crossed, like those
            "speedup": [point.speedup for point in grid.points],
            "efficiency": [point.efficiency for point in grid.points],
            "batch": [float("nan") if one.batch is None else one.batch for one in held],
            "interval": [float("nan") if one.interval is None else one.interval for one in held],
        }
    )
    look = looks(list(table["series"]))
    kept = f"{100 * held[0].efficiency:.0f} % efficiency"
    panels = {
        "speedup": ("speedup", "speedup"),
        "efficiency": ("efficiency", "efficiency (%)"),
        "batch": (f"batch for {kept}", f"batch {each}"),
        "interval": (f"interval for {kept}", "interval"),
    }
    shown = [name for name in panels if table[name].notna().any()]
    columns = canvas.fits(2)
    [grids] = canvas.grids((len(shown), columns, 2.6))
    for panel, name in zip(grids, shown, strict=True):
        title, label = panels[name]
        panel.title(title)
        own = table.assign(oversubscribed=[one.outside for one in held]) if name == "batch" else table
        equal = name in ("batch", "interval")  # powers of two, which are the same for many points
        panel.curve(own, name, look, scale=100 if name == "efficiency" else 1, shift=False, apart_pt=_APART_PT * equal)
        if name == "speedup":
            ends = [min(table["workers"]), max(table["workers"])]
            panel.reference(ends, ends, "ideal")
        if name == "efficiency":
            panel.level(100 * held[0].efficiency, kept, table["workers"])
            panel.ax.set(ylim=(0, 105), ylabel=label)
        elif name == "speedup":
            panel.seconds_axis(label=label)
        else:
            powers = [2**power for power in range(1 + int(math.log2(table[name].max())))]
            panel.ax.set_yscale("log", base=2)
            panel.ax.set_yticks(powers, [f"{value:,}" for value in powers])
            panel.ax.set(ylim=(0.8, 1.25 * powers[-1]), ylabel=label)
        panel.workers_axis(table["workers"])
    crossed = [point.marked or one.outside for point, one in zip(grid.points, held, strict=True)]
    dotted = (Line2D([], [], color="#888888", linestyle=":"), f"ideal speedup, and {kept}")
    canvas.legends(look, table.assign(oversubscribed=crossed), dotted, crossed=OUTSIDE)
    canvas.say(
        f"{what}. Speedup and efficiency are against one serial worker at the same batch.",
        f"Batch and interval (of steps or epochs between synchronisations): the least power of two with which a point "
        f"has {kept}, the other one unchanged; a point that is missing has none.",
        "Equal lines in the panels of batch and interval are set a little apart.",
    )
