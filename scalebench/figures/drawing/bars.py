"""Stacked bars over worker counts: pale for virtual runs, filled for real runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pandas as pd
from matplotlib.patches import Patch

from scalebench.figures.drawing.panel import Panel, Segment, tint
from scalebench.figures.drawing.series_style import EXECUTION_WORDS, NEUTRAL, Handle
from scalebench.study.cell import EXECUTIONS
from scalebench.study.spec import SIMULATED

_GAP = 0.7
_TICK_PER_POINT_IN = 0.021  # width of a two-digit tick label
Cell = dict[Hashable, Any]


def draw_bars(
    panel: Panel,
    table: pd.DataFrame,
    counts: dict[str, list[int]],
    segments: Callable[[Cell], Sequence[Segment]],
    quantity: str,
    *,
    like: dict[str, list[int]] | None = None,
) -> list[tuple[float, Cell]]:
    """Draw one bar for each row of `table` at its execution and worker count; return (x, row) of each bar.

    `counts` has the worker counts of each execution, equal in all panels of a figure so that bars align. A panel with
    fewer counts is centred, with bars as wide as in a panel with those of `like`. Executions are named below their
    counts where the figure has several; its legend names them too.
    """
    places: list[tuple[float, Cell]] = []
    taken = [len(own) for own in (like or counts).values() if own]
    bars = sum(taken)
    room = bars + _GAP * len(taken)
    gap = room / 4 if like is not None and counts != like else _GAP
    small = panel.style.small
    crowded = panel.width_in * 0.75 / room < _TICK_PER_POINT_IN * small
    below = 3.1 * small if crowded else 2.0 * small  # of the axis, under the counts
    several = len(taken) > 1
    start, ticks, labels = 0.0, [], []
    for execution in [name for name in reversed(EXECUTIONS) if counts.get(name)]:
        own = {int(row["workers"]): row for row in table[table["execution"] == execution].to_dict("records")}
        for step, count in enumerate(counts[execution]):
            at = start + step
            ticks.append(at)
            labels.append(str(count))
            if count in own:
                key = {
                    name: own[count][name] for name in ("series", "execution", "engine", "workers", "oversubscribed")
                }
                panel.stack(at, segments(own[count]), key, quantity)
                places.append((at, own[count]))
        if several:
            middle = start + (len(counts[execution]) - 1) / 2
            panel.ax.annotate(
                execution,
                (middle, 0),
                (0, -below),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=small,
                color="#666666",
            )
        start += len(counts[execution]) + gap
    panel.ax.set_xticks(ticks, labels, fontsize=small, rotation=90 if crowded else 0)
    panel.ax.tick_params(axis="x", length=0, pad=2)
    panel.ax.set_xlabel("workers", labelpad=2.2 * small if several else None)
    panel.ax.grid(visible=False, axis="x")
    spare = room - (start - gap + _GAP)
    panel.ax.set_xlim(-0.7 - spare / 2, start - gap - 0.3 + spare / 2)
    return places


def executions_of_bars(table: pd.DataFrame) -> list[tuple[Handle, str]]:
    """Return legend entries for the executions in `table`, filled as their bars are."""
    entries: list[tuple[Handle, str]] = []
    for execution in [name for name in EXECUTION_WORDS if name in set(table["execution"])]:
        face = tint(NEUTRAL) if execution in SIMULATED else NEUTRAL
        sample = Patch(facecolor=face, edgecolor=NEUTRAL, linestyle="--" if execution == "modelled" else "-")
        entries.append((sample, EXECUTION_WORDS[execution]))
    return entries


def counts_by_execution(table: pd.DataFrame) -> dict[str, list[int]]:
    """Return the worker counts of each execution in `table`."""
    return {str(name): sorted(int(n) for n in group.unique()) for name, group in table.groupby("execution")["workers"]}
