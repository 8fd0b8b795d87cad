"""The scaling-laws figure: the law fitted to each series, with its band, knee and extrapolation."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from scalebench.analysis import Results, cells
from scalebench.analysis.laws import (
    Scaling,
    all_laws,
    band_name,
    curve,
    no_band,
    series_of,
)
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.drawing.panel import Curve, Panel
from scalebench.figures.drawing.series_style import NEUTRAL, Look
from scalebench.figures.drawing.series_style import knee as knee_mark
from scalebench.formatting import percent
from scalebench.measured import Measured
from scalebench.study.spec import SIMULATED

_TIMES = Curve("train_s", band=("low_s", "high_s"), shift=False, connect=False)
Counts = NDArray[np.float64]

_COLUMNS = 3
_BEYOND = 2.0  # x the largest measured count
_PER_OCTAVE = 12
# share of a panel's height that a line of text takes, for each point of its size
_LINE = 0.015
# times the size of letters: width in which law and weight fit into one line
_WORDS = 24


@FIGURES.add
class ScalingLaws(Figure):
    name = "scaling-laws"
    summary = "the scaling law of each strategy: fit, band, extrapolation and knee"

    def absent(self, results: Results) -> str:
        if why := super().absent(results):
            return why
        refusals = [series.refusal for series in series_of(results)]
        if not refusals:
            return "no strategy but serial was run"
        return refusals[0] if all(refusals) else ""

    def draw(self, results: Results, canvas: Canvas) -> None:
        table, look, _ = canvas.series_of(cells(results), of=results)
        fits = [one for one in all_laws(results) if not one.refusal]
        found = [(one, _cells_of(one, table)) for one in fits]
        found = [(one, own) for one, own in found if len(own)]
        if not found:
            raise EmptyFigureError("no law was fitted to the selected series")
        fitted = pd.concat([own for _, own in found])
        (panels,) = canvas.grids(
            (len(found), canvas.fits(min(_COLUMNS, len(found)), narrow=True), 2.5)
        )
        for panel, (one, own) in zip(panels, found, strict=True):
            name = str(own["series"].iloc[0])
            execution = (
                one.series.key.execution if fitted["execution"].nunique() > 1 else ""
            )
            of = "".join(
                f", {word}" for word in (execution, one.series.at_batch) if word
            )
            panel.title(canvas.names[name] + of, name + of)
            _draw(panel, one, own, look)
        laws = [one for one, _ in found]
        drawn = [panel.data() for panel in panels]
        knees = bool((pd.concat(drawn)["quantity"] == "knee").any())
        beyond = any(
            data["x"].max() > one.series.counts[-1]
            for data, one in zip(drawn, laws, strict=True)
        )
        names = sorted(
            {band_name(one.series) for one in laws if not no_band(one.series)}
        )
        marks = _legend_of_laws(beyond=beyond, bands=bool(names), knees=knees)
        canvas.legends(look, fitted, *marks)
        alone = any(
            one.series.key.execution in SIMULATED and one.series.error is None
            for one in laws
        )
        unchecked = ", without the virtual-native error" if alone else ""
        canvas.describe(
            results,
            fitted,
            "In each panel: the law of the lowest AICc with its weight among all laws, and its error at the largest "
            "worker count when that is left out of the fit.",
            f"Bands: {' or '.join(names)}{unchecked}." if names else "",
            "Knee: the worker count of the largest efficiency times speedup."
            if knees
            else "",
            method=(
                "Laws are fitted to the logs of all runs that were neither oversubscribed nor disturbed, each series "
                "by itself; weights are Akaike's, and bands are pointwise over all laws by their weights.",
                "Beyond the knee, a worker costs more efficiency than it brings speed."
                if knees
                else "",
            ),
        )


def _legend_of_laws(*, beyond: bool, bands: bool, knees: bool) -> list[Entry]:
    entries: list[Entry] = [(Line2D([], [], color=NEUTRAL), "law")]
    if beyond:
        dashed = Line2D([], [], color=NEUTRAL, linestyle="--")
        entries.append((dashed, "beyond the measured"))
    if bands:
        band = Patch(facecolor=NEUTRAL, alpha=0.18, linewidth=0)
        entries.append((band, "95 % band"))
    if knees:
        entries.append((Line2D([], [], **knee_mark()), "knee"))
    return entries


def _cells_of(one: Scaling, table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of a series; at any batch, unless the study has several with a law."""
    series = one.series
    kept = (table["execution"] == series.key.execution) & (
        table["engine"] == series.key.engine
    )
    kept &= table["label"] == series.key.label
    if series.among_batches:
        kept &= table[f"batch_{series.batch_policy}"] == series.batch
    return table[kept]


