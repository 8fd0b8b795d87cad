"""What a panel shows, in words and with its numbers, for whoever cannot see it."""

from __future__ import annotations

import pandas as pd

from scalebench.formatting import digits

_MOST = 16  # series: more would be listened to by nobody


def describe(drawn: pd.DataFrame, x: str, y: str) -> str:
    """For each series of `drawn` (the numbers of one panel, see `Panel.data`) where it starts and where it ends.

    `x` and `y` are the axes' labels.
    """
    axes = f"{y or 'value'} against {x or 'workers'}"
    if drawn.empty or "execution" not in drawn:
        return f"{axes}: nothing drawn."
    series = drawn[drawn["execution"].notna() & drawn["y"].notna()]
    said = [
        _course(key, group.sort_values(_along(group)))
        for key, group in series.groupby(["series", "execution", "quantity"], sort=False)
    ]
    more = f" And {len(said) - _MOST} more series." if len(said) > _MOST else ""
    return f"{axes}. {' '.join(said[:_MOST])}{more}" if said else f"{axes}: not measured."


def _along(group: pd.DataFrame) -> str:
    return "x" if "x" in group and group["x"].notna().all() else "workers"


def _course(key: tuple[object, ...], group: pd.DataFrame) -> str:
    name, execution, quantity = (str(part) for part in key)
    part = quantity.rpartition(": ")[2] if ": " in quantity else ""
    along = _along(group)
    first, last = group.iloc[0], group.iloc[-1]
    what = f"{name}{f', {part}' if part else ''} ({execution})"
    start = f"{what}: {digits(first['y'])} at {first[along]:.3g}"
    return f"{start}." if len(group) == 1 else f"{start}, {digits(last['y'])} at {last[along]:.3g}."
