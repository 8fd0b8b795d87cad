"""The time-reduction figure: time saved at the same worker count, a panel for each per-batch baseline."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from scalebench.analysis import Results, ratios
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Panel, share_y
from scalebench.figures.drawing.series_style import Look
from scalebench.figures.selection import with_added
from scalebench.study.choices import BASELINES, PER_BATCH

_MOST_SERIES = 8  # in one panel: it has no baselines
_SHARED_FROM = -100.0  # per cent; a panel that reaches further down has an axis of its own


@FIGURES.add
class TimeReduction(Figure):
    name = "time-reduction"
    panels = BASELINES
    takes_added = True
    summary = "signed time saved at the same worker count, against allreduce and each other per-batch baseline that ran"

    def absent(self, results: Results) -> str:
        if reason := super().absent(results):
            return reason
        compared = of_others(ratios(results))
        known = compared[compared["baseline"].isin(BASELINES)]["reduction"].notna()
        return "" if known.any() else no_reduction(compared)

    def draw(self, results: Results, canvas: Canvas) -> None:
        table = with_added(_reductions(results), [one for one in canvas.added if one.is_study], _reductions)
        compared, look, groups = canvas.series_of(table, _MOST_SERIES, results)
        known = compared[compared["reduction"].notna()]
        names = [name for name in canvas.wanted(BASELINES) if (known["baseline"] == name).any()]
        if not names:
            raise EmptyFigureError(no_reduction(compared))
        shown = known[known["baseline"].isin(names)]
        for panel, group, name in canvas.rows_of_groups(groups, names, heights=(2.5, 2.1)):
            _draw(panel, name, group, shown[shown["baseline"] == name], look)
        for place in range(len(names)):
            share_y(canvas.shown[place :: len(names)], least=_SHARED_FROM)
        canvas.legends(look, shown)
        canvas.describe(
            results,
            shown,
            "Time saved: 1 - T(strategy, N) / T(baseline, N), signed: below 0 the strategy is slower.",
            missing(compared, results),
            method=(
                "Reductions are geometric means of ratios paired by block, within one execution; allreduce is the "
                "per-batch one on the same engine.",
            ),
        )


def _reductions(results: Results) -> pd.DataFrame:
    return of_others(ratios(results))


def of_others(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of strategies that synchronise less often than every batch."""
    return compared[~compared["strategy"].isin(PER_BATCH)]


def no_reduction(compared: pd.DataFrame) -> str:
    """Return why no time can be compared with a baseline."""
    if compared.empty:
        return "no strategy synchronises less often than every batch"
    crowded = [note for note in sorted(set(compared["note"])) if NO_BASELINE in note]
    return crowded[0] if crowded else f"no baseline ({', '.join(BASELINES)}) ran beside it"


def missing(compared: pd.DataFrame, results: Results) -> str:
    """Return a sentence with reductions that a baseline of the study should have had, and the reason."""
    ran = set(results.completed["strategy"]) & set(BASELINES)
    notes = sorted(set(compared.loc[(compared["note"] != "") & compared["baseline"].isin(ran), "note"]))
    shown = notes[:3] + ([f"{len(notes) - 3} more of this kind"] if len(notes) > 3 else [])
    return f"Not shown: {'; '.join(shown)}." if shown else ""


def _draw(panel: Panel, name: str, group: Sequence[str], table: pd.DataFrame, look: dict[str, Look]) -> None:
    """Draw the reductions of the series of `group` against the baseline `name`, over those of all others."""
    inside = table["series"].isin(group)
    own = table[inside]
    panel.title(f"against {name}")
    panel.reductions(own, table[~inside], look, table["workers"])
    low, high = min(100 * own["reduction"].min(), 0.0), max(100 * own["reduction"].max(), 0.0)
    edge = 0.06 * max(high - low, 1.0)
    panel.ax.set_ylim(low - edge, high + edge)  # whatever the series of other panels are
    panel.workers_axis(table["workers"])
