"""The agreement figure: virtual against native training times."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scalebench.analysis import Results, agreement, virtual_error
from scalebench.analysis.environment import supposed
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing import caption, series_style
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Curve, Panel
from scalebench.figures.drawing.series_style import Look

GOAL = 0.15
_TIMES = Curve("virtual_s", over="native_s", shift=False, connect=False)
_RATIO = Curve("ratio", band=("ratio_low", "ratio_high"), connect=False)


@FIGURES.add
class Agreement(Figure):
    name = "agreement"
    summary = "virtual against native training times, where both exist"
    panels = ("times", "ratio")

    def absent(self, results: Results) -> str:
        if reason := super().absent(results):
            return reason
        if len(agreement(results)):
            return ""
        if (jitter := supposed(results)) and {"native", "virtual"} <= set(
            results.completed["execution"]
        ):
            return f"virtual times suppose {jitter}, which native ones do not have"
        return "no strategy ran both virtually and natively at one worker count"

    def draw(self, results: Results, canvas: Canvas) -> None:
        table = agreement(results).assign(
            execution="native", series=lambda frame: frame["label"]
        )
        look = series_style.looks(
            [*table["series"], *series_style.name_series(results.completed)["series"]]
        )
        canvas.names = series_style.short_names(look)
        executions = canvas.selection.executions or ("native", "virtual")
        # A row is of both executions; a selection of them is looked at below.
        table = replace(canvas.selection, executions=()).of(table)
        if table.empty or not {"native", "virtual"} <= set(executions):
            raise EmptyFigureError(
                "the selection leaves no strategy that ran both virtually and natively"
            )
        wanted = canvas.wanted(self.panels)
        (panels,) = canvas.grids((len(wanted), canvas.fits(len(wanted)), 3.1))
        for panel, name in zip(panels, wanted, strict=True):
            (_draw_times if name == "times" else _draw_ratios)(panel, table, look)
        band = (Patch(facecolor="#EEEEEE"), f"within {100 * GOAL:.0f} %")
        equal = (Line2D([], [], color="#888888", linestyle=":"), "equal")
        canvas.legends(look, table.assign(execution=""), equal, band)
        error = virtual_error(results)
        off = (
            ""
            if error is None
            else f"Virtual times are off by {error.words}, where native runs check them."
        )
        canvas.say(
            caption.describe_label(results),
            caption.describe_executions(results, bars=False),
            off,
            "Bars of the ratio: the virtual interval and the native 95 % confidence interval in quadrature.",
            caption.describe_marks(table),
        )
        canvas.method(
            caption.describe_study(results),
            caption.describe_machines(results),
            "Times are geometric means. No timing of these native runs enters the calibration.",
        )


def _draw_times(panel: Panel, table: pd.DataFrame, look: dict[str, Look]) -> None:
    panel.title("virtual against native time")
    panel.curve(table, _TIMES, look)
    ends = [
        # One range for both axes, so that equal times lie on the diagonal.
        float(table[["native_s", "virtual_s"]].min().min()) / 1.3,
        float(table[["native_s", "virtual_s"]].max().max()) * 1.3,
    ]
    panel.reference(ends, ends, "equal")
    panel.ax.fill_between(
        ends,
        [(1 - GOAL) * x for x in ends],
        [(1 + GOAL) * x for x in ends],
        color="#EEEEEE",
        zorder=0,
    )
    panel.ax.set(xlim=ends, ylim=ends)
    panel.seconds_axis("x", "native training time (s)")
    panel.seconds_axis("y", "virtual training time (s)")
    panel.ax.set_aspect("equal")


def _draw_ratios(panel: Panel, table: pd.DataFrame, look: dict[str, Look]) -> None:
    panel.title("virtual / native")
    panel.curve(table, _RATIO, look)
    panel.workers_axis(table["workers"])
    panel.level(1.0, "equal", table["workers"])
    panel.ax.axhspan(1 - GOAL, 1 + GOAL, color="#EEEEEE", zorder=0)
    panel.ax.set_ylabel("T(virtual) / T(native)")
