"""The convergence figure: the metric against epochs and against time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from scalebench.analysis import Results
from scalebench.analysis.intervals import CONFIDENCE, metric_interval
from scalebench.analysis.loading import object_index
from scalebench.figures.base import FIGURES, Figure
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.drawing.caption import with_interval
from scalebench.figures.drawing.panel import Curve, Panel, share_y
from scalebench.figures.drawing.series_style import Look, group_name
from scalebench.formatting import counted, is_interval
from scalebench.study.cell import PLACE
from scalebench.study.choices import SERIAL

_COLUMNS = 4
_APART_PT = 0.8  # equal lines are seen side by side
_METRIC = {
    panel: Curve(
        "metric",
        over=over,
        band=("low", "high"),
        shift=False,
        sparse=True,
        apart_pt=_APART_PT,
    )
    for panel, over in (("epochs", "epochs"), ("time", "elapsed_s"))
}
_KEY = [*PLACE, "strategy"]


@FIGURES.add
class Convergence(Figure):
    name = "convergence"
    panels = ("epochs", "time")
    summary = (
        "test metric of the consensus model against epochs and against training time"
    )

    def absent(self, results: Results) -> str:
        measured = results.epochs["test_metric"].notna().any()
        return super().absent(results) or ("" if measured else "no epoch was evaluated")

    def draw(self, results: Results, canvas: Canvas) -> None:
        table, look, groups = canvas.series_of(_by_epoch(results), of=results)
        axes = canvas.wanted(self.panels)
        columns = (
            canvas.fits(_COLUMNS, narrow=True)
            if len(groups) == 1
            else max(1, canvas.fits(_COLUMNS) // len(axes))
        )
        counts = _spread(
            [int(count) for count in sorted(table["workers"].unique())], columns
        )
        table = table[table["workers"].isin(counts) | (table["strategy"] == SERIAL)]
        metric = str(results.completed["metric_name"].dropna().iloc[0])
        # One group: a row for each x axis. Several: a row for each group, with both
        # axes in it.
        drawn = [
            (group, axis, count)
            for group in groups
            for axis in axes
            for count in counts
        ]
        per_row = (
            len(counts) if len(groups) == 1 else canvas.fits(len(axes) * len(counts))
        )
        (panels,) = canvas.grids(
            (len(drawn), per_row, 2.1), together=len(axes) * len(counts)
        )
        for panel, (group, axis, count) in zip(panels, drawn, strict=True):
            own = table[(table["workers"] == count) | (table["strategy"] == SERIAL)]
            words = counted(count, "worker")
            title = f"{words}: {group_name(group)}" if len(groups) > 1 else words
            panel.title(title, f"{words}, against {axis}")
            _draw_course(panel, own, group, axis, look)
            panel.metric_axis(metric)
            if not panel.leftmost:
                panel.ax.set_ylabel("")
                panel.ax.tick_params(labelleft=False)
        share_y(panels)
        _share_times(
            [
                panel
                for panel, (_, axis, _) in zip(panels, drawn, strict=True)
                if axis == "time"
            ]
        )
        canvas.legends(look, table, *_draw_targets(panels, results))
        _describe(canvas, results, table)


def _draw_course(
    panel: Panel,
    own: pd.DataFrame,
    group: Sequence[str],
    axis: str,
    look: dict[str, Look],
) -> None:
    """Draw the metric of the series in `group` along an axis, over all others in grey."""
    panel.curves(own, group, _METRIC[axis], look)
    if axis == "epochs":
        panel.ax.set_xlabel("epochs")
        panel.ax.xaxis.set_major_locator(
            MaxNLocator(5, integer=True, steps=[1, 2, 5, 10])
        )


def _draw_targets(panels: Sequence[Panel], results: Results) -> list[Entry]:
    """Draw the targets over the width of each panel; return their entry in the legend, that of a single one."""
    targets = list(results.completed["target_metric"].dropna().unique())
    for panel in panels:
        for target in targets:
            panel.reference(panel.ax.get_xlim(), [target, target], "target metric")
    line = Line2D([], [], color="#888888", linestyle=":")
    return [(line, f"target: {targets[0]:g}")] if len(targets) == 1 else []


def _describe(canvas: Canvas, results: Results, table: pd.DataFrame) -> None:
    interval = with_interval(table["interval"]).replace(
        "seeds", "seeds (drawn at the last epoch)"
    )
    canvas.describe(
        results,
        table,
        f"The consensus model's metric on held-out data after each epoch, mean over repetitions{interval}.",
        "Serial (one worker) is drawn in every panel."
        if (table["strategy"] == SERIAL).any()
        else "",
        method=(
            "Time is training time without evaluation, its arithmetic mean (tables: geometric). Equal lines are "
            "set a little apart upwards, so that both are seen.",
        ),
        bars=False,
    )


def _share_times(panels: Sequence[Panel]) -> None:
    """Give all axes of time the same range: their ticks and distances are comparable."""
    for panel in panels:
        panel.ax.set_xscale("log")
    ends = [end for panel in panels for end in panel.ax.get_xlim()]
    for panel in panels:
        panel.ax.set_xlim(min(ends), max(ends))
        panel.seconds_axis("x")


def _by_epoch(results: Results) -> pd.DataFrame:
    """Return metric and time after each epoch of each point, over its repetitions."""
    runs, epochs = results.completed, results.epochs
    # Numbers in place of a merge: a million epochs are looked up by arrays.
    point = runs.groupby(_KEY).ngroup().to_numpy()
    facts = runs[[*_KEY, "oversubscribed", "disturbed"]].groupby(point)
    marks = facts[["oversubscribed", "disturbed"]].any()
    run = object_index(runs["run_id"]).get_indexer(object_index(epochs["run_id"]))
    measured = (
        epochs[["epoch", "elapsed_s", "test_metric"]]
        .astype({"epoch": int})
        .assign(point=point[run])
    )
    measured = measured[(run >= 0) & epochs["test_metric"].notna()]
    # the repetitions of an epoch lie side by side
    measured = measured.sort_values(["point", "epoch"], kind="stable")
    numbers = measured.groupby(["point", "epoch"]).size()
    begins = numbers.cumsum() - numbers
    metrics = measured["test_metric"].to_numpy(dtype=float)
    times = measured["elapsed_s"].to_numpy(dtype=float)
    name = str(runs["metric_name"].dropna().iloc[0])
    parts = []
    for n in numbers.unique():  # epochs with equally many repetitions at once
        rows = begins[numbers == n].to_numpy()[:, None] + np.arange(n)
        # Along the last axis, all epochs with as many repetitions in one call.
        metric = metric_interval(metrics[rows], name)
        columns = {
            "elapsed_s": times[rows].mean(axis=1),
            **metric.named("metric", "low", "high"),
            "n": n,
        }
        parts.append(pd.DataFrame(columns, index=numbers.index[numbers == n]))
    table = pd.concat(parts).sort_index().reset_index()
    bounds = zip(table["low"], table["high"], strict=True)
    known = np.array([is_interval(low, high) for low, high in bounds])
    table = table.assign(
        # Epochs are numbered from 0; after the first one is done.
        epochs=table["epoch"] + 1,
        low=table["low"].where(known),
        high=table["high"].where(known),
        interval=np.where(known, CONFIDENCE, ""),
    )
    points = facts[_KEY].first().astype({"workers": int}).join(marks)
    return points.merge(table, left_index=True, right_on="point")


def _spread(counts: list[int], most: int) -> list[int]:
    """Select at most `most` of the counts above one, the largest included."""
    # One worker is drawn in every panel, as serial.
    counts = [count for count in counts if count > 1] or counts
    if len(counts) <= most:
        return counts
    return [
        counts[round((step + 1) * (len(counts) - 1) / most)] for step in range(most)
    ]
