"""The common panels of strong and weak scaling: time, efficiency and metric against workers."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.lines import Line2D

from scalebench.analysis import Results, cells, ratios
from scalebench.analysis.grouping import CELL
from scalebench.analysis.intervals import CONFIDENCE, METRIC_RANGE
from scalebench.figures.base import EmptyFigureError
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.caption import with_interval
from scalebench.figures.drawing.panel import Panel, share_y
from scalebench.figures.drawing.styles import Look

METRIC_WORDS = {"accuracy": "test accuracy", "r2": "test R²"}
PANELS = ("time", "efficiency", "metric")


def draw_scaling(results: Results, canvas: Canvas, *, weak: bool) -> None:
    """Draw time, efficiency, and metric of the consensus model; more than six series in rows of a few each."""
    table = cells(results)
    scaling = ratios(results).query("baseline == 'serial'")
    table = table.merge(scaling[[*CELL, "efficiency", "efficiency_low", "efficiency_high"]], on=CELL, how="left")
    table, look, groups = canvas.series_of(table)
    known = {"time": "train_s", "efficiency": "efficiency", "metric": "metric"}
    names = [name for name in canvas.wanted(PANELS) if table[known[name]].notna().any()]
    if not names:
        raise EmptyFigureError(f"nothing was measured for the panel {canvas.chosen[0]}")
    (panels,) = canvas.grids((len(groups) * len(names), canvas.fits(len(names)), 2.75 if len(groups) == 1 else 2.1))
    for place, panel in enumerate(panels):
        group, name = groups[place // len(names)], names[place % len(names)]
        own, others = (table[table["series"].isin(group) == inside] for inside in (True, False))
        panel.context(others, known[name])
        _DRAW[name](panel, own, table, look, weak)
        panel.workers_axis([int(count) for count in sorted(table["workers"].unique())])
    for place in range(len(names)):
        share_y(panels[place :: len(names)])

    canvas.legend_of_series(look)
    ideal = "efficiency" in names or ("time" in names and not weak and _serial(table).any())
    canvas.legend_of_executions(table, *([(Line2D([], [], color="#888888", linestyle=":"), "ideal")] if ideal else []))
    formula = "T(serial, 1) / T(N)" if weak else "T(serial, 1) / (N T(N))"
    canvas.describe(
        results,
        table,
        "Times are geometric means." if "time" in names else "",
        f"Efficiency is {formula}, each execution against its own serial run." if "efficiency" in names else "",
        f"The metric is of the final consensus model on held-out data{with_interval(over_seeds(table))}."
        if "metric" in names
        else "",
        "Pale grey: the series of the other panels." if len(groups) > 1 else "",
        "Points at one worker count are set apart sideways to be seen.",
    )


def _draw_time(panel: Panel, own: pd.DataFrame, table: pd.DataFrame, look: dict[str, Look], weak: bool) -> None:
    panel.title("training time")
    panel.curve(own, "train_s", look, low="low_s", high="high_s")
    if weak:
        panel.ax.set_ylim(bottom=0)
        panel.ax.set_ylabel("training time (s)")
        return
    counts = [int(count) for count in sorted(table["workers"].unique())]
    for base in table[_serial(table)].to_dict("records"):
        panel.reference(counts, [base["train_s"] / count for count in counts], f"ideal ({base['execution']})")
    panel.seconds_axis()


def _draw_efficiency(panel: Panel, own: pd.DataFrame, table: pd.DataFrame, look: dict[str, Look], weak: bool) -> None:
    panel.title("efficiency")
    panel.curve(own, "efficiency", look, low="efficiency_low", high="efficiency_high")
    panel.reference([table["workers"].min(), table["workers"].max()], [1.0, 1.0], "ideal")
    panel.ax.set_ylabel("T(1) / T(N)" if weak else "T(1) / (N T(N))")
    panel.ax.set_ylim(bottom=0)


def _draw_metric(panel: Panel, own: pd.DataFrame, table: pd.DataFrame, look: dict[str, Look], weak: bool) -> None:
    metric = str(table["metric_name"].dropna().iloc[0])
    name = METRIC_WORDS.get(metric, "test metric")
    panel.title(name)
    panel.curve(own.assign(interval=over_seeds(own)), "metric", look, low="metric_low", high="metric_high")
    panel.ax.set_ylabel(name)
    panel.limit(METRIC_RANGE.get(metric, (-math.inf, math.inf))[1])


_DRAW = {"time": _draw_time, "efficiency": _draw_efficiency, "metric": _draw_metric}


def over_seeds(table: pd.DataFrame) -> pd.Series[str]:
    return table["metric_low"].notna().map({True: CONFIDENCE, False: ""})


def _serial(table: pd.DataFrame) -> pd.Series[bool]:
    return (table["strategy"] == "serial") & (table["workers"] == 1)
