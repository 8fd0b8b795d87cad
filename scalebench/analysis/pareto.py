"""The metric of each cell against its cost in time and core-hours, and the Pareto fronts of both.

A cell is on a front if no other cell of its execution and engine reaches at least its metric at no higher cost, one of
them strictly better. Oversubscribed cells, whose times are those of a crowded machine, are not compared.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis.grouping import cells
from scalebench.analysis.loading import Results

COSTS = {"time": "train_s", "core-hours": "core_hours"}


def non_dominated(cost: ArrayLike, metric: ArrayLike) -> NDArray[np.bool_]:
    """Mark points (n,) that no other point beats in one of cost and metric and equals or beats in the other.

    Points without a cost or a metric (NaN) are not marked; of equal points all or none are.
    """
    x, y = np.asarray(cost, dtype=np.float64), np.asarray(metric, dtype=np.float64)
    as_good = (x[:, None] <= x) & (y[:, None] >= y)
    better = as_good & ((x[:, None] < x) | (y[:, None] > y))
    return np.asarray(np.isfinite(x) & np.isfinite(y) & ~better.any(axis=0))


def metric_by_cost(results: Results) -> pd.DataFrame:
    """The rows of `cells` that have a metric, with core-hours and membership of the fronts.

    `core_hours` with `core_hours_low`, `core_hours_high` are `train_s` and its bounds times the cores of the run; they
    are NaN where the cores are not known. `train_s_front` and `core_hours_front` mark the non-dominated rows of an
    execution and engine.
    """
    table = cells(results)
    table = table[table["metric"].notna()].reset_index(drop=True)
    hours_per_s = table["cost_core_hours"] / table["mean_s"]
    bounds = {"core_hours": "train_s", "core_hours_low": "low_s", "core_hours_high": "high_s"}
    table = table.assign(**{name: table[seconds] * hours_per_s for name, seconds in bounds.items()})
    compared = table[~table["oversubscribed"].astype(bool)]
    for cost in COSTS.values():
        marked = pd.Series(False, table.index)
        for _, own in compared.groupby(["execution", "engine"], sort=False):
            marked[own.index] = non_dominated(own[cost], own["metric"])
        table[f"{cost}_front"] = marked
    return table
