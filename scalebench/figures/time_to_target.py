"""The time-to-target figure: time, reduction, epochs and costs until the target, with the runs that never reach it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.ticker import MaxNLocator

from scalebench.analysis import Results
from scalebench.analysis.grouping import costs_to_target
from scalebench.analysis.target import target_ratios
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing import marks, series_style
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Curve, Panel, share_y
from scalebench.figures.drawing.series_style import Look
from scalebench.formatting import counted, listed
from scalebench.study.choices import BASELINES, PER_BATCH, SERIAL

_CURVES = {  # of the table of costs
    "time": Curve(
        "time_to_target_s", band=("target_low_s", "target_high_s"), shift=False
    ),
    "epochs": Curve("epochs_to_target"),
    "core-hours": Curve("core_hours", band=("core_hours_low", "core_hours_high")),
    "energy": Curve("energy_j", band=("energy_j_low", "energy_j_high")),
}
_LABELS = {
    "time": "training time (s)",
    "core-hours": "core-hours",
    "energy": "energy (J)",
}


@FIGURES.add
class TimeToTarget(Figure):
    name = "time-to-target"
    panels = ("time", "reduction", "epochs", "core-hours", "energy")
    summary = "time, epochs and costs until the target metric is reached, the time saved, and what never reaches it"

    def absent(self, results: Results) -> str:
        aimed = results.completed["target_metric"].notna().any()
        return super().absent(results) or (
            "" if aimed else "the study states no target_metric"
        )

    def draw(self, results: Results, canvas: Canvas) -> None:
        table, look, groups = canvas.series_of(costs_to_target(results), of=results)
        if not look:
            raise EmptyFigureError("no run with a target took any time")
        table = table.assign(n=table["n_reached"], interval=table["target_interval"])
        baseline, compared = _against(
            canvas.selection.of(series_style.name_series(target_ratios(results)))
        )
        target = float(table["target_metric"].iloc[0])
        epochs = int(results.completed["epochs"].max())
        names = [
            name
            for name in canvas.wanted(self.panels)
            if (baseline if name == "reduction" else _measured(table, name))
        ]
        if not names:
            raise EmptyFigureError("no run of the selection has what these panels show")
        # Baselines are not compared with themselves: their group has no panel of time
        # saved.
        saving = series_style.grouped(
            [name for name in look if name in set(compared["series"])]
        )
        wanted = [
            (name, group)
            for name in names
            for group in (saving if name == "reduction" else groups)
            if name == "reduction" or _reached(table[table["series"].isin(group)], name)
        ]
        if not wanted:
            raise EmptyFigureError(
                f"no run of the selection reached {marks.target_in_words(table)} within {counted(epochs, 'epoch')}"
            )
        across = (
            # Four or five stand in two rows.
            canvas.fits(len(names))
            if len(names) <= 3
            else canvas.fits(-(-len(names) // 2), narrow=True)
        )
        several = len(groups) > 1
        (panels,) = canvas.grids((len(wanted), across, 2.1 if several else 2.75))
        for panel, (name, group) in zip(panels, wanted, strict=True):
            of = f": {series_style.group_name(group)}" if several else ""
            if name == "reduction":
                panel.title(f"time saved against {baseline}{of}", "time saved")
                panel.reductions(compared, group, look, table["workers"])
            else:
                panel.title(f"{name} to {target:g}{of}")
                _draw_quantity(panel, name, table, group, look, epochs)
            panel.workers_axis(table["workers"])
        for name in names:
            share_y(
                [
                    panel
                    for panel, (own, _) in zip(panels, wanted, strict=True)
                    if own == name
                ]
            )

        canvas.legends(look, table, *marks.legend_of_unreached(canvas.shown, epochs))
        _describe(canvas, results, table, names, baseline)


def _describe(
    canvas: Canvas,
    results: Results,
    table: pd.DataFrame,
    names: Sequence[str],
    baseline: str,
) -> None:
    canvas.describe(
        results,
        table,
        f"Target: {marks.target_in_words(table)} of the consensus model, at the first evaluation at or above it.",
        "Triangles, which have no time: at most half of the runs reached it."
        if marks.never(table).any()
        else "",
        "Stars: more than half of the runs reached it, but not all."
        if marks.torn(table).any()
        else "",
        f"Reduction = 1 - T(strategy, N) / T({baseline}, N), times to the target."
        if "reduction" in names
        else "",
        _nowhere(table, int(results.completed["epochs"].max())),
        method=(
            "Times are geometric means where every run reached the target, else medians of the Kaplan-Meier "
            "curve, in which runs that did not count as longer; epochs are such medians.",
            "Energy is the time to the target at the mean power of the training."
            if "energy" in names
            else "",
        ),
    )


def _measured(table: pd.DataFrame, name: str) -> bool:
    """Return True if a cell has the quantity `name`."""
    return bool(table[_CURVES[name].quantity].notna().any())


def _reached(own: pd.DataFrame, name: str) -> bool:
    """Return True if a cell reached the target and has the quantity `name`."""
    return bool((own[_CURVES[name].quantity] < math.inf).any())


def _nowhere(table: pd.DataFrame, epochs: int) -> str:
    """Return a sentence with the series that reached the target at no worker count."""
    found = [
        name
        for name, own in table.groupby("series", sort=False)
        if marks.never(own).all()
    ]
    return (
        f"Not within {counted(epochs, 'epoch')} at any worker count: {listed(found)}."
        if found
        else ""
    )


def _against(compared: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The first baseline that reached the target, and the reductions against it of the strategies that are none."""
    known = compared[
        compared["reduction"].notna() & ~compared["strategy"].isin(PER_BATCH)
    ]
    for baseline in (*BASELINES, SERIAL):
        if len(own := known[known["baseline"] == baseline]):
            return baseline, own
    return "", known.iloc[:0]


def _draw_quantity(
    panel: Panel,
    name: str,
    table: pd.DataFrame,
    group: Sequence[str],
    look: dict[str, Look],
    epochs: int,
) -> None:
    """Draw the series of `group` over all others of `table` in grey."""
    curve = _CURVES[name]
    # A cost that is not known is not one that was not reached.
    known = table[table[curve.quantity].notna()]
    values = known[curve.quantity]
    finite = known.assign(**{curve.quantity: values.where(values < math.inf)})
    panel.curves(finite, group, curve, look)
    inside = known["series"].isin(group)
    most = finite[inside][curve.quantity].max()
    above = 1.0 if math.isnan(most) else 2 * most
    place = 1.1 * epochs if name == "epochs" else above
    marks.mark_unreached(panel, known[inside], curve, look, epochs=epochs, above=place)
    if name == "epochs":
        largest = values.max()
        panel.ax.set_ylim(0, 1.2 * (largest if largest < math.inf else epochs))
        panel.ax.set_ylabel(f"epochs (of {epochs})")
        panel.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    else:
        panel.seconds_axis(label=_LABELS[name])
