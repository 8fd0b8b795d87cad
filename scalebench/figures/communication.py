"""The communication figure: exposed communication, transfer, waiting and what compute hides, in per cent of time."""

from __future__ import annotations

from scalebench.analysis import Results
from scalebench.analysis.grouping import communication_shares
from scalebench.analysis.intervals import CONFIDENCE
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Curve, share_y
from scalebench.figures.drawing.series_style import group_name

_PANELS = {
    "exposed": "exposed communication",
    "transfer": "exposed transfer",
    "waiting": "waiting",
    "hidden": "hidden behind compute",
}


@FIGURES.add
class Communication(Figure):
    name = "communication"
    panels = tuple(_PANELS)
    by_default = False
    summary = "communication exposed and hidden, and waiting, in per cent of the training time, against workers"

    def absent(self, results: Results) -> str:
        runs = results.completed
        known = ((runs["workers"] > 1) & runs["comm_s"].notna()).any()
        return super().absent(results) or (
            "" if known else "no run on several workers has measured communication"
        )

    def draw(self, results: Results, canvas: Canvas) -> None:
        table, look, groups = canvas.series_of(
            communication_shares(results), of=results
        )
        if table.empty:
            raise EmptyFigureError(
                "no run of the selection on several workers has measured communication"
            )
        bars = table["exposed_low"].notna()
        table = table.assign(interval=bars.map({True: CONFIDENCE, False: ""}))
        names = [
            name for name in canvas.wanted(tuple(_PANELS)) if table[name].notna().any()
        ]
        nothing_hidden = "hidden" in names and not (table["hidden"] > 0).any()
        # Who names the panel gets it, also where it is empty.
        if nothing_hidden and not canvas.chosen:
            names.remove("hidden")
        if not names:
            raise EmptyFigureError(
                "waiting was not measured: real runs on several nodes have none"
            )
        # four as two by two
        columns = -(-len(names) // -(-len(names) // canvas.fits(len(names))))
        for panel, group, name in canvas.rows_of_groups(groups, names, columns):
            panel.title(
                f"{_PANELS[name]}: {group_name(group)}"
                if len(groups) > 1
                else _PANELS[name]
            )
            own = table[table["series"].isin(group)]
            share = Curve(name, band=(f"{name}_low", f"{name}_high"), scale=100)
            panel.curve(own, share, look)
            panel.workers_axis(table["workers"])
            if panel.leftmost:
                panel.ax.set_ylabel("share of training time (%)")
        share_y(canvas.shown)
        for panel in canvas.shown:
            # Behind the common range: shares begin at nothing.
            panel.ax.set_ylim(bottom=0)

        canvas.legends(look, table)
        runs = canvas.selection.of(results.completed)
        unknown = ((runs["workers"] > 1) & runs["comm_s"].isna()).any()
        canvas.describe(
            results,
            table,
            "Exposed: communication that compute does not hide. Waiting, a part of it: from a worker's arrival to that "
            "of the last; transfer: the rest of it.",
            "No communication was hidden behind compute." if nothing_hidden else "",
            "Runs whose split was not measured are left out." if unknown else "",
            f"Error bars: {CONFIDENCE} of measured shares over repetitions."
            if bars.any()
            else "",
            method=(
                "Shares are means over workers and repetitions. Hidden: what else the messages cost, behind compute, "
                "of virtual runs.",
            ),
            bars=False,
        )