def _draw(panel: Panel, one: Scaling, own: pd.DataFrame, look: dict[str, Look]) -> None:
    """Draw the points of a series, its law with the band, and the knee."""
    color = look[str(own["series"].iloc[0])].color
    at = _drawn_counts(one)
    panel.curve(own, _TIMES, look)
    band = curve(one.candidates, one.series, at)
    _draw_band(panel, one, at, band, color)
    _draw_knee(panel, one, at)
    _write_law(panel, one, falls=bool(band.value[-1] < band.value[0]))
    sure = not no_band(one.series)
    rows: list[dict[Hashable, object]] = [
        {
            "quantity": f"law: {one.best.fit.law.name}",
            "x": x,
            "y": y,
            **({"low": a, "high": b} if sure else {}),
        }
        for x, y, a, b in zip(at, band.value, band.low, band.high, strict=True)
    ]
    panel.keep(
        rows,
        execution=one.series.key.execution,
        engine=one.series.key.engine,
        series=one.series.name,
    )
    panel.workers_axis([*own["workers"], _end(one)])
    panel.seconds_axis()


def _end(one: Scaling) -> float:
    """Return the largest worker count at which a law is drawn: as far beyond the measured ones as advice reaches."""
    assert one.advice is not None
    last = float(one.series.counts[-1])
    return max(last, min(_BEYOND * last, one.advice.limit))


def _drawn_counts(one: Scaling) -> Counts:
    """Return the worker counts along which a law is drawn."""
    last = float(one.series.counts[-1])
    octaves = math.log2(_end(one))
    grid = 2 ** np.linspace(0, octaves, math.ceil(_PER_OCTAVE * octaves) + 1)
    # With the last measured count, where the line becomes dashed.
    at = np.unique(np.append(grid, last))
    # Between one worker and two there is no number of workers, and what is sent begins
    # with the second.
    drawn: Counts = at[(at >= one.series.counts[0]) & ((at <= 1) | (at >= 2))]
    return drawn


def _draw_band(
    panel: Panel, one: Scaling, at: Counts, band: Measured, color: str
) -> None:
    """Draw a law, dashed beyond the measured counts, and its band."""
    last = float(one.series.counts[-1])
    for part, style in ((at <= last, "-"), (at >= last, "--")):
        panel.ax.plot(
            at[part],
            band.value[part],
            color=color,
            linewidth=1.3,
            linestyle=style,
            zorder=2,
        )
    panel.ax.set_yscale("log")
    if not no_band(one.series):
        low, high = panel.ax.get_ylim()
        panel.ax.fill_between(
            at, band.low, band.high, color=color, alpha=0.18, linewidth=0, zorder=1
        )
        # A wide band does not shrink the points to a line.
        lowest = max(low / 2, min(low, np.nanmin(band.low)))
        highest = min(high * 2, max(high, np.nanmax(band.high)))
        panel.ax.set_ylim(lowest, highest)


def _draw_knee(panel: Panel, one: Scaling, at: Counts) -> None:
    """Mark the knee on the law where the data shows one."""
    assert one.advice is not None
    knee = one.advice.knee
    # A mark looks measured; these numbers are in the table only.
    if knee.reaches_end or knee.is_guessed or knee.workers > at[-1]:
        return
    seconds = float(one.best.fit.seconds(at[:1] * 0 + knee.workers)[0])
    panel.ax.plot([knee.workers], [seconds], **knee_mark(), zorder=5)
    panel.keep(
        [{"quantity": "knee", "x": knee.workers, "y": seconds}], series=one.series.name
    )


def _write_law(panel: Panel, one: Scaling, *, falls: bool) -> None:
    """Write the name, weight and error of the law into the corner that it leaves free, and make room there."""
    best, series = one.best, one.series
    apart = "\n" if panel.width_in * 72 < _WORDS * panel.style.small else ", "
    words = (
        f"{best.fit.law.name}{apart}weight {100 * best.weight:.0f} %\n"
        f"error at {series.counts[-1]:.0f}: {percent(best.leave_out_error)}"
    )
    low, high = panel.ax.get_ylim()
    lines = words.count("\n") + 1
    room = (high / low) ** (_LINE * lines * panel.style.small / panel.style.height)
    panel.ax.set_ylim(low / room if falls else low, high if falls else high * room)
    panel.ax.text(
        0.03 if falls else 0.97,
        0.03 if falls else 0.97,
        words,
        transform=panel.ax.transAxes,
        ha="left" if falls else "right",
        va="bottom" if falls else "top",
        fontsize=panel.style.small,
        color="#444444",
    )
