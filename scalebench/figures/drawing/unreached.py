"""Marks of points whose runs did not all reach the target: a triangle without a value, a star with a median."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.lines import Line2D

from scalebench.figures.drawing.panel import Panel
from scalebench.figures.drawing.styles import NEUTRAL, Look

_UNREACHED, _TORN = "^", "*"  # markers: at most half of the runs reached the target, or some did not


def mark_unreached(
    panel: Panel, own: pd.DataFrame, quantity: str, look: dict[str, Look], *, above: float, x: str = "workers"
) -> None:
    """Draw a triangle at the height `above` for points without a value, and a star over those of some runs."""
    never = own[own["n_reached"] <= own["n_aimed"] / 2].assign(place_of_unreached=above)
    looks = {name: replace(one, marker=_UNREACHED) for name, one in look.items()}
    panel.curve(never, "place_of_unreached", looks, x=x, connect=False, shift=x == "workers")
    looks = {name: replace(one, marker=_TORN) for name, one in look.items()}
    panel.curve(own[torn(own)], quantity, looks, x=x, connect=False, shift=x == "workers")


def torn(table: pd.DataFrame) -> pd.Series[bool]:
    """Mark cells of which more than half of the runs reached the target, but not all."""
    return (table["n_reached"] < table["n_aimed"]) & (table["n_reached"] > table["n_aimed"] / 2)


def legend_of_unreached(never: bool, some: bool, epochs: int) -> list[tuple[Artist, str]]:
    """Return the entries of triangles, drawn where `never`, and of stars, drawn where `some`."""
    marks = [(_UNREACHED, f"not within {epochs} epochs")] * never + [(_TORN, "in some runs only")] * some
    return [
        (Line2D([], [], color=NEUTRAL, marker=marker, linestyle="", markerfacecolor="white"), words)
        for marker, words in marks
    ]
