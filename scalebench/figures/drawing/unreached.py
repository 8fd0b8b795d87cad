"""Marks of points whose runs did not all reach the target: a triangle without a value, a star with a median."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.lines import Line2D

from scalebench.figures.drawing.canvas import Entry
from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.series_style import NEUTRAL, Look
from scalebench.formatting import metric_word

_UNREACHED, _TORN = "^", "*"  # markers: at most half of the runs reached the target, or some did not


def mark_unreached(
    panel: Panel,
    own: pd.DataFrame,
    quantity: str,
    look: dict[str, Look],
    *,
    epochs: int,
    above: float,
    x: str = "workers",
) -> None:
    """Draw a triangle at the height `above` for points without a value, and a star over those of some runs."""
    parts = ((_UNREACHED, own[never(own)].assign(place_of_unreached=above), "place_of_unreached"),
             (_TORN, own[torn(own)], quantity))  # fmt: skip
    for marker, marked, height in parts:
        if len(marked):
            panel.explained.add(_words(epochs)[marker])
        looks = {name: replace(one, marker=marker) for name, one in look.items()}
        panel.curve(marked, height, looks, x=x, connect=False, shift=x == "workers")


def never(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark cells of which at most half of the runs reached the target."""
    return table["n_reached"] <= table["n_aimed"] / 2


def torn(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark cells of which more than half of the runs reached the target, but not all."""
    return (table["n_reached"] < table["n_aimed"]) & ~never(table)


def legend_of_unreached(panels: Sequence[Panel], epochs: int) -> list[Entry]:
    """Return the entries of triangles and stars, as far as the panels have any."""
    return [
        (Line2D([], [], color=NEUTRAL, marker=marker, linestyle="", markerfacecolor="white"), words)
        for marker, words in _words(epochs).items()
        if any(words in panel.explained for panel in panels)
    ]


def _words(epochs: int) -> dict[str, str]:
    """Return the words of the legend by marker."""
    return {_UNREACHED: f"not within {epochs} epochs", _TORN: "in some runs only"}


def target_in_words(table: pd.DataFrame) -> str:
    """Return the target of a study: `accuracy 0.9`."""
    return f"{metric_word(str(table['metric_name'].iloc[0]) or 'metric')} {table['target_metric'].iloc[0]:g}"
