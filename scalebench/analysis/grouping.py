"""One row per cell: the completed repetitions of one configuration."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from scalebench.analysis.intervals import interval_name, t_bounds
from scalebench.analysis.reading import Results

CELL = ["execution", "engine", "label", "workers", "batch_per_worker", "batch_global"]
PER_BATCH = ("serial", "allreduce", "horovod", "ddp")  # what the others are compared with
EXECUTIONS = ["native", "paced", "virtual", "modelled"]
SPLIT = ["compute_s", "comm_s", "wait_s", "data_s", "other_s"]
_SHARED = ["strategy", "cluster", "scaling", "batch_policy", "steps_per_epoch", "n_train", "metric_name", "syncs"]


def timed(results: Results) -> pd.DataFrame:
    """The completed runs that have a positive training time."""
    runs = results.completed
    return runs[runs["train_s"] > 0]


def cells(results: Results) -> pd.DataFrame:
    """One row per execution, engine, strategy with options, worker count and batch, over its completed repetitions.

    `train_s` is the geometric mean with `low_s`, `high_s` (see `interval`, empty for one repetition), so that ratios of
    cells are ratios of what is shown; `median_s` and `mean_s` stand beside it. `metric` is the arithmetic mean with a
    95 % confidence interval over seeds. `time_to_target_s` is the median over repetitions, infinite where most never
    reached the stated target. Seconds by task are means, empty where one repetition lacks them.
    """
    runs = timed(results)
    never = runs["time_to_target_s"].fillna(math.inf).where(runs["target_metric"].notna())
    logs = runs["train_s"].map(math.log)
    groups = runs.assign(time_to_target_s=never, log=logs).groupby(CELL, dropna=False, sort=False)
    table = groups[_SHARED].first()
    table["oversubscribed"] = groups["oversubscribed"].any()
    table["n"] = groups.size()
    low, high = t_bounds(groups["log"].mean(), groups["log"].std(), table["n"])
    table["train_s"], table["low_s"], table["high_s"] = np.exp(groups["log"].mean()), np.exp(low), np.exp(high)
    table["median_s"], table["mean_s"] = groups["train_s"].median(), groups["train_s"].mean()
    metric = groups["final_metric"]
    table["metric"] = metric.mean()
    table["metric_low"], table["metric_high"] = t_bounds(metric.mean(), metric.std(), metric.count())
    table["time_to_target_s"] = groups["time_to_target_s"].median()
    measured = groups[SPLIT].count().eq(table["n"], axis=0)
    table[SPLIT] = groups[SPLIT].mean().where(measured)
    table = table.reset_index()
    table["interval"] = [
        interval_name(kind) if n > 1 else "" for kind, n in zip(table["execution"], table["n"], strict=True)
    ]
    return _in_order(table)


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    if table.empty:
        return table
    order = table.assign(
        _execution=table["execution"].map(EXECUTIONS.index), _strategy=table["label"].map(strategy_rank)
    )
    keys = ["_execution", "_strategy", "engine", "workers", "batch_per_worker"]
    return order.sort_values(keys, kind="stable").drop(columns=keys[:2]).reset_index(drop=True)


def strategy_rank(label: str) -> tuple[int, str]:
    """Baselines first, in the order in which they build on each other, then the others by name."""
    return (PER_BATCH.index(label) if label in PER_BATCH else len(PER_BATCH), label)
