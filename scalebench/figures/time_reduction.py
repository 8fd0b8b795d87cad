"""The time-reduction figure, and that of its parts: time saved at the same worker count by frequency and by engine.

A panel stands for each per-batch baseline. The reduction-parts figure divides each
reduction into what the baseline's engine and what the frequency contribute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scalebench.analysis import Results, ratios
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing import marks, series_style
from scalebench.figures.drawing.canvas import Canvas, Entry
from scalebench.figures.drawing.panel import Panel, Segment, share_y
from scalebench.figures.drawing.series_style import Look
from scalebench.figures.selection import with_added
from scalebench.formatting import is_interval
from scalebench.study.choices import ALLREDUCE, BASELINES, LIBRARY_BASELINES, PER_BATCH

_MOST_SERIES = 8  # in one panel: it has no baselines
# per cent; a panel that reaches further down has an axis of its own
_SHARED_FROM = -100.0

_COLUMNS = 3
_WORDS = {  # of the legend, by part
    "engine": "saved by plain allreduce instead of the baseline's engine",
    "frequency": "saved by synchronising less often (in the strategy's colour)",
}
_KEPT = (
    "series",
    "execution",
    "engine",
    "workers",
    "oversubscribed",
    "interval",
    "n",
    "baseline_s",
    "saved_s",
)


@FIGURES.add
class TimeReduction(Figure):
    name = "time-reduction"
    panels = BASELINES
    takes_added = True
    summary = "signed time saved at the same worker count, against allreduce and each other per-batch baseline that ran"

    def absent(self, results: Results) -> str:
        if reason := super().absent(results):
            return reason
        compared = _of_others(ratios(results))
        known = compared[compared["baseline"].isin(BASELINES)]["reduction"].notna()
        return "" if known.any() else _no_reduction(compared)

    def draw(self, results: Results, canvas: Canvas) -> None:
        table = with_added(
            _reductions(results),
            # A curve from a file has no baseline.
            [one for one in canvas.added if one.is_study],
            _reductions,
        )
        compared, look, groups = canvas.series_of(table, _MOST_SERIES, results)
        known = compared[compared["reduction"].notna()]
        names = [
            name
            for name in canvas.wanted(BASELINES)
            if (known["baseline"] == name).any()
        ]
        if not names:
            raise EmptyFigureError(_no_reduction(compared))
        shown = known[known["baseline"].isin(names)]
        for panel, group, name in canvas.rows_of_groups(
            groups, names, heights=(2.5, 2.1)
        ):
            _draw(panel, name, group, shown[shown["baseline"] == name], look)
        for place in range(len(names)):
            share_y(canvas.shown[place :: len(names)], least=_SHARED_FROM)
        canvas.legends(look, shown)
        canvas.describe(
            results,
            shown,
            "Time saved: 1 - T(strategy, N) / T(baseline, N), signed: below 0 the strategy is slower.",
            _missing(compared, results),
            method=(
                "Reductions are geometric means of ratios paired by block, within one execution; allreduce is the "
                "per-batch one on the same engine.",
            ),
        )


def _reductions(results: Results) -> pd.DataFrame:
    return _of_others(ratios(results))


def _of_others(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of strategies that synchronise less often than every batch."""
    return compared[~compared["strategy"].isin(PER_BATCH)]


def _no_reduction(compared: pd.DataFrame) -> str:
    """Return why no time can be compared with a baseline."""
    if compared.empty:
        return "no strategy synchronises less often than every batch"
    # A baseline that ran and cannot be one says more than that none ran.
    crowded = [note for note in sorted(set(compared["note"])) if NO_BASELINE in note]
    return (
        crowded[0] if crowded else f"no baseline ({', '.join(BASELINES)}) ran beside it"
    )


def _missing(compared: pd.DataFrame, results: Results) -> str:
    """Return a sentence with reductions that a baseline of the study should have had, and the reason."""
    ran = set(results.completed["strategy"]) & set(BASELINES)
    missing = compared[(compared["note"] != "") & compared["baseline"].isin(ran)]
    notes = sorted(set(missing["note"]))
    shown = notes[:3]
    if len(notes) > 3:
        shown.append(f"{len(notes) - 3} more of this kind")
    return f"Not shown: {'; '.join(shown)}." if shown else ""


def _draw(
    panel: Panel,
    name: str,
    group: Sequence[str],
    table: pd.DataFrame,
    look: dict[str, Look],
) -> None:
    """Draw the reductions of the series of `group` against the baseline `name`, over those of all others."""
    own = table[table["series"].isin(group)]
    panel.title(f"against {name}")
    panel.reductions(table, group, look, table["workers"])
    # Zero is always seen: it is what a reduction is judged by.
    low = min(100 * own["reduction"].min(), 0.0)
    high = max(100 * own["reduction"].max(), 0.0)
    edge = 0.06 * max(high - low, 1.0)
    # whatever the series of other panels are
    panel.ax.set_ylim(low - edge, high + edge)
    panel.workers_axis(table["workers"])


