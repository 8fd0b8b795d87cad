"""The agreement figure: virtual against native training times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scalebench.figures.base import FIGURES, Figure

if TYPE_CHECKING:
    from scalebench.analysis import Results
    from scalebench.figures.drawing.canvas import Canvas

GOAL = 0.15


@FIGURES.add
class Agreement(Figure):
    name = "agreement"
    summary = "virtual against native training times, where both exist"

    def absent(self, results: Results) -> str:
        from scalebench.analysis import agreement
        from scalebench.analysis.environment import supposed

        if reason := super().absent(results):
            return reason
        if len(agreement(results)):
            return ""
        if (jitter := supposed(results)) and {"native", "virtual"} <= set(results.completed["execution"]):
            return f"virtual times suppose {jitter}, which native ones do not have"
        return "no strategy ran both virtually and natively at one worker count"

    def draw(self, results: Results, canvas: Canvas) -> None:
        from matplotlib.patches import Patch

        from scalebench.analysis import agreement, median_error
        from scalebench.figures.drawing.caption import describe_executions, describe_oversubscription, describe_study
        from scalebench.figures.drawing.styles import looks
        from scalebench.formatting import deviation

        table = agreement(results).assign(execution="native", series=lambda frame: frame["label"])
        look = looks(list(table["series"]))
        against, ratio = canvas.rows((2, 3.1))
        against.title("a", "virtual against native time")
        against.curve(table, "virtual_s", look, x="native_s", shift=False, connect=False)
        ends = [
            float(table[["native_s", "virtual_s"]].min().min()) / 1.3,
            float(table[["native_s", "virtual_s"]].max().max()) * 1.3,
        ]
        against.reference(ends, ends, "equal")
        against.ax.fill_between(
            ends, [(1 - GOAL) * x for x in ends], [(1 + GOAL) * x for x in ends], color="#EEEEEE", zorder=0
        )
        against.ax.set(xlim=ends, ylim=ends)
        against.seconds_axis("x", "native training time (s)")
        against.seconds_axis("y", "virtual training time (s)")
        against.ax.set_aspect("equal")

        counts = [int(count) for count in sorted(table["workers"].unique())]
        ratio.title("b", "virtual / native")
        ratio.curve(table, "ratio", look, low="ratio_low", high="ratio_high", connect=False)
        ratio.workers_axis(counts)
        ratio.reference([counts[0], counts[-1]], [1, 1], "equal")
        ratio.ax.axhspan(1 - GOAL, 1 + GOAL, color="#EEEEEE", zorder=0)
        ratio.ax.set_ylabel("T(virtual) / T(native)")
        canvas.legend_of_series(table["series"], look)
        band = (Patch(facecolor="#EEEEEE"), f"within {100 * GOAL:.0f} %")
        canvas.legend_of_executions(table.assign(execution=""), band)
        error = median_error(table)
        median = "" if error is None else f"Median error {deviation(error)} where native runs are not oversubscribed."
        canvas.say(
            describe_study(results),
            describe_executions(results, bars=False),
            "Geometric means; bars in (b): the virtual interval and the native 95 % confidence interval in quadrature.",
            median,
            "No timing of these native runs enters the calibration.",
            describe_oversubscription(table),
        )
