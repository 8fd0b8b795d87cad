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
from scalebench.figures.drawing.panel import Curve, Panel
from scalebench.figures.drawing.series_style import NEUTRAL, Look, cross, looks
from scalebench.figures.plotting import drawing, picture
from scalebench.study.choices import FIGURE_FORMATS
from scalebench.system.file_access import open_own

if TYPE_CHECKING:
    from scalebench.pricing.advice import Held
    from scalebench.pricing.grid import Grid
    from scalebench.pricing.what_if import Plane

OUTSIDE = "outside what the inputs hold for, or too large"

# Batches and intervals are powers of two, which are the same for many points.
_OF_POINTS = {
    "speedup": Curve("speedup", shift=False),
    "efficiency": Curve("efficiency", scale=100, shift=False),
    "batch": Curve("batch", shift=False, apart_pt=1.6),
    "interval": Curve("interval", shift=False, apart_pt=1.6),
}

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
    table = _points(grid, held)
    look = looks(list(table["series"]))
    kept = f"{100 * held[0].efficiency:.0f} % efficiency"
    words = {
        "speedup": ("speedup", "speedup"),
        "efficiency": ("efficiency", "efficiency (%)"),
        "batch": (f"batch for {kept}", f"batch {each}"),
        "interval": (f"interval for {kept}", "interval"),
    }
    shown = [name for name in words if table[name].notna().any()]
    columns = canvas.fits(2)
    [grids] = canvas.grids((len(shown), columns, 2.6))
    for panel, name in zip(grids, shown, strict=True):
        title, label = words[name]
        panel.title(title)
        own = table
        if name == "batch":
            own = table.assign(oversubscribed=[one.outside for one in held])
        panel.curve(own, _OF_POINTS[name], look)
        if name == "speedup":
            ends = [min(table["workers"]), max(table["workers"])]
            panel.reference(ends, ends, "ideal")
        if name == "efficiency":
            panel.level(100 * held[0].efficiency, kept, table["workers"])
            panel.ax.set(ylim=(0, 105), ylabel=label)
        elif name == "speedup":
            panel.seconds_axis(label=label)
        else:
            _powers_axis(panel, table[name].max(), label)
        panel.workers_axis(table["workers"])
    crossed = [
        point.marked or one.outside
        for point, one in zip(grid.points, held, strict=True)
    ]
    line = Line2D([], [], color="#888888", linestyle=":")
    dotted = (line, f"ideal speedup, and {kept}")
    canvas.legends(look, table.assign(oversubscribed=crossed), dotted, crossed=OUTSIDE)
    canvas.say(
        f"{what}. Speedup and efficiency are against one serial worker at the same batch.",
        f"Batch and interval (of steps or epochs between synchronisations): the least power of two with which a point "
        f"has {kept}, the other one unchanged; a point that is missing has none.",
        "Equal lines in the panels of batch and interval are set a little apart.",
    )


def _points(grid: Grid, held: Sequence[Held]) -> pd.DataFrame:
    """Return the points of a grid as a table of curves, with the batch and interval that hold an efficiency."""
    unknown = float("nan")
    return pd.DataFrame(
        {
            "execution": "modelled",
            "engine": "virtual",
            "series": [str(point.strategy) for point in grid.points],
            "workers": [point.workers for point in grid.points],
            # Crossed, like those.
            "oversubscribed": [point.marked for point in grid.points],
            "speedup": [point.speedup for point in grid.points],
            "efficiency": [point.efficiency for point in grid.points],
            "batch": [unknown if one.batch is None else one.batch for one in held],
            "interval": [
                unknown if one.interval is None else one.interval for one in held
            ],
        }
    )


def _powers_axis(panel: Panel, most: float, label: str) -> None:
    """Set a log2 y axis with ticks at the powers of two up to `most`."""
    powers = [2**power for power in range(1 + int(math.log2(most)))]
    panel.ax.set_yscale("log", base=2)
    # matplotlib would write 2^5.
    panel.ax.set_yticks(powers, [f"{value:,}" for value in powers])
    panel.ax.set(ylim=(0.8, 1.25 * powers[-1]), ylabel=label)


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
            _draw_lines(panels[0], planes, look)
            canvas.legend(
                [(look[name].sample(), name) for name in look]
                if len(planes) > 1
                else []
            )
        else:
            _draw_maps(panels, planes)
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


def _draw_lines(
    panel: Panel, planes: Mapping[str, Plane], look: Mapping[str, Look]
) -> None:
    """Draw the times of all strategies along one axis, their bars side by side."""
    (first, *_) = planes.values()
    for place, name in enumerate(look):
        plane = planes[name]
        beside = _BESIDE * (place - (len(planes) - 1) / 2) * (plane.low is not None)
        _draw_line(panel, plane, look[name] if len(planes) > 1 else None, beside)
    panel.seconds_axis(label="training time (s)")
    _label(panel, "x", first.axes[0].title, first.axes[0].values)