@FIGURES.add
class ReductionParts(Figure):
    name = "reduction-parts"
    panels = LIBRARY_BASELINES
    summary = "time saved against horovod and ddp in two parts: by the engine, and by synchronising less often"

    def absent(self, results: Results) -> str:
        if reason := super().absent(results):
            return reason
        compared = _of_others(ratios(results))
        if _split(compared).any():
            return ""
        if set(LIBRARY_BASELINES).isdisjoint(results.completed["strategy"]):
            return "neither horovod nor ddp ran: there is no engine to tell from the frequency"
        if ALLREDUCE not in set(results.completed["strategy"]):
            return "allreduce did not run, which tells the engine's part from the frequency's"
        return _no_reduction(compared)

    def draw(self, results: Results, canvas: Canvas) -> None:
        compared, look, _ = canvas.series_of(_of_others(ratios(results)), of=results)
        known = compared[_split(compared)]
        wanted = [
            (baseline, name)
            for baseline in canvas.wanted(LIBRARY_BASELINES)
            for name in look
            if ((known["baseline"] == baseline) & (known["series"] == name)).any()
        ]
        if not wanted:
            raise EmptyFigureError(_no_reduction(compared))
        shown = known[known["baseline"].isin(dict(wanted))]
        across = canvas.fits(min(_COLUMNS, len(wanted)), narrow=True)
        number = Counter(baseline for baseline, _ in wanted)
        grids = canvas.grids(*((count, across, 1.95) for count in number.values()))
        # Lettered through, whatever the baseline.
        panels = [panel for grid in grids for panel in grid]
        counts = marks.counts_by_execution(shown)
        several = len(number) > 1
        for panel, (baseline, name) in zip(panels, wanted, strict=True):
            short = canvas.names[name]
            panel.title(
                f"{short} against {baseline}" if several else short,
                f"{name} against {baseline}",
            )
            _draw_parts(
                panel,
                shown[(shown["baseline"] == baseline) & (shown["series"] == name)],
                counts,
                look[name],
            )
            if panel.leftmost:
                panel.ax.set_ylabel(
                    "time saved (%)" if several else f"time saved (% of {baseline})"
                )
        share_y(panels, least=_SHARED_FROM)
        canvas.legend(
            _legend(
                panels,
                shown,
                series_style.ENGINE_ALONE_PATTERN if canvas.style.patterns else None,
            )
        )
        canvas.legend(marks.executions_of_bars(shown))
        canvas.describe(
            results,
            shown,
            "The two parts add up to the time saved; a negative one, below 0, costs time.",
            _missing(compared, results),
            method=(
                f"Against {' and '.join(dict(wanted))}: the engine's part is (T_base - T_allreduce) / T_base, that of "
                "the frequency (T_allreduce - T_strategy) / T_base, with plain allreduce on the strategy's engine.",
            ),
        )


def _split(compared: pd.DataFrame) -> pd.Series[bool]:
    """Mark reductions whose two parts are known."""
    return compared["baseline"].isin(LIBRARY_BASELINES) & compared[
        ["reduction", "engine_part"]
    ].notna().all(axis=1)


def _draw_parts(
    panel: Panel,
    own: pd.DataFrame,
    counts: dict[str, list[int]],
    look: Look,
) -> None:
    """Draw a bar of two parts for each worker count, and the total with its interval."""

    def parts(cell: dict[Hashable, Any]) -> list[Segment]:
        return [
            Segment(
                "engine",
                100 * cell["engine_part"],
                series_style.ENGINE_ALONE,
                series_style.ENGINE_ALONE_PATTERN,
            ),
            Segment("frequency", 100 * cell["frequency_part"], look.color),
        ]

    for at, cell in marks.draw_bars(panel, own, counts, parts, "reduction"):
        total, low, high = (
            100 * cell[key] for key in ("reduction", "reduction_low", "reduction_high")
        )
        size = 0.6 * rcParams["lines.markersize"]
        panel.ax.plot(
            at, total, marker="D", markersize=size, color=series_style.NEUTRAL, zorder=5
        )
        panel.intervals(
            [((at, low), (at, high))], [series_style.NEUTRAL], [(at, total)]
        )
        kept: dict[Hashable, object] = {
            "quantity": "reduction: total",
            "y": total,
            "low": low,
            "high": high,
        }
        panel.keep([kept], **{key: cell[key] for key in _KEPT})
    # Words of the legend follow from the parts that have bars.
    panel.explained |= {
        words for part, words in _WORDS.items() if part in panel.explained
    }
    panel.ax.axhline(0, color="#555555", linewidth=0.8)


def _legend(
    panels: Sequence[Panel], shown: pd.DataFrame, hatch: str | None
) -> list[Entry]:
    """Return the entries of the parts that have bars, and of their sum."""
    size = 0.8 * rcParams["lines.markersize"]
    bounds = zip(shown["reduction_low"], shown["reduction_high"], strict=True)
    total = (
        "both, with interval"
        if any(is_interval(low, high) for low, high in bounds)
        else "both"
    )
    samples = {
        "engine": Patch(
            facecolor=series_style.ENGINE_ALONE,
            edgecolor="white" if hatch else series_style.ENGINE_ALONE,
            hatch=hatch,
        ),
        "frequency": Patch(facecolor="white", edgecolor=series_style.NEUTRAL),
    }
    drawn = set.union(*(panel.explained for panel in panels))
    entries: list[Entry] = [
        (samples[part], words) for part, words in _WORDS.items() if words in drawn
    ]
    mark = Line2D(
        [], [], color=series_style.NEUTRAL, marker="D", markersize=size, linestyle=""
    )
    return [*entries, (mark, total)]
