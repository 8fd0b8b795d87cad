"""The common panels of strong and weak scaling: time, efficiency and metric against workers."""

from __future__ import annotations

import pandas as pd
from matplotlib.lines import Line2D

from scalebench.analysis import Results, cells, ratios
from scalebench.analysis.grouping import CELL
from scalebench.analysis.intervals import CONFIDENCE
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.caption import (
    describe_executions,
    describe_machines,
    describe_oversubscription,
    describe_study,
    with_interval,
)
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.styles import looks, name_series

METRIC_WORDS = {"accuracy": "test accuracy", "r2": "test R²"}


def draw_scaling(results: Results, canvas: Canvas, *, weak: bool) -> None:
    """Draw three panels: time, efficiency, and metric of the consensus model."""
    table = name_series(cells(results))
    compared = ratios(results)
    scaling = compared[compared["baseline"] == "serial"]
    table = table.merge(scaling[[*CELL, "efficiency", "efficiency_low", "efficiency_high"]], on=CELL, how="left")
    look, counts = looks(list(table["series"])), [int(count) for count in sorted(table["workers"].unique())]
    time, efficiency, metric = canvas.rows((3, 2.75))

    time.title("a", "training time")
    time.curve(table, "train_s", look, low="low_s", high="high_s")
    if weak:
        time.ax.set_ylim(bottom=0)
        time.ax.set_ylabel("training time (s)")
    else:
        _ideal_time(time, table, counts)
        time.seconds_axis()
    time.workers_axis(counts)

    efficiency.title("b", "efficiency")
    if table["efficiency"].notna().any():
        efficiency.curve(table, "efficiency", look, low="efficiency_low", high="efficiency_high")
        efficiency.reference([min(counts), max(counts)], [1.0, 1.0], "ideal")
        efficiency.ax.set_ylabel("T(1) / T(N)" if weak else "T(1) / (N T(N))")
        efficiency.ax.set_ylim(bottom=0)
        efficiency.workers_axis(counts)
    else:
        efficiency.empty("no serial run to compare with")

    over_seeds = table["metric_low"].notna().map({True: CONFIDENCE, False: ""})
    name = METRIC_WORDS.get(str(table["metric_name"].iloc[0]), "test metric")
    metric.title("c", name)
    if table["metric"].notna().any():
        metric.curve(table.assign(interval=over_seeds), "metric", look, low="metric_low", high="metric_high")
        metric.ax.set_ylabel(f"{name} at the end")
        metric.workers_axis(counts)
    else:
        metric.empty("not measured")

    canvas.legend_of_series(table["series"], look)
    ideal = (Line2D([], [], color="#888888", linestyle=":"), "ideal")
    drawn = table["efficiency"].notna().any() or (not weak and _serial(table).any())
    canvas.legend_of_executions(table, *([ideal] if drawn else []))
    formula = "T(serial, 1) / T(N)" if weak else "T(serial, 1) / (N T(N))"
    canvas.say(
        describe_study(results),
        describe_executions(results),
        describe_machines(results),
        f"Times are geometric means. Efficiency is {formula}, each execution against its own serial run.",
        f"The metric is of the consensus model on held-out data{with_interval(over_seeds)}.",
        describe_oversubscription(table),
        "Points at one worker count are set apart sideways to be seen.",
    )


def _serial(table: pd.DataFrame) -> pd.Series[bool]:
    return (table["strategy"] == "serial") & (table["workers"] == 1)


def _ideal_time(panel: Panel, table: pd.DataFrame, counts: list[int]) -> None:
    serial = table[_serial(table)]
    for base in serial.to_dict("records"):
        panel.reference(counts, [base["train_s"] / count for count in counts], f"ideal ({base['execution']})")
