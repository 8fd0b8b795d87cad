"""Strong and weak scaling: time, efficiency and metric against workers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pandas as pd
from matplotlib.lines import Line2D

from scalebench.analysis import Results, cells, ratios
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.caption import over_seeds, with_interval
from scalebench.figures.drawing.panel import Curve, Panel, metric_label
from scalebench.figures.drawing.series_style import Look, group_name
from scalebench.figures.selection import EXECUTION, with_added
from scalebench.study.cell import CELL
from scalebench.study.choices import SERIAL

_CURVES = {
    "time": Curve("train_s", band=("low_s", "high_s")),
    "efficiency": Curve("efficiency", band=("efficiency_low", "efficiency_high")),
    "metric": Curve("metric", band=("metric_low", "metric_high")),
}


@FIGURES.add
class StrongScaling(Figure):
    """Samples per epoch are fixed."""

    name = "strong-scaling"
    summary = "training time (log-log, with the ideal line), efficiency and test metric against workers"
    panels = tuple(_CURVES)
    takes_added = True
    weak: ClassVar[bool] = False

    def absent(self, results: Results) -> str:
        own, other = ("weak", "strong") if self.weak else ("strong", "weak")
        scales_so = (results.completed["scaling"] == own).any()
        return super().absent(results) or (
            "" if scales_so else f"the study scales {other}ly; see {other}-scaling"
        )

    def draw(self, results: Results, canvas: Canvas) -> None:
        # Statistics of the whole study: a selection must not lose the baseline of what
        # it shows.
        table = with_added(_with_efficiency(results), canvas.added, _with_efficiency)
        self._fill_efficiency(table)
        table, look, groups = canvas.series_of(table, of=results)
        names = [
            name
            for name in canvas.wanted(self.panels)
            if table[_CURVES[name].quantity].notna().any()
        ]
        if not names:
            raise EmptyFigureError(
                f"nothing was measured for the panel {canvas.chosen[0]}"
            )
        for panel, group, name in canvas.rows_of_groups(groups, names):
            inside = table["series"].isin(group)
            panel.context(table[~inside], _CURVES[name])
            self._draw_panel(
                panel,
                name,
                table[inside],
                table,
                look,
                group_name(group) if len(groups) > 1 else "",
            )
            panel.workers_axis(table["workers"])
        canvas.share_y_in_columns(len(names))

        ideal = "efficiency" in names or (
            "time" in names and not self.weak and _serial(table).any()
        )
        line = Line2D([], [], color="#888888", linestyle=":")
        canvas.legends(look, table, *([(line, "ideal")] if ideal else []))
        formula = "T(serial, 1) / T(N)" if self.weak else "T(serial, 1) / (N T(N))"
        sentences = {
            "time": "Times are geometric means.",
            "efficiency": f"Efficiency is {formula}, each execution against its own serial run.",
            "metric": f"The metric is of the final consensus model on held-out data{with_interval(over_seeds(table))}.",
        }
        canvas.describe(
            results,
            table,
            *(sentences[name] for name in names),
            method=(
                "Points at one worker count are set apart sideways to be seen, except where times fall with workers.",
            ),
        )

    def _fill_efficiency(self, table: pd.DataFrame) -> None:
        """Add the efficiency of curves from files that have times, the one of a single worker among them."""
        for _, own in table[
            (table["execution"] == EXECUTION) & table["efficiency"].isna()
        ].groupby("label"):
            alone = own.loc[own["workers"] == 1, "train_s"]
            if len(alone):
                ideal = alone.iloc[0] / (1 if self.weak else own["workers"])
                table.loc[own.index, "efficiency"] = ideal / own["train_s"]

    def _draw_panel(
        self,
        panel: Panel,
        name: str,
        own: pd.DataFrame,
        table: pd.DataFrame,
        look: dict[str, Look],
        group: str,
    ) -> None:
        metric = str(table["metric_name"].dropna().iloc[0]) if name == "metric" else ""
        title = {"time": "training time", "efficiency": "efficiency"}.get(
            name
        ) or metric_label(metric)
        panel.title(f"{title}: {group}" if group else title)
        shown = own.assign(interval=over_seeds(own)) if name == "metric" else own
        falls = name == "time" and not self.weak
        panel.curve(shown, replace(_CURVES[name], shift=not falls), look)
        if name == "metric":
            panel.metric_axis(metric)
        elif name == "efficiency":
            panel.level(1.0, "ideal", table["workers"])
            panel.ax.set_ylabel("T(1) / T(N)" if self.weak else "T(1) / (N T(N))")
            panel.ax.set_ylim(bottom=0)
        elif self.weak:
            panel.ax.set_ylim(bottom=0)
            panel.ax.set_ylabel("training time (s)")
        else:
            counts = [int(count) for count in sorted(table["workers"].unique())]
            for base in table[_serial(table)].to_dict("records"):
                ideal = [base["train_s"] / count for count in counts]
                panel.reference(counts, ideal, f"ideal ({base['execution']})")
            panel.seconds_axis()


@FIGURES.add
class WeakScaling(StrongScaling):
    """Samples per worker are fixed."""

    name = "weak-scaling"
    summary = "training time, efficiency T(1)/T(N) and test metric against workers, samples per worker fixed"
    weak = True


def _with_efficiency(results: Results) -> pd.DataFrame:
    """Return the cells of a study with their efficiency against serial."""
    compared = ratios(results)
    scaling = compared[compared["baseline"] == SERIAL]
    kept = scaling[[*CELL, "efficiency", "efficiency_low", "efficiency_high"]]
    return cells(results).merge(kept, on=CELL, how="left")


def _serial(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark the base of ideal lines; an added study has another label."""
    return (table["label"] == SERIAL) & (table["workers"] == 1)
