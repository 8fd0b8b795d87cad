"""One row per cell: the completed repetitions of one configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from scalebench.analysis.intervals import interval_name, t_bounds
from scalebench.analysis.reading import Results

CELL = ["execution", "engine", "label", "workers", "batch_per_worker", "batch_global"]
PER_BATCH = ("serial", "allreduce", "horovod", "ddp")  # what the others are compared with
EXECUTIONS = ["native", "paced", "virtual", "modelled"]
SPLIT = ["compute_s", "comm_s", "wait_s", "data_s", "other_s"]
_SHARED = ["strategy", "cluster", "scaling", "batch_policy", "steps_per_epoch", "n_train", "metric_name", "syncs"]


@dataclass(frozen=True)
class Cell:
    """One cell's repetitions: seconds by block (repetition of the run order), metric by seed."""

    key: dict[str, object]  # CELL -> value
    strategy: str
    label: str
    execution: str
    engine: str
    workers: int
    batch_global: int | None
    weak: bool
    metric_name: str
    seconds: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    crowded: list[bool] = field(default_factory=list)

    @property
    def oversubscribed(self) -> bool:
        """Whether any of its runs was."""
        return any(self.crowded)


def timed(results: Results) -> pd.DataFrame:
    """The completed runs that have a positive training time."""
    runs = results.completed
    return runs[runs["train_s"] > 0]


def by_block(results: Results) -> list[Cell]:
    """Every cell with its values one by one, for what is paired.

    A repetition is a block of the run order: within a launch, its runs follow each other in an order drawn anew.
    """
    found: dict[tuple[object, ...], Cell] = {}
    runs = timed(results)
    names = [*CELL, "strategy", "scaling", "repetition", "seed", "train_s", "oversubscribed"]
    for run in runs[[*names, "metric_name", "final_metric"]].to_dict("records"):
        identity = tuple(None if pd.isna(run[name]) else run[name] for name in CELL)
        if identity not in found:
            found[identity] = Cell(
                key={name: run[name] for name in CELL},
                strategy=run["strategy"],
                label=run["label"],
                execution=run["execution"],
                engine=run["engine"],
                workers=int(run["workers"]),
                batch_global=None if pd.isna(run["batch_global"]) else int(run["batch_global"]),
                weak=run["scaling"] == "weak",
                metric_name="" if pd.isna(run["metric_name"]) else run["metric_name"],
            )
        cell = found[identity]
        cell.seconds[int(run["repetition"])] = float(run["train_s"])
        cell.crowded.append(bool(run["oversubscribed"]))
        if math.isfinite(run["final_metric"]):
            cell.metrics[int(run["seed"])] = float(run["final_metric"])
    return list(found.values())


def cells(results: Results) -> pd.DataFrame:
    """One row per execution, engine, strategy with options, worker count and batch, over its completed repetitions.

    `train_s` is the geometric mean with `low_s`, `high_s` (see `interval`, empty for one repetition), so that ratios of
    cells are ratios of what is shown; `median_s` with the quartiles `q1_s`, `q3_s` and `mean_s` stand beside it.
    `spread` is the coefficient of variation of lognormal times, sqrt(exp(s^2) - 1), with s the deviation of logs.
    `metric` is the arithmetic mean with a 95 % confidence interval over seeds. `time_to_target_s` is the median over
    repetitions, infinite where most never reached the stated target. Seconds by task are means, empty where one
    repetition lacks them.
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
    table["spread"] = np.sqrt(np.expm1(groups["log"].var()))
    table["q1_s"], table["q3_s"] = groups["train_s"].quantile(0.25), groups["train_s"].quantile(0.75)
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
