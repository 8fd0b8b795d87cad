"""The epochs-to-target figure: epochs until the target metric against the global batch, with the critical batch."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from scalebench.analysis import Results
from scalebench.analysis.target import SeriesLaw, critical_batches, times_to_target
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing import marks
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.drawing.panel import Curve, Panel
from scalebench.figures.drawing.series_style import NEUTRAL, Look
from scalebench.formatting import digits
from scalebench.study.cell import SERIES

_EPOCHS = Curve("epochs_to_target", over="batch_global", connect=False, shift=False)
_COLUMNS = 3
_CURVE_POINTS = 60
_CRITICAL: dict[str, Any] = {"color": NEUTRAL, "linestyle": ":", "linewidth": 1.2}


@FIGURES.add
class EpochsToTarget(Figure):
    name = "epochs-to-target"
    by_default = False
    summary = "epochs until the target metric against the global batch, with the fitted critical batch"

    def absent(self, results: Results) -> str:
        aimed = results.completed["target_metric"].notna().any()
        return super().absent(results) or (
            "" if aimed else "the study states no target_metric"
        )

    def draw(self, results: Results, canvas: Canvas) -> None:
        table = times_to_target(results)
        table, look, _ = canvas.series_of(
            table[table["batch_global"].notna()], of=results
        )
        if table.empty:
            raise EmptyFigureError(
                "no run of the selection has a target and a global batch"
            )
        # a busy machine takes no more
        table = table.assign(
            n=table["n_reached"], oversubscribed=False, disturbed=False
        )
        found = _laws_by_series(table, results)
        series = [name for name in look if name in set(table["series"])]
        epochs = int(results.completed["epochs"].max())
        columns = canvas.fits(min(_COLUMNS, len(series)), narrow=True)
        # A panel for each series: fitted laws of several would cover one another.
        (panels,) = canvas.grids((len(series), columns, 2.15))
        for panel, name in zip(panels, series, strict=True):
            panel.title(canvas.names[name], name)
            own = [law for of, law in found if of == name]
            _draw(panel, name, table[table["series"] == name], own, look, epochs)
            panel.workers_axis(table["batch_global"])
            panel.ax.set_xlabel("global batch (samples)")
            if panel.leftmost:
                panel.ax.set_ylabel(f"epochs (of {epochs})")

        canvas.legends(
            look, table, *marks.legend_of_unreached(canvas.shown, epochs), line=False
        )
        canvas.legend(_legend_of_laws([law for _, law in found]))
        laws = sorted(
            found, key=lambda item: (series.index(item[0]), item[1].series.execution)
        )
        fitted = "; ".join(_in_words(name, law) for name, law in laws)
        canvas.describe(
            results,
            table,
            f"Median epochs until the first evaluation at or above {marks.target_in_words(table)}.",
            f"Critical batch, in samples: {fitted}."
            if fitted
            else "No law is fitted: a series needs 3 global batches at which every run reached the target.",
            "Triangles at the top, which have no number: at most half of the runs reached it."
            if marks.never(table).any()
            else "",
            "Stars: more than half of the runs reached it, but not all."
            if marks.torn(table).any()
            else "",
            method=(
                "The law is E0 (1 + B / B_crit), fitted to the runs at batches of which every run reached the target, "
                "with the 95 % interval of resampled runs (band)."
                if fitted
                else "",
            ),
            bars=False,
        )


def _laws_by_series(
    table: pd.DataFrame, results: Results
) -> list[tuple[str, SeriesLaw]]:
    """Return the fitted laws of the series in `table`, each with the name of its series."""
    names = {key: str(own["series"].iloc[0]) for key, own in table.groupby(SERIES)}
    laws = critical_batches(results)
    return [(names[law.series], law) for law in laws if law.series in names]


def _legend_of_laws(laws: list[SeriesLaw]) -> list[Entry]:
    critical = any(law.least <= law.law.critical_batch <= law.most for law in laws)
    entries: list[Entry] = []
    if laws:
        line = Line2D([], [], color=NEUTRAL)
        entries.append((line, "fitted law, with 95 % interval"))
    if critical:
        line = Line2D([], [], **_CRITICAL)
        entries.append((line, "critical batch: twice the epochs of batch 0"))
    return entries


def _draw(
    panel: Panel,
    name: str,
    own: pd.DataFrame,
    laws: list[SeriesLaw],
    look: dict[str, Look],
    epochs: int,
) -> None:
    """Draw the points of a series, and each fitted law with its interval over the batches it was fitted to."""
    shown = own.assign(
        epochs_to_target=own["epochs_to_target"].where(
            own["epochs_to_target"] < math.inf
        )
    )
    panel.curve(shown, _EPOCHS, look)
    marks.mark_unreached(
        panel,
        shown,
        _EPOCHS,
        look,
        epochs=epochs,
        above=1.1 * epochs,
    )
    for fitted in laws:
        _draw_law(panel, name, fitted, look[name])
    # Room at the top for triangles of runs that did not reach it.
    panel.ax.set_ylim(0, 1.2 * epochs)
    panel.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _draw_law(panel: Panel, name: str, fitted: SeriesLaw, look: Look) -> None:
    """Draw a law with its interval over the batches it was fitted to, and the critical batch if it is among them."""
    batches = np.geomspace(fitted.least, fitted.most, _CURVE_POINTS)
    line = {**look.line(fitted.series.execution), "marker": "", "linestyle": "-"}
    epochs_at = fitted.law.epochs(batches)
    panel.ax.plot(batches, epochs_at.value, zorder=2, **line)
    panel.ax.fill_between(
        batches,
        epochs_at.low,
        epochs_at.high,
        color=look.color,
        alpha=0.12,
        linewidth=0,
        zorder=1,
    )
    critical, least, most = fitted.law.critical[:3]
    # Beyond the measured batches it is extrapolated, and only in the caption.
    if fitted.least <= critical <= fitted.most:
        panel.ax.axvline(critical, zorder=1, **_CRITICAL)
    rows: list[dict[Hashable, object]] = [
        {"quantity": "critical batch", "y": critical, "low": least, "high": most},
        {"quantity": "epochs at batch 0", "y": fitted.law.epochs_at_zero},
    ]
    panel.keep(
        rows,
        series=name,
        execution=fitted.series.execution,
        engine=fitted.series.engine,
    )


def _in_words(name: str, fitted: SeriesLaw) -> str:
    if not fitted.grows:
        return (
            f"{name} ({fitted.series.execution}) none within 10 times the largest batch"
        )
    low, high = fitted.law.critical[1:3]
    top = "no bound" if high > 1e6 * fitted.most else digits(high)
    return f"{name} ({fitted.series.execution}) {digits(fitted.law.critical_batch)} ({digits(low)} to {top})"
