"""One row per cell: the completed repetitions of one configuration."""

from __future__ import annotations

import math

import pandas as pd

from scalebench.analysis.intervals import interval_name, mean_interval, time_interval
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
    return _in_order(pd.DataFrame([_cell(key, group) for key, group in timed(results).groupby(CELL, dropna=False)]))


def _cell(key: tuple[object, ...], group: pd.DataFrame) -> dict[str, object]:
    row: dict[str, object] = dict(zip(CELL, key, strict=True))
    first = group.iloc[0]
    time, metric = time_interval(group["train_s"].tolist()), mean_interval(group["final_metric"].dropna().tolist())
    row |= {name: first[name] for name in _SHARED}
    row |= {
        "oversubscribed": bool(group["oversubscribed"].any()),
        "n": time.n,
        "train_s": time.centre,
        "low_s": time.low,
        "high_s": time.high,
        "median_s": float(group["train_s"].median()),
        "mean_s": float(group["train_s"].mean()),
        "interval": interval_name(str(row["execution"])) if time.n > 1 else "",
        "metric": metric.centre,
        "metric_low": metric.low,
        "metric_high": metric.high,
        "time_to_target_s": _time_to_target(group),
    }
    row |= {name: float(group[name].mean(skipna=False)) for name in SPLIT}
    return row


def _time_to_target(group: pd.DataFrame) -> float:
    stated = group[group["target_metric"].notna()]
    return float(stated["time_to_target_s"].fillna(math.inf).median()) if len(stated) else math.nan


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
