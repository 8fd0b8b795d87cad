"""Figures of predictions: of one along worker counts, of what-ifs, and of predictions against measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, PercentFormatter

from scalebench.errors import ResultsError, writing
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.series_style import NEUTRAL, Look, cross, looks
from scalebench.figures.plotting import FORMATS, drawing, picture
from scalebench.system.atomic_write import open_own

if TYPE_CHECKING:
    from scalebench.pricing.advice import Held
    from scalebench.pricing.grid import Grid
    from scalebench.pricing.what_if import Plane

OUTSIDE = "outside what the inputs hold for, or too large"

_APART_PT = 1.6  # between equal lines

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

_NAME = "prediction-error"
_GREY = "#B4B4B4"
_COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#332288",
    "#882255",
    "#999933",
)
_MARKERS = "osD^v<>h"
# Ticks of times as multiples of linear scaling: the first of these with few enough of
# them in the panel.
_LADDERS = (
    (0.5, 0.7, 0.8, 0.9, 1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 2, 3, 5, 10, 20),
    (0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 10, 20),
    (0.5, 1, 2, 5, 10, 20, 50),
)
_MOST_TICKS = 8
_OF_RUNS = re.compile(r"(?P<study>.+): (?P<execution>\w+), (?P<engine>\w+)")


def draw_prediction(
    path: Path, grid: Grid, held: Sequence[Held], what: str, of_all: bool
) -> None:
    """Write the figure of `grid` to `path`, with what is `held` at each of its points.

    `what` says what was priced, and `of_all` that batches are those of all workers.

    Raises:
        ResultsError: the file cannot be written, or its ending is not that of a figure.
    """
    with picture(path, "prediction") as canvas:
        fill_prediction(canvas, grid, held, what, of_all)


def fill_prediction(
    canvas: Canvas, grid: Grid, held: Sequence[Held], what: str, of_all: bool
) -> None:
    """Draw the panels of `draw_prediction` on `canvas`."""
    each = f"of {'all workers' if of_all else 'a worker'}"
    table = pd.DataFrame(
        {
            "execution": "modelled",
            "engine": "virtual",
            "series": [str(point.strategy) for point in grid.points],
            "workers": [point.workers for point in grid.points],
            "oversubscribed": [
                point.marked for point in grid.points
            ],  # crossed, like those
            "speedup": [point.speedup for point in grid.points],
            "efficiency": [point.efficiency for point in grid.points],
            "batch": [float("nan") if one.batch is None else one.batch for one in held],
            "interval": [
                float("nan") if one.interval is None else one.interval for one in held
            ],
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
        own = (
            table.assign(oversubscribed=[one.outside for one in held])
            if name == "batch"
            else table
        )
        equal = name in (
            "batch",
            "interval",
        )  # powers of two, which are the same for many points
        panel.curve(
            own,
            name,
            look,
            scale=100 if name == "efficiency" else 1,
            shift=False,
            apart_pt=_APART_PT * equal,
        )
        if name == "speedup":
            ends = [min(table["workers"]), max(table["workers"])]
            panel.reference(ends, ends, "ideal")
        if name == "efficiency":
            panel.level(100 * held[0].efficiency, kept, table["workers"])
            panel.ax.set(ylim=(0, 105), ylabel=label)
        elif name == "speedup":
            panel.seconds_axis(label=label)
        else:
            powers = [
                2**power for power in range(1 + int(math.log2(table[name].max())))
            ]
            panel.ax.set_yscale("log", base=2)
            panel.ax.set_yticks(powers, [f"{value:,}" for value in powers])
            panel.ax.set(ylim=(0.8, 1.25 * powers[-1]), ylabel=label)
        panel.workers_axis(table["workers"])
    crossed = [
        point.marked or one.outside
        for point, one in zip(grid.points, held, strict=True)
    ]
    dotted = (
        Line2D([], [], color="#888888", linestyle=":"),
        f"ideal speedup, and {kept}",
    )
    canvas.legends(look, table.assign(oversubscribed=crossed), dotted, crossed=OUTSIDE)
    canvas.say(
        f"{what}. Speedup and efficiency are against one serial worker at the same batch.",
        f"Batch and interval (of steps or epochs between synchronisations): the least power of two with which a point "
        f"has {kept}, the other one unchanged; a point that is missing has none.",
        "Equal lines in the panels of batch and interval are set a little apart.",
    )


def draw_what_if(path: Path, planes: Mapping[str, Plane], what: str) -> None:
    """Write the figure of the `planes` of one or more strategies, all over the same axes; `what` says what was priced.

    Strategies share the panel of one axis, and each has its own over two axes, in one
    scale of greys.

    Raises:
        ResultsError: the file cannot be written, or its ending is not that of a figure.
    """
    (first, *_), look = planes.values(), looks(planes)
    bound = dict.fromkeys(
        plane.components[place]
        for plane in planes.values()
        for place in np.unique(plane.bound)
    )
    entries: list[Entry] = [
        (Patch(color=COLORS[name], alpha=0.6), f"bound by {name}") for name in bound
    ]
    with picture(path, "what-if") as canvas:
        lines = len(first.axes) == 1
        [panels] = canvas.grids(
            (1, 1, 3.6) if lines else (len(planes), canvas.fits(2), 3.6)
        )
        if lines:
            [panel] = panels
            for place, (name, plane) in enumerate(
                (name, planes[name]) for name in look
            ):
                beside = (
                    _BESIDE * (place - (len(planes) - 1) / 2) * (plane.low is not None)
                )
                _draw_line(
                    panel, plane, look[name] if len(planes) > 1 else None, beside
                )
            panel.seconds_axis(label="training time (s)")
            _label(panel, "x", first.axes[0].title, first.axes[0].values)
            canvas.legend(
                [(look[name].sample(), name) for name in look]
                if len(planes) > 1
                else []
            )
        else:
            everything = np.concatenate(
                [plane.train_s.ravel() for plane in planes.values()]
            )
            scale = LogNorm(everything.min(), everything.max())
            for panel, (name, plane) in zip(panels, planes.items(), strict=True):
                panel.title(name)
                _draw_map(panel, plane, scale)
        if any(plane.marked.any() for plane in planes.values()):
            mark = (
                Line2D([], [], **cross())
                if lines
                else Patch(facecolor="none", hatch=_HATCH)
            )
            entries.append((mark, OUTSIDE))
        canvas.legend(entries)
        bars = (
            "Bars: the interval of the prediction."
            if lines and first.low is not None
            else ""
        )
        canvas.say(f"Modelled: {what}.", bars)


def _draw_line(panel: Panel, plane: Plane, look: Look | None, beside: float) -> None:
    """Draw the times along one axis, each mark in the colour of what binds; the line is grey for a lone strategy.

    All is shifted by `beside`, a share of the axis, so that bars at the same value do
    not cover each other.
    """
    (axis,) = plane.axes
    x = np.asarray(axis.values)
    y = plane.train_s[:, 0]
    if _logarithmic(axis.values):
        x = x * (x.max() / x.min()) ** beside
    else:
        x = x + beside * (x.max() - x.min())
    style = look.line("modelled") if look else Look(NEUTRAL, "o", 0).line("modelled")
    panel.ax.plot(x, y, **style | {"marker": ""})
    if plane.low is not None and plane.high is not None:
        panel.ax.vlines(
            x, plane.low[:, 0], plane.high[:, 0], colors=style["color"], linewidths=0.8
        )
    for place in np.unique(plane.bound):
        here = plane.bound[:, 0] == place
        color = COLORS[plane.components[place]]
        panel.ax.scatter(
            x[here], y[here], s=14, marker=style["marker"], color=color, zorder=3
        )
    marked = plane.marked[:, 0]
    panel.ax.plot(x[marked], y[marked], **cross(), zorder=4)


def _draw_map(panel: Panel, plane: Plane, scale: LogNorm) -> None:
    rows, columns = plane.axes
    x = np.asarray(columns.values)
    y = np.asarray(rows.values)
    ax = panel.ax
    top = len(plane.components) - 0.5
    mesh = ax.pcolormesh(
        x,
        y,
        plane.train_s,
        norm=scale,
        cmap="Greys",
        shading="nearest",
        rasterized=True,
    )
    ticks = LogLocator(subs=(1.0, 2.0, 5.0))
    ax.figure.colorbar(
        mesh,
        ax=ax,
        label="training time (s)",
        ticks=ticks,
        format=lambda value, _: f"{value:,.10g}",
    )
    colors = ListedColormap([COLORS[name] for name in plane.components])
    ax.pcolormesh(
        x,
        y,
        plane.bound,
        cmap=colors,
        alpha=0.35,
        shading="nearest",
        rasterized=True,
        vmin=-0.5,
        vmax=top,
    )
    used = np.unique(plane.bound)
    for place in used if len(used) > 1 else ():
        ax.contour(
            x,
            y,
            (plane.bound == place).astype(float),
            levels=[0.5],
            colors="black",
            linewidths=0.8,
        )
    if plane.marked.any():
        ax.contourf(
            x,
            y,
            plane.marked.astype(float),
            levels=[0.5, 1.5],
            colors="none",
            hatches=[_HATCH],
        )
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


def write_prediction_error(errors: pd.DataFrame, output: Path) -> list[Path]:
    """Write the figure and each prediction to `output`; `errors` are those of `validation.prediction_errors`.

    Raises:
        ResultsError: a file cannot be written, or no measurement is at more workers than its base.
    """
    if errors["linear_s"].isna().all():
        raise ResultsError(
            "nothing to draw: each measurement is at the fewest workers of its strategy"
        )
    files = [output / f"{_NAME}.{suffix}" for suffix in (*FORMATS, "csv")]
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        with drawing(files[:-1], _NAME) as canvas:
            _draw(errors, canvas)
        with open_own(files[-1], "w") as file:
            errors.to_csv(file, index=False, lineterminator="\n")
    return files


def _draw(errors: pd.DataFrame, canvas: Canvas) -> None:
    """Draw seconds of each prediction as multiples of linear scaling from its base row, and errors by distance."""
    [[against, apart]] = canvas.grids((2, 2, 3.6))
    errors = errors[errors["linear_s"].notna()]
    slower = errors["seconds"] / errors["linear_s"]
    predicted = errors["predicted_s"] / errors["linear_s"]
    least = float(min(slower.min(), predicted.min()))
    most = float(max(slower.max(), predicted.max()))
    ends = [0.9 * least, 1.1 * most]
    against.title("time, as a multiple of linear scaling")
    against.ax.plot(
        slower, np.ones(len(slower)), linestyle="", marker="_", color=_GREY, zorder=1
    )
    against.reference(ends, ends, "equal")
    sources = sorted(errors["source"].unique())
    names = _names(sources)
    handles: list[Entry] = []
    for number, source in enumerate(sources):
        style: dict[str, Any] = {
            "color": _COLORS[number % len(_COLORS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.6,
        }
        own = errors["source"] == source
        against.ax.plot(slower[own], predicted[own], linestyle="", alpha=0.75, **style)
        spread = errors.loc[own, "doublings"] + 0.08 * (number - (len(sources) - 1) / 2)
        apart.ax.plot(
            spread, errors.loc[own, "error"], linestyle="", alpha=0.75, **style
        )
        handles.append((Line2D([], [], linestyle="", **style), names[source]))
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axis, which in (
        (against.ax.xaxis, "measured"),
        (against.ax.yaxis, "predicted"),
    ):
        axis.set_label_text(f"{which} / linear scaling")
    against.ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    inside = [
        [tick for tick in ladder if ends[0] <= tick <= ends[1]] for ladder in _LADDERS
    ]
    ticks = next((own for own in inside if len(own) <= _MOST_TICKS), inside[-1])
    for axis in (against.ax.xaxis, against.ax.yaxis):
        axis.set_ticks(ticks, minor=False)
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    apart.title("error by distance from the calibration")
    shift = errors["doublings"] - 0.3
    apart.ax.plot(
        shift, errors["linear_error"], linestyle="", marker="_", color=_GREY, zorder=1
    )
    apart.ax.axhline(0, color="#444444", linewidth=0.8)
    apart.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    apart.ax.set_xlim(
        float(errors["doublings"].min()) - 0.6, float(errors["doublings"].max()) + 0.6
    )
    apart.ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    apart.ax.set(
        xlabel="doublings from the calibration", ylabel="predicted / measured - 1"
    )
    handles.append(
        (Line2D([], [], linestyle="", marker="_", color=_GREY), "linear scaling")
    )
    handles.append((Line2D([], [], linestyle=":", color="#888888"), "equal"))
    canvas.legend(handles)
    mape = errors["error"].abs().mean()
    linear = errors["linear_error"].abs().mean()
    held = errors["held"].mean()
    coverage = (
        f"; {held:.0%} lie in the 95 % interval of their prediction"
        if not math.isnan(held)
        else ""
    )
    canvas.say(
        f"{len(errors)} {' and '.join(sorted(set(errors['execution'])))} measurements, and predictions (modelled) by a "
        f"calibration that has not seen them: mean error {mape:.1%}, of linear scaling from the same base row "
        f"{linear:.1%}{coverage}.",
        "Errors in (b) are those of the measured quantity, a throughput or a time.",
    )


def _names(sources: Sequence[str]) -> dict[str, str]:
    """Return the names of sources in the legend: `paced on gloo` for runs, with their study where there are several."""
    matches = {source: _OF_RUNS.fullmatch(source) for source in sources}
    runs = {source: match for source, match in matches.items() if match}
    several = len({match["study"] for match in runs.values()}) > 1
    names = dict(zip(sources, sources, strict=True))
    for source, match in runs.items():
        of_study = f"{match['study']}, " if several else ""
        names[source] = f"{of_study}{match['execution']} on {match['engine']}"
    return names