def _draw_maps(panels: Sequence[Panel], planes: Mapping[str, Plane]) -> None:
    """Draw the times of each strategy over two axes, in one scale of greys."""
    everything = np.concatenate([plane.train_s.ravel() for plane in planes.values()])
    # Over all planes: strategies are compared by their grey.
    scale = LogNorm(everything.min(), everything.max())
    for panel, (name, plane) in zip(panels, planes.items(), strict=True):
        panel.title(name)
        _draw_map(panel, plane, scale)


def _draw_line(panel: Panel, plane: Plane, look: Look | None, beside: float) -> None:
    """Draw the times along one axis, each mark in the colour of what binds; the line is grey for a lone strategy.

    All is shifted by `beside`, a share of the axis, so that bars at the same value do
    not cover each other.
    """
    (axis,) = plane.axes
    x = np.asarray(axis.values)
    y = plane.train_s[:, 0]
    if _logarithmic(axis.values):
        # A share of the axis, which is a factor on a logarithmic one.
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
    # One component everywhere has no border.
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
    # Over less than a decade a logarithmic axis has one tick.
    return min(values) > 0 and max(values) / min(values) >= 10


def write_prediction_error(errors: pd.DataFrame, output: Path) -> list[Path]:
    """Write the figure and each prediction to `output`; `errors` are those of `validation.prediction_errors`.

    Raises:
        ResultsError: a file cannot be written, or no measurement is at more workers than its base.
    """
    # A base row is its own prediction, and tells nothing.
    if errors["linear_s"].isna().all():
        raise ResultsError(
            "nothing to draw: each measurement is at the fewest workers of its strategy"
        )
    files = [output / f"{_NAME}.{suffix}" for suffix in (*FIGURE_FORMATS, "csv")]
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
    sources = sorted(errors["source"].unique())
    names = _names(sources)
    styles: dict[str, dict[str, Any]] = {
        source: {
            "color": _COLORS[number % len(_COLORS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 3.6,
            "linestyle": "",
        }
        for number, source in enumerate(sources)
    }
    _draw_times(against, errors, styles)
    _draw_distances(apart, errors, styles)
    canvas.legend(
        [
            *((Line2D([], [], **style), names[of]) for of, style in styles.items()),
            (Line2D([], [], linestyle="", marker="_", color=_GREY), "linear scaling"),
            (Line2D([], [], linestyle=":", color="#888888"), "equal"),
        ]
    )
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


def _draw_times(
    panel: Panel, errors: pd.DataFrame, styles: Mapping[str, dict[str, Any]]
) -> None:
    """Draw predicted against measured seconds, both as multiples of linear scaling."""
    panel.title("time, as a multiple of linear scaling")
    slower = errors["seconds"] / errors["linear_s"]
    predicted = errors["predicted_s"] / errors["linear_s"]
    ones = np.ones(len(slower))
    panel.ax.plot(slower, ones, linestyle="", marker="_", color=_GREY, zorder=1)
    least = float(min(slower.min(), predicted.min()))
    most = float(max(slower.max(), predicted.max()))
    ends = [0.9 * least, 1.1 * most]
    panel.reference(ends, ends, "equal")
    for source, style in styles.items():
        own = errors["source"] == source
        panel.ax.plot(slower[own], predicted[own], alpha=0.75, **style)
    panel.ax.set_xlabel("measured / linear scaling")
    panel.ax.set_ylabel("predicted / linear scaling")
    panel.ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    inside = [
        [tick for tick in ladder if ends[0] <= tick <= ends[1]] for ladder in _LADDERS
    ]
    ticks = next((own for own in inside if len(own) <= _MOST_TICKS), inside[-1])
    for axis in (panel.ax.xaxis, panel.ax.yaxis):
        axis.set_ticks(ticks, minor=False)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _draw_distances(
    panel: Panel, errors: pd.DataFrame, styles: Mapping[str, dict[str, Any]]
) -> None:
    """Draw errors against the doublings from the base row, those of linear scaling beside them."""
    panel.title("error by distance from the calibration")
    for number, (source, style) in enumerate(styles.items()):
        own = errors[errors["source"] == source]
        spread = own["doublings"] + 0.08 * (number - (len(styles) - 1) / 2)
        panel.ax.plot(spread, own["error"], alpha=0.75, **style)
    shift = errors["doublings"] - 0.3
    panel.ax.plot(
        shift, errors["linear_error"], linestyle="", marker="_", color=_GREY, zorder=1
    )
    panel.ax.axhline(0, color="#444444", linewidth=0.8)
    panel.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.ax.set_xlim(
        float(errors["doublings"].min()) - 0.6, float(errors["doublings"].max()) + 0.6
    )
    panel.ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.ax.set(
        xlabel="doublings from the calibration", ylabel="predicted / measured - 1"
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
