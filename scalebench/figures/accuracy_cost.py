"""The accuracy-cost figure: final metric against training time and core-hours, with the Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.lines import Line2D

from scalebench.analysis import Results
from scalebench.analysis.grouping import COSTS, metric_by_cost
from scalebench.analysis.loading import is_representative
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing import series_style
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.caption import over_seeds, with_interval
from scalebench.figures.drawing.panel import Curve, Panel, share_y
from scalebench.figures.drawing.series_style import Look
from scalebench.study.cell import BATCH, EXECUTIONS, columns_without

_METRIC = {
    cost: Curve(
        "metric",
        over=cost,
        band=("metric_low", "metric_high"),
        shift=False,
        connect=False,
    )
    for cost in COSTS.values()
}
_PANELS = ("time", "core-hours", "memory")
_LABELS = {
    "time": "training time (s)",
    "core-hours": "core-hours",
    "memory": "peak memory of a worker (MiB)",
}
_FRONT = "#777777"
_FRONT_WORDS = "Pareto front (number: workers)"
# points of a series, up to which so many series stay legible in one panel: all layouts
# of `plan` beside serial training are eleven
_FEW, _TOGETHER = 2, 12
_HEIGHT_IN = 2.4
_AXES = 0.7  # share of a panel that its axes take
_DIRECTIONS = (
    (-1, 1),
    (1, 1),
    (-1, -1),
    (1, -1),
    (0, 1),
    (0, -1),
    (-1, 0),
    (1, 0),
)  # of a label from its point


@FIGURES.add
class AccuracyCost(Figure):
    name = "accuracy-cost"
    panels = _PANELS
    by_default = False
    summary = "final metric against training time, core-hours and memory, with the front of what nothing beats in both"

    def absent(self, results: Results) -> str:
        trained = results.completed["final_metric"].notna().any()
        return super().absent(results) or (
            "" if trained else "no run has a metric; modelled runs train nothing"
        )

    def draw(self, results: Results, canvas: Canvas) -> None:
        everything = series_style.name_series(metric_by_cost(results))
        # Series of one or two points cover less of a panel than lines do.
        few = everything.groupby(["series", "execution"]).size().max() <= _FEW
        table, look, groups = canvas.series_of(
            everything, _TOGETHER if few else series_style.MOST_SERIES, of=results
        )
        # memory not where one is virtual
        known = table.groupby("execution")[list(COSTS.values())].count().gt(0).all()
        names = [name for name in canvas.wanted(_PANELS) if known[COSTS[name]]]
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
        # The front is that of the study: a selection must not make a point look
        # unbeaten.
        of_engines = everything[everything["engine"].isin(table["engine"])]
        for panel, (execution, group), name in drawn:
            own = table[(table["execution"] == execution) & table["series"].isin(group)]
            fronts = of_engines[of_engines["execution"] == execution]
            of = f"{name}, {execution}" if len(executions) > 1 else name
            panel.title(
                f"{of}: {series_style.group_name(group)}" if len(groups) > 1 else of,
                name=f"{name}, {execution}",
            )
            _draw_fronts(panel, fronts, COSTS[name])
            others = fronts[~fronts["series"].isin(group)]
            panel.context(others, _METRIC[COSTS[name]])
            _draw_cells(panel, own.assign(interval=over_seeds(own)), COSTS[name], look)
            panel.ax.margins(x=0.08, y=0.14)  # room for the labels of the front
            panel.seconds_axis("x", _LABELS[name])
        # Before the labels, whose places follow from the limits.
        share_y(canvas.shown)
        for panel, (execution, _), name in drawn:
            _label_fronts(
                panel, of_engines[of_engines["execution"] == execution], COSTS[name]
            )

        front = Line2D([], [], color=_FRONT, drawstyle="steps-post")
        fronts_drawn = any(_FRONT_WORDS in panel.explained for panel in canvas.shown)
        canvas.legends(look, table, *[(front, _FRONT_WORDS)] * fronts_drawn, line=False)
        _describe(canvas, results, table, names)


def _describe(
    canvas: Canvas, results: Results, table: pd.DataFrame, names: Sequence[str]
) -> None:
    modelled = canvas.selection.of(results.completed)["execution"].eq("modelled").any()
    canvas.describe(
        results,
        table,
        "One point for each strategy and worker count: the metric of the final consensus model on held-out data"
        f"{with_interval(over_seeds(table))}.",
        "The front joins the points of an execution and engine that no other beats in both.",
        "Modelled runs, which train nothing, have no metric and are left out."
        if modelled
        else "",
        "Oversubscribed and disturbed points are on no front."
        if not is_representative(table).all()
        else "",
        "Memory is the largest of a worker's process, or on its device."
        if "memory" in names
        else "",
        method=(
            "Times are geometric means, core-hours these times the cores. The front is that of the whole study: "
            "points that no other beats in metric or cost without being worse in the other; it disregards "
            "intervals.",
        ),
    )


def _draw_cells(
    panel: Panel, own: pd.DataFrame, cost: str, look: dict[str, Look]
) -> None:
    """Draw one point per cell, with its intervals of cost and metric."""
    low, high = (
        ("low_s", "high_s") if cost == "train_s" else (f"{cost}_low", f"{cost}_high")
    )
    known = own[own[cost].notna()]
    panel.curve(known, _METRIC[cost], look)
    ends = zip(known[low], known[high], known["metric"], strict=True)
    sideways = [((left, y), (right, y)) for left, right, y in ends]
    points = list(known[[cost, "metric"]].itertuples(index=False, name=None))
    panel.intervals(sideways, [look[name].color for name in known["series"]], points)
    kept = known.rename(columns={low: "low", high: "high", cost: "y"})
    kept = kept[
        [
            "series",
            "execution",
            "engine",
            "workers",
            "oversubscribed",
            "y",
            "low",
            "high",
        ]
    ]
    panel.keep(kept.to_dict("records"), quantity=cost)
    panel.metric_axis(str(own["metric_name"].iloc[0]))


def _fronts(table: pd.DataFrame, cost: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each engine with the points of its front, the cheapest first."""
    for engine, own in table[table[f"{cost}_front"]].groupby("engine", sort=False):
        yield str(engine), own.sort_values(cost)


