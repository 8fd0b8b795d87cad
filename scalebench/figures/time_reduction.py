"""The time-reduction figure: time saved against per-batch allreduce, and against Horovod and DDP in two parts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scalebench.analysis import Results, cells, ratios
from scalebench.analysis.grouping import PER_BATCH
from scalebench.analysis.pairing import NO_BASELINE
from scalebench.figures.base import FIGURES, EmptyFigureError, Figure
from scalebench.figures.drawing.bars import counts_by_execution, draw_bars
from scalebench.figures.drawing.canvas import Canvas
from scalebench.figures.drawing.panel import Panel, Segment, share_y
from scalebench.figures.drawing.styles import ENGINE_PART, NEUTRAL, Look, name_series
from scalebench.formatting import is_interval

_COLUMNS = 3
_CURVES, _SPLITS = ("allreduce", "time", "serial"), ("horovod", "ddp")
_SHARED_FROM = -100.0  # per cent; a panel that reaches further down has an axis of its own
_KEPT = ("series", "execution", "engine", "workers", "oversubscribed", "interval", "n", "baseline_s", "saved_s")
_ENGINE_PATTERN = "/////"


@FIGURES.add
class TimeReduction(Figure):
    name = "time-reduction"
    panels = (*_CURVES, *_SPLITS)
    summary = (
        "signed time saved at the same worker count: against allreduce, and horovod and ddp, if there, in two parts"
    )

    def absent(self, results: Results) -> str:
        if reason := super().absent(results):
            return reason
        compared = _of_others(ratios(results))
        return "" if compared["reduction"].notna().any() else _no_reduction(compared)

    def draw(self, results: Results, canvas: Canvas) -> None:
        times = name_series(cells(results))
        _, look, _ = canvas.series_of(times)
        compared, _, groups = canvas.series_of(_of_others(ratios(results)))
        shown = times[times["series"].isin(compared["series"]) | (times["strategy"] == "allreduce")]
        shown = replace(canvas.selection, strategies=()).of(shown)
        known = compared[compared["reduction"].notna()]
        names = [name for name in canvas.wanted(_CURVES) if name == "time" or (known["baseline"] == name).any()]
        names = names if names != ["time"] or canvas.chosen else []
        splits = [
            (baseline, name)
            for baseline in canvas.wanted(_SPLITS)
            for name in look
            if ((known["baseline"] == baseline) & (known["series"] == name)).any()
        ]
        if not names and not splits:
            raise EmptyFigureError(_no_reduction(compared))
        height = 2.5 if len(groups) == 1 else 2.1
        curves = [(len(groups) * len(names), canvas.fits(len(names)), height)] if names else []
        rows = [
            (sum(own == baseline for own, _ in splits), canvas.fits(_COLUMNS, narrow=True), 1.95)
            for baseline in dict(splits)
        ]
        grids = canvas.grids(*curves, *rows)
        panels = grids.pop(0) if names else []
        for place, panel in enumerate(panels):
            group, name = groups[place // len(names)], names[place % len(names)]
            _draw_curve(panel, name, group, shown if name == "time" else known[known["baseline"] == name], look)
        for place, name in enumerate(names):
            share_y(panels[place :: len(names)], least=-math.inf if name == "time" else _SHARED_FROM)
        _draw_splits([panel for grid in grids for panel in grid], known, splits, look)
        canvas.legends(look, shown)
        canvas.legend(_parts_legend(known, splits, _ENGINE_PATTERN if canvas.style.patterns else None))
        baselines = {"allreduce": "per-batch allreduce on the same engine", "serial": "serial on one worker"}
        drawn = [words for name, words in baselines.items() if name in names]
        canvas.describe(
            results,
            shown,
            "Reduction = 1 - T(strategy, N) / T(baseline, N), signed, within one execution, as geometric means of "
            "ratios paired by block.",
            f"Baselines: {'; '.join(drawn)}." if drawn else "",
            f"Against {' and '.join(dict(splits))} in two parts: engine (T_base - T_allreduce) / T_base and frequency "
            "(T_allreduce - T_strategy) / T_base."
            if splits
            else "",
            _missing(compared, results),
        )


def _of_others(compared: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of strategies that synchronise less often than every batch."""
    return compared[~compared["strategy"].isin(PER_BATCH)]


