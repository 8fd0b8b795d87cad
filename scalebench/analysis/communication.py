"""Shares of the training time that workers spend in communication that compute does not hide, and waiting in it."""

from __future__ import annotations

import pandas as pd

from scalebench.analysis.grouping import cells
from scalebench.analysis.intervals import LEVEL, Interval, mean_interval
from scalebench.analysis.loading import CELL, Results
from scalebench.analysis.rounds import MEASURED, timed

SHARES = ("exposed", "transfer", "waiting")


def communication_shares(results: Results, level: float = LEVEL) -> pd.DataFrame:
    """The rows of `cells` on several workers whose split was measured, with shares of `train_s` between 0 and 1.

    `exposed` is comm_s / train_s, `waiting` wait_s / train_s (for the last worker to arrive), and `transfer` the
    difference; each the mean over repetitions, with `_low` and `_high` of a t interval for measured executions, ending
    at 0 and 1. Communication that compute hides is not in the records.
    """
    runs = timed(results)
    runs = runs[(runs["workers"] > 1) & runs["comm_s"].notna()]
    runs = runs.assign(exposed=runs["comm_s"] / runs["train_s"], waiting=runs["wait_s"] / runs["train_s"])
    runs = runs.assign(transfer=runs["exposed"] - runs["waiting"])
    rows = []
    for key, own in runs.groupby(CELL, dropna=False, sort=False):
        row = dict(zip(CELL, key, strict=True))
        for share in SHARES:
            found: Interval = mean_interval(own[share], level)
            row[share] = found.centre
            if row["execution"] in MEASURED:
                row |= {f"{share}_low": max(found.low, 0.0), f"{share}_high": min(found.high, 1.0)}
        rows.append(row)
    columns = [*CELL, *(f"{share}{end}" for share in SHARES for end in ("", "_low", "_high"))]
    shares = pd.DataFrame(rows).reindex(columns=columns)
    return cells(results).merge(shares.astype(dict.fromkeys(CELL[-2:], "Int64")), on=CELL)
