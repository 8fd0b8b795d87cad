"""Marks that several figures share: stacked bars of shares, and points whose runs did not all reach the target.

Bars are pale for virtual runs and filled for real ones. A point that was not reached is
a triangle without a value, or a star with a median.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scalebench.figures.drawing import series_style
from scalebench.figures.drawing.canvas import Entry
from scalebench.figures.drawing.panel import POINT, Curve, Panel, Segment, tint
from scalebench.figures.drawing.series_style import Look
from scalebench.formatting import counted, metric_word
from scalebench.study.cell import EXECUTIONS
from scalebench.study.spec import SIMULATED

_GAP = 0.7
_TICK_PER_POINT_IN = 0.021  # width of a two-digit tick label
Row = dict[Hashable, Any]

_UNREACHED, _TORN = (
    "^",
    "*",
)  # markers: at most half of the runs reached the target, or some did not


def draw_bars(
    panel: Panel,
    table: pd.DataFrame,
    counts: dict[str, list[int]],
    segments: Callable[[Row], Sequence[Segment]],
    quantity: str,
    *,
    like: dict[str, list[int]] | None = None,
) -> list[tuple[float, Row]]:
    """Draw one bar for each row of `table` at its execution and worker count; return (x, row) of each bar.

    `counts` has the worker counts of each execution, equal in all panels of a figure so
    that bars align. A panel with fewer counts is centred, with bars as wide as in a
    panel with those of `like`. Executions are named below their counts where the figure
    has several; its legend names them too.
    """
    places: list[tuple[float, Row]] = []
    taken = [len(own) for own in (like or counts).values() if own]
    bars = sum(taken)
    # In widths of bars.
    room = bars + _GAP * len(taken)
    gap = room / 4 if like is not None and counts != like else _GAP
    small = panel.style.small
    crowded = panel.width_in * 0.75 / room < _TICK_PER_POINT_IN * small
    below = 3.1 * small if crowded else 2.0 * small  # of the axis, under the counts
    several = len(taken) > 1
    start, ticks, labels = 0.0, [], []
    for execution in [name for name in reversed(EXECUTIONS) if counts.get(name)]:
        own = {
            int(row["workers"]): row
            for row in table[table["execution"] == execution].to_dict("records")
        }
        for step, count in enumerate(counts[execution]):
            at = start + step
            ticks.append(at)
            labels.append(str(count))
            if count in own:
                key = {name: own[count][name] for name in POINT}
                panel.stack(at, segments(own[count]), key, quantity)
                places.append((at, own[count]))
        if several:
            middle = start + (len(counts[execution]) - 1) / 2
            _name_below(panel, execution, middle, below)
        start += len(counts[execution]) + gap
    panel.ax.set_xticks(ticks, labels, fontsize=small, rotation=90 if crowded else 0)
    panel.ax.tick_params(axis="x", length=0, pad=2)
    panel.ax.set_xlabel("workers", labelpad=2.2 * small if several else None)
    panel.ax.grid(visible=False, axis="x")
    # Panels with fewer bars have the same width for each.
    spare = room - (start - gap + _GAP)
    panel.ax.set_xlim(-0.7 - spare / 2, start - gap - 0.3 + spare / 2)
    return places


def _name_below(panel: Panel, execution: str, at: float, points: float) -> None:
    """Write the name of an execution so far below the axis, centred at x = `at`."""
    panel.ax.annotate(
        execution,
        (at, 0),
        (0, -points),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=panel.style.small,
        color="#666666",
    )


def executions_of_bars(table: pd.DataFrame) -> list[tuple[series_style.Handle, str]]:
    """Return legend entries for the executions in `table`, filled as their bars are."""
    entries: list[tuple[series_style.Handle, str]] = []
    for execution in [
        name for name in series_style.EXECUTION_WORDS if name in set(table["execution"])
    ]:
        face = (
            tint(series_style.NEUTRAL)
            if execution in SIMULATED
            else series_style.NEUTRAL
        )
        sample = Patch(
            facecolor=face,
            edgecolor=series_style.NEUTRAL,
            linestyle="--" if execution == "modelled" else "-",
        )
        entries.append((sample, series_style.EXECUTION_WORDS[execution]))
    return entries


def counts_by_execution(table: pd.DataFrame) -> dict[str, list[int]]:
    """Return the worker counts of each execution in `table`."""
    groups = table.groupby("execution")["workers"]
    return {str(name): sorted(int(n) for n in own.unique()) for name, own in groups}


def mark_unreached(
    panel: Panel,
    own: pd.DataFrame,
    curve: Curve,
    look: dict[str, Look],
    *,
    epochs: int,
    above: float,
) -> None:
    """Draw a triangle at the height `above` for points without a value, and a star over those of some runs."""
    height = "place_of_unreached"
    parts = (
        (_UNREACHED, own[never(own)].assign(**{height: above}), height),
        (_TORN, own[torn(own)], curve.quantity),
    )
    for marker, marked, quantity in parts:
        if len(marked):
            panel.explained.add(_words(epochs)[marker])
        looks = {name: replace(one, marker=marker) for name, one in look.items()}
        # Triangles at one worker count have the same height.
        aside = curve.over == "workers"
        points = Curve(quantity, over=curve.over, connect=False, shift=aside)
        panel.curve(marked, points, looks)


def never(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark cells of which at most half of the runs reached the target."""
    return table["n_reached"] <= table["n_aimed"] / 2


def torn(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark cells of which more than half of the runs reached the target, but not all."""
    return (table["n_reached"] < table["n_aimed"]) & ~never(table)


def legend_of_unreached(panels: Sequence[Panel], epochs: int) -> list[Entry]:
    """Return the entries of triangles and stars, as far as the panels have any."""
    return [
        (
            Line2D(
                [],
                [],
                color=series_style.NEUTRAL,
                marker=marker,
                linestyle="",
                markerfacecolor="white",
            ),
            words,
        )
        for marker, words in _words(epochs).items()
        if any(words in panel.explained for panel in panels)
    ]


def _words(epochs: int) -> dict[str, str]:
    """Return the words of the legend by marker."""
    return {
        _UNREACHED: f"not within {counted(epochs, 'epoch')}",
        _TORN: "in some runs only",
    }


def target_in_words(table: pd.DataFrame) -> str:
    """Return the target of a study: `accuracy 0.9`."""
    return f"{metric_word(str(table['metric_name'].iloc[0]) or 'metric')} {table['target_metric'].iloc[0]:g}"