def _draw_fronts(panel: Panel, table: pd.DataFrame, cost: str) -> None:
    """Draw the front of each engine as steps: the best metric that a cost buys."""
    for engine, front in _fronts(table, cost):
        panel.explained.add(_FRONT_WORDS)
        panel.ax.plot(
            front[cost],
            front["metric"],
            drawstyle="steps-post",
            color=_FRONT,
            linewidth=1.0,
            zorder=1,
        )
        kept = front.rename(columns={cost: "x", "metric": "y"})[
            [*columns_without("label", *BATCH), "x", "y"]
        ]
        panel.keep(
            kept.to_dict("records"),
            series=f"Pareto front on {engine}",
            quantity="front",
        )


def _label_fronts(panel: Panel, table: pd.DataFrame, cost: str) -> None:
    """Write the worker counts beside the points of the fronts, where they cover no point and no other label.

    Points whose labels would touch have one for all. A line leads from a label to its
    point where there is no room beside it.
    """
    # Without transAxes, which the layout sets later: the axes are taken as 70 % of the
    # panel.
    to_axes = panel.ax.transScale + panel.ax.transLimits
    size_pt = np.array(
        [_AXES * 72 * panel.width_in, _AXES * 72 * _HEIGHT_IN * panel.style.height]
    )
    small = panel.style.small
    # half a mark, and what it is wider than that in some directions
    mark = 0.7 * rcParams["lines.markersize"]
    places = (
        to_axes.transform(table[[cost, "metric"]].dropna().to_numpy(dtype=float))
        * size_pt
    )
    # A logarithmic axis has no place for zero.
    taken = [(*place, mark, mark) for place in places if np.isfinite(place).all()]
    front = table[table[f"{cost}_front"]].sort_values(cost)
    points = to_axes.transform(front[[cost, "metric"]].to_numpy(dtype=float)) * size_pt
    for own in _close_together(points, small):
        counts = dict.fromkeys(f"{front['workers'].iloc[place]}" for place in own)
        text = ", ".join(counts)
        half = np.array([0.5 * series_style.width(text, small), 0.6 * small])
        found = _free_place(points[own], half, mark, taken, size_pt)
        # A label that hides a point is worse than one that is missing; the CSV has it.
        if found is None:
            continue
        point, centre, beside = found
        taken.append((*centre, *half))
        style: dict[str, Any] = {
            "ha": "center",
            "va": "center",
            "fontsize": small,
            "color": series_style.NEUTRAL,
        }
        line = {
            "arrowstyle": "-",
            "color": _FRONT,
            "linewidth": 0.5,
            "shrinkA": 0,
            "shrinkB": mark,
        }
        panel.ax.annotate(
            text,
            point / size_pt,
            centre / size_pt,
            xycoords="axes fraction",
            textcoords="axes fraction",
            arrowprops=None if beside else line,
            zorder=6,
            **style,
        )


def _close_together(points: np.ndarray, small: float) -> list[list[int]]:
    """Return the places of `points` (in points of the page), the cheapest first, in runs with room for one label."""
    runs: list[list[int]] = []
    for place, point in enumerate(points):
        if not runs:
            runs.append([place])
            continue
        across, up = abs(point - points[runs[-1][-1]])
        if across < 1.6 * small and up < 1.3 * small:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _free_place(
    points: np.ndarray,
    half: np.ndarray,
    mark: float,
    taken: Sequence[tuple[float, ...]],
    size_pt: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, bool] | None:
    """Return one of the `points`, the centre of a label that is free, and whether it is beside the point.

    The label has half the size `half`; what is `taken` are boxes (x, y, half a width,
    half a height).
    """
    for distance in (1.0, 1.6, 2.4, 3.4):
        for point in points:
            # Above to the left first: fronts rise to the right, and leave that corner
            # free.
            for direction in _DIRECTIONS:
                centre = point + distance * np.array(direction) * (half + 1.2 * mark)
                inside = (half <= centre).all() and (centre <= size_pt - half).all()
                if inside and not any(_overlap(centre, half, box) for box in taken):
                    return (
                        point,
                        centre,
                        distance == 1.0,
                    )  # nearest first: farther ones need a line
    return None


def _overlap(centre: np.ndarray, half: np.ndarray, box: tuple[float, ...]) -> bool:
    x, y, across, up = box
    return bool(
        abs(centre[0] - x) < half[0] + across and abs(centre[1] - y) < half[1] + up
    )
