"""The accuracy-cost figure: final metric against training time and core-hours, with the Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from scalebench.analysis import Results
from scalebench.analysis.grouping import COSTS, EXECUTIONS, metric_by_cost
from scalebench.analysis.loading import is_representative
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.caption import over_seeds, with_interval
from scalebench.figures.drawing.names import group_name
from scalebench.figures.drawing.panel import Panel, share_y
from scalebench.figures.drawing.styles import NEUTRAL, Look, name_series

_PANELS = ("time", "core-hours")
_LABELS = {"time": "training time (s)", "core-hours": "core-hours"}
_FRONT = "#777777"
_HEIGHT_IN = 2.4
_CORNERS = ((-1, 1), (1, 1), (-1, -1), (1, -1))  # of a point, where its label may stand


@FIGURES.add
class AccuracyCost(Figure):
    name = "accuracy-cost"
    panels = _PANELS
    by_default = False
    summary = "final metric against training time and core-hours, with the front of what nothing beats in both"

    def absent(self, results: Results) -> str:
        trained = results.completed["final_metric"].notna().any()
        return super().absent(results) or ("" if trained else "no run has a metric; modelled runs train nothing")

    def draw(self, results: Results, canvas: Canvas) -> None:
        everything = name_series(metric_by_cost(results))
        table, look, groups = canvas.series_of(everything, of=results)
        names = [name for name in canvas.wanted(_PANELS) if table[COSTS[name]].notna().any()]
        if not names:
            raise EmptyFigureError("no run of the selection has a metric and a cost")
        executions = [name for name in EXECUTIONS if name in set(table["execution"])]
        parts = [
            (execution, group)
            for execution in executions
            for group in groups
            if (table["series"].isin(group) & (table["execution"] == execution)).any()
        ]
        drawn = canvas.rows_of_groups(parts, names, heights=(_HEIGHT_IN, _HEIGHT_IN))
        of_engines = everything[everything["engine"].isin(table["engine"])]
        for panel, (execution, group), name in drawn:
            own = table[(table["execution"] == execution) & table["series"].isin(group)]
            fronts = of_engines[of_engines["execution"] == execution]
            of = f"{name}, {execution}" if len(executions) > 1 else name
            panel.title(f"{of}: {group_name(group)}" if len(groups) > 1 else of, name=f"{name}, {execution}")
            _draw_fronts(panel, fronts, COSTS[name])
            _draw_cells(panel, own.assign(interval=over_seeds(own)), COSTS[name], look)
            panel.ax.margins(x=0.08, y=0.14)  # room for the labels of the front
            panel.seconds_axis("x", _LABELS[name])
        share_y(canvas.shown)
        for panel, (execution, _), name in drawn:
            _label_fronts(panel, of_engines[of_engines["execution"] == execution], COSTS[name])

        front = Line2D([], [], color=_FRONT, drawstyle="steps-post")
        canvas.legends(look, table, (front, "Pareto front (number: workers)"), line=False)
        modelled = canvas.selection.of(results.completed)["execution"].eq("modelled").any()
        canvas.describe(
            results,
            table,
            "One point for each strategy and worker count: the metric of the final consensus model on held-out data"
            f"{with_interval(over_seeds(table))}.",
            "The front joins the points of an execution and engine that no other beats in both.",
            "Modelled runs, which train nothing, have no metric and are left out." if modelled else "",
            "Oversubscribed and disturbed points are on no front." if not is_representative(table).all() else "",
            method=(
                "Times are geometric means, core-hours these times the cores. The front is that of the whole study: "
                "points that no other beats in metric or cost without being worse in the other; it disregards "
                "intervals.",
            ),
        )


def _draw_cells(panel: Panel, own: pd.DataFrame, cost: str, look: dict[str, Look]) -> None:
    """Draw one point per cell, with its intervals of cost and metric."""
    low, high = ("low_s", "high_s") if cost == "train_s" else (f"{cost}_low", f"{cost}_high")
    known = own[own[cost].notna()]
    panel.curve(known, "metric", look, x=cost, low="metric_low", high="metric_high", shift=False, connect=False)
    sideways = [
        ((left, y), (right, y)) for left, right, y in zip(known[low], known[high], known["metric"], strict=True)
    ]
    panel.intervals(sideways, [look[name].color for name in known["series"]])
    panel.keep(
        known.rename(columns={low: "low", high: "high", cost: "y"})[
            ["series", "execution", "engine", "workers", "oversubscribed", "y", "low", "high"]
        ].to_dict("records"),
        quantity=cost,
    )
    panel.metric_axis(str(own["metric_name"].iloc[0]))


def _fronts(table: pd.DataFrame, cost: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each engine with the points of its front, the cheapest first."""
    for engine, own in table[table[f"{cost}_front"]].groupby("engine", sort=False):
        yield str(engine), own.sort_values(cost)


def _draw_fronts(panel: Panel, table: pd.DataFrame, cost: str) -> None:
    """Draw the front of each engine as steps: the best metric that a cost buys."""
    for engine, front in _fronts(table, cost):
        panel.ax.plot(front[cost], front["metric"], drawstyle="steps-post", color=_FRONT, linewidth=1.0, zorder=1)
        kept = front.rename(columns={cost: "x", "metric": "y"})[["execution", "engine", "workers", "x", "y"]]
        panel.keep(kept.to_dict("records"), series=f"Pareto front on {engine}", quantity="front")


def _label_fronts(panel: Panel, table: pd.DataFrame, cost: str) -> None:
    """Write the worker counts beside the points of the fronts, where they cover no point and no other label."""
    to_axes = panel.ax.transScale + panel.ax.transLimits
    small = panel.style.small
    # Width and height of a label, and the distance from its point, as shares of the panel.
    wide, high = 1.4 * small / (0.7 * 72 * panel.width_in), 1.2 * small / (0.7 * 72 * _HEIGHT_IN * panel.style.height)
    points = to_axes.transform(table[[cost, "metric"]].dropna().to_numpy(dtype=float))
    taken = [(float(right), float(up)) for right, up in points if math.isfinite(right) and math.isfinite(up)]
    for _, points_of in _fronts(table, cost):
        front = points_of.drop_duplicates(["workers", "metric"])  # several strategies at one count and metric
        for x, y, workers in zip(front[cost], front["metric"], front["workers"], strict=True):
            right, up = to_axes.transform((x, y))
            for across, along in _CORNERS:
                at = right + 1.1 * across * wide, up + 1.1 * along * high
                inside = wide / 2 <= at[0] <= 1 - wide / 2 and high / 2 <= at[1] <= 1 - high / 2
                if inside and all(abs(at[0] - u) > 0.8 * wide or abs(at[1] - v) > 0.8 * high for u, v in taken):
                    taken.append(at)
                    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": small, "color": NEUTRAL}
                    panel.ax.text(*at, f"{workers}", transform=panel.ax.transAxes, **style)
                    break
