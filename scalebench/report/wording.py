"""How the report words shares, differences of metrics, and executions."""

from __future__ import annotations

import math

from scalebench.formatting import EMPTY, is_equal, percent

EXECUTIONS_IN_WORDS = {
    "native": "measured",
    "paced": "measured, with compute stretched to a stated device",
    "virtual": "simulated time, real training",
    "modelled": "modelled",
}


def metric_word(name: str) -> str:
    """As it stands in a sentence."""
    return {"r2": "R²"}.get(name, name)


def share(value: float) -> str:
    """`54 %`, without the sign that a word says."""
    return percent(abs(value)).lstrip("+")


def percent_range(low: float, high: float) -> str:
    """`51 to 57 %`; with signs where zero lies between them."""
    if low > 0:
        return f"{share(low).removesuffix(' %')} to {share(high)}"
    return f"{percent(low).removesuffix(' %')} to {percent(high)}"


def metric_change(value: float, metric: str, until: float | None = None) -> str:
    """`3.8 points` of accuracy, which is a share, `0.012` of R²; with `until` a range and its signs.

    An end that is not zero is not shown as zero: the range says on which side of it the end lies.
    """
    if not math.isfinite(value):
        return EMPTY
    scale, places, unit = (100, 1, " points") if metric == "accuracy" else (1, 3, "")
    if until is None:
        return f"{scale * value:.{places}f}{unit}"
    ends = [scale * end for end in (value, until)]
    places = next((n for n in range(places, places + 3) if all(round(end, n) or not end for end in ends)), places)
    low, high = (round(end, places) + 0.0 for end in ends)  # no negative zero
    return f"{low:+.{places}f} to {high:+.{places}f}{unit}"


def metric_with_interval(value: float, low: float, high: float, *, signed: bool = False) -> str:
    """`0.907 [0.899, 0.915]`; without an interval only the value; `equal` of a difference that no seed shows."""
    sign = "+" if signed else ""
    if not math.isfinite(value):
        return EMPTY
    if signed and is_equal(value, low, high):
        return "equal"
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{value:{sign}.3f}"
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