def _no_reduction(compared: pd.DataFrame) -> str:
    """Return why no time can be compared with a baseline."""
    if compared.empty:
        return "no strategy synchronises less often than every batch"
    crowded = [note for note in sorted(set(compared["note"])) if NO_BASELINE in note]
    return crowded[0] if crowded else "no baseline (allreduce, serial, horovod, ddp) ran beside it"


def _draw_curve(panel: Panel, name: str, group: Sequence[str], table: pd.DataFrame, look: dict[str, Look]) -> None:
    """Draw the series of `group` and allreduce, or their reductions against the baseline `name`, over all others."""
    inside = table["series"].isin(group) | (table["strategy"] == "allreduce")
    own, others = table[inside], table[~inside]
    if name == "time":
        panel.title("training time")
        panel.context(others, "train_s")
        panel.curve(own, "train_s", look, low="low_s", high="high_s")
        panel.seconds_axis()
    else:
        panel.title(f"reduction against {name}")
        panel.reductions(own, others, look, name, table["workers"])
        low, high = min(100 * own["reduction"].min(), 0.0), max(100 * own["reduction"].max(), 0.0)
        edge = 0.06 * max(high - low, 1.0)
        panel.ax.set_ylim(low - edge, high + edge)  # whatever the series of other panels are
    panel.workers_axis(table["workers"])


def _draw_splits(
    panels: Sequence[Panel], known: pd.DataFrame, splits: Sequence[tuple[str, str]], look: dict[str, Look]
) -> None:
    counts = counts_by_execution(known[known["baseline"].isin(_SPLITS)])
    for panel, (baseline, name) in zip(panels, splits, strict=True):
        panel.title(name, f"{name} against {baseline}")
        own = known[(known["baseline"] == baseline) & (known["series"] == name)]

        def parts(cell: dict[Hashable, Any], color: str = look[name].color) -> list[Segment]:
            return [
                Segment("engine", 100 * cell["engine_part"], ENGINE_PART, _ENGINE_PATTERN),
                Segment("frequency", 100 * cell["frequency_part"], color),
            ]

        for at, cell in draw_bars(panel, own, counts, parts, "reduction"):
            total, low, high = (100 * cell[key] for key in ("reduction", "reduction_low", "reduction_high"))
            size = 0.6 * rcParams["lines.markersize"]
            panel.ax.plot(at, total, marker="D", markersize=size, color=NEUTRAL, zorder=5)
            panel.intervals([((at, low), (at, high))], [NEUTRAL])
            kept: dict[Hashable, object] = {"quantity": "reduction: total", "y": total, "low": low, "high": high}
            panel.keep([kept], **{key: cell[key] for key in _KEPT})
        panel.ax.axhline(0, color="#555555", linewidth=0.8)
        if panel.leftmost:
            panel.ax.set_ylabel(f"% of {baseline}")
    share_y(panels, least=_SHARED_FROM)


def _parts_legend(
    known: pd.DataFrame, splits: Sequence[tuple[str, str]], hatch: str | None
) -> list[tuple[Artist, str]]:
    if not splits:
        return []
    size = 0.8 * rcParams["lines.markersize"]
    bounds = zip(known["reduction_low"], known["reduction_high"], strict=True)
    total = "total, with interval" if any(is_interval(low, high) for low, high in bounds) else "total"
    return [
        (Patch(facecolor=ENGINE_PART, edgecolor="white" if hatch else ENGINE_PART, hatch=hatch), "part of the engine"),
        (Patch(facecolor="#D55E00", edgecolor="#D55E00"), "part of the frequency (strategy's colour)"),
        (Line2D([], [], color=NEUTRAL, marker="D", markersize=size, linestyle=""), total),
    ]


def _missing(compared: pd.DataFrame, results: Results) -> str:
    """Caption: reductions that a baseline of the study should have had, with the reason."""
    ran = set(results.completed["strategy"])
    notes = sorted(set(compared.loc[(compared["note"] != "") & compared["baseline"].isin(ran), "note"]))
    shown = notes[:3] + ([f"{len(notes) - 3} more of this kind"] if len(notes) > 3 else [])
    return f"Not shown: {'; '.join(shown)}." if shown else ""
