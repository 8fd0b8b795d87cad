"""Errors of predictions against measurements: signed error, skill over linear scaling, coverage, order.

A row is a measurement, published or of a study (`execution`), beside its prediction,
which is modelled. Linear scaling is empty where the measurement itself is its base.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

_COLUMNS = (
    "source",
    "series",
    "system",
    "execution",
    "strategy",
    "model",
    "workers",
    "nodes",
    "quantity",
    "unit",
    "measured",
    "predicted",
    "low",
    "high",
    "linear",
    "doublings",
    "configuration",
    "seconds",
    "predicted_s",
    "linear_s",
)
CLEARLY = 0.10  # strategies that differ by more are compared in their order


def predictions_of(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return the table of predictions; rows whose quantity is in seconds leave out what follows from that."""
    in_seconds = {
        "seconds": "measured",
        "predicted_s": "predicted",
        "linear_s": "linear",
    }
    complete = []
    for row in rows:
        usual = {name: row[of] for name, of in in_seconds.items()}
        complete.append({"unit": "s"} | usual | row)
    return pd.DataFrame(complete, columns=list(_COLUMNS))


def with_errors(predictions: pd.DataFrame) -> pd.DataFrame:
    """Add `error` = predicted / measured - 1, `linear_error` likewise, and `held`: the interval has the measurement.

    `held` is empty where there is no interval.
    """
    measured = predictions["measured"]
    inside = (predictions["low"] <= measured) & (measured <= predictions["high"])
    has_interval = predictions["low"].notna()
    held = inside if has_interval.all() else inside.astype(float).where(has_interval)
    return predictions.assign(
        error=predictions["predicted"] / measured - 1,
        linear_error=predictions["linear"] / measured - 1,
        held=held,
    )


def skill(errors: pd.DataFrame) -> float:
    """Return 1 - MAPE / MAPE of linear scaling: 1 is perfect, 0 as good as linear scaling, below 0 worse."""
    # Points that linear scaling starts from are left out of both means.
    scaled = errors[errors["linear_error"].notna()]
    linear = scaled["linear_error"].abs().mean()
    return (
        float(1 - scaled["error"].abs().mean() / linear) if linear > 0 else float("nan")
    )


def error_by_source(errors: pd.DataFrame) -> pd.DataFrame:
    """Return points, MAPE, median, MAPE of linear scaling, skill and coverage of each source, and of all inside a node.

    Errors of `with_errors`; shares, not percentages.
    """
    groups = [(str(source), group) for source, group in errors.groupby("source")]
    # Inside a node no network between nodes can be wrong.
    groups += [("all of one node", errors[errors["nodes"] == 1]), ("all", errors)]
    rows = [
        {
            "source": name,
            "points": len(group),
            "mape": group["error"].abs().mean(),
            "median": group["error"].abs().median(),
            "bias": group["error"].mean(),
            "linear_mape": group["linear_error"].abs().mean(),
            "skill": skill(group),
            "held": group["held"].mean(),
        }
        for name, group in groups
        if len(group)
    ]
    return pd.DataFrame(rows)


def error_by_distance(errors: pd.DataFrame) -> pd.DataFrame:
    """Return points, MAPE, MAPE of linear scaling and coverage by whole doublings from the calibration."""
    # Less than a twentieth of a doubling is none.
    doublings = np.ceil(errors["doublings"].round(1)).astype(int).rename("doublings")
    sizes = errors.assign(
        size=errors["error"].abs(), linear_size=errors["linear_error"].abs()
    )
    found = sizes.groupby(doublings).agg(
        points=("size", "size"),
        mape=("size", "mean"),
        linear_mape=("linear_size", "mean"),
        held=("held", "mean"),
    )
    return found.reset_index()


def pairs_in_order(errors: pd.DataFrame, clearly: float = CLEARLY) -> tuple[int, int]:
    """Return (pairs in the right order, pairs): two strategies for one configuration whose times differ clearly."""
    right, pairs = 0, 0
    for _, group in errors[errors["seconds"].notna()].groupby(
        ["configuration", "workers"]
    ):
        rows: list[Any] = list(group.itertuples())
        for a, b in combinations(rows, 2):
            apart = max(a.seconds, b.seconds) / min(a.seconds, b.seconds)
            # Closer times may be in either order by their noise alone.
            if a.strategy == b.strategy or apart <= 1 + clearly:
                continue
            pairs += 1
            right += (a.seconds < b.seconds) == (a.predicted_s < b.predicted_s)
    return right, pairs
