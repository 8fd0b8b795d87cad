"""The table of cells, one row per configuration over its completed repetitions, and names of cells in text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from scalebench.analysis import intervals
from scalebench.analysis.loading import (
    Results,
    cached,
    is_representative,
    table_by_cell,
)
from scalebench.analysis.pairing import Comparer
from scalebench.analysis.rounds import (
    MEASURED,
    CellRuns,
    runs_by_cell,
    spread,
    timed,
    trained,
)
from scalebench.analysis.target import times_to_target
from scalebench.comm import engines
from scalebench.measured import Measured
from scalebench.study.cell import CELL
from scalebench.study.choices import PER_BATCH
from scalebench.study.spec import SIMULATED
from scalebench.system.disturbance import SHARE

SPLIT = ["compute_s", "comm_s", "wait_s", "data_s", "other_s"]
COST = ["cost_core_hours", "cost_gpu_hours", "energy_j"]
_MEANS = [*SPLIT, *COST]
_MEASURED = [
    "oversubscribed",
    "disturbed",
    "n",
    "train_s",
    "low_s",
    "high_s",
    "median_s",
    "mean_s",
    "q1_s",
    "q3_s",
]
_MEASURED += [
    "median_low_s",
    "median_high_s",
    "spread",
    "metric",
    "metric_low",
    "metric_high",
]
_TARGET = [
    "target_metric",
    "n_aimed",
    "n_reached",
    "time_to_target_s",
    "target_low_s",
    "target_high_s",
]
_TARGET += ["target_interval", "epochs_to_target"]
_SHARED = [
    "strategy",
    "cluster",
    "scaling",
    "batch_policy",
    "steps_per_epoch",
    "n_train",
    "metric_name",
    "syncs",
]


@cached
def cells(results: Results) -> pd.DataFrame:
    """One row per execution, engine, strategy with options, worker count and batch, over its completed repetitions.

    `train_s` is the geometric mean with `low_s`, `high_s`, so that ratios of cells are
    ratios of the times shown; `interval` names the bounds, which are empty for one
    repetition and for virtual times with too few native checks. They hold what a point
    has of its own, not the factor common to all virtual times
    (`native_check.VirtualError`). `median_s` has the quartiles `q1_s`, `q3_s` and, for
    measured times from six repetitions, the 95 % confidence interval `median_low_s`,
    `median_high_s`, which is robust to single odd runs. `spread` is the coefficient of
    variation of lognormal times, sqrt(exp(s^2) - 1), with s the deviation of logs.
    `metric` is the arithmetic mean with a 95 % confidence interval over seeds, which
    ends where the metric's values do. `time_to_target_s`, `epochs_to_target` and the
    other columns of `times_to_target` treat runs that never reached the target as
    censored. Seconds by task and costs are means, empty where one repetition lacks
    them. Times and costs are of the `n` runs of `timed`, metrics of all.
    """
    comparer = Comparer(results)
    found = sorted(runs_by_cell(results), key=lambda cell: cell.at.sort_key)
    table = table_by_cell(
        [_row(cell, comparer) for cell in found], [*CELL, *_MEASURED, "interval"]
    )
    every, counted = (
        of(results).groupby(CELL, dropna=False) for of in (trained, timed)
    )
    # A mean over some repetitions only would stand beside times of all of them.
    complete = counted[_MEANS].count().eq(counted.size(), axis=0)
    means = counted[_MEANS].mean().where(complete)
    table = table.merge(every[_SHARED].first().join(means).reset_index(), on=CELL)
    table = table.merge(
        times_to_target(results)[[*CELL, *_TARGET]], on=CELL, how="left"
    )
    return table[[*CELL, *_SHARED, *_MEASURED, *_MEANS, *_TARGET, "interval"]]


def _row(cell: CellRuns, comparer: Comparer) -> dict[str, Any]:
    """The numbers of a cell, under CELL and _MEASURED."""
    seconds = list(cell.seconds.values())
    time = comparer.time(cell, 0)
    median = intervals.median_time(seconds)
    # Order statistics of draws say nothing about the error of their calibration.
    if cell.execution not in MEASURED:
        median = Measured(median.value)
    low, high = np.quantile(seconds, [0.25, 0.75])
    return {
        **cell.at._asdict(),
        "oversubscribed": cell.oversubscribed,
        "disturbed": cell.disturbed,
        "n": len(seconds),
        **time.named("train_s", "low_s", "high_s"),
        "mean_s": float(np.mean(seconds)),
        "q1_s": low,
        "q3_s": high,
        **median.named("median_s", "median_low_s", "median_high_s"),
        "spread": spread(np.log(seconds)),
        **intervals.metric_interval(
            list(cell.metrics.values()), cell.metric_name
        ).named("metric"),
        "interval": time.kind,
    }


def chosen_strategies(results: Results) -> set[str]:
    """Return the names of the strategies that the study asks for; those that ran and the baselines if it is unknown."""
    named = results.study.get("strategies")
    # No study.yaml, or a damaged one: then what ran was asked for.
    if not isinstance(named, list):
        return set(PER_BATCH) | set(results.runs["strategy"].unique())
    return {
        str(name)
        for item in named
        for name in (item if isinstance(item, dict) else [item])
    }


DISTURBED_BY = f"other programs took more than {100 * SHARE:.0f} % of the cores"


def crowding(marked: pd.DataFrame) -> str:
    """Reason why runs or cells are `marked` as oversubscribed: too many workers, or a pace that was missed."""
    paced = (
        marked["execution"].eq("paced")
        if "execution" in marked
        else pd.Series(False, marked.index)
    )
    why = [f"more workers than the machine can feed{_moving_threads(marked[~paced])}"]
    why *= not paced.all()
    return " or ".join(why + ["steps slower than the stated pace"] * bool(paced.any()))


def _moving_threads(crowded: pd.DataFrame) -> str:
    """Name engines of which a worker wants more cores than it computes on, as two of them fill four."""
    if not {"engine", "workers"} <= set(crowded):
        return ""
    several = crowded.loc[crowded["workers"] > 1, "engine"].unique()
    names = sorted(name for name in several if engines.named(name).progress_threads)
    if not names:
        return ""
    return f", each of {' or '.join(names)} with a thread that moves bytes beside the one that computes"


SHARES = ("exposed", "transfer", "waiting", "hidden")


def communication_shares(
    results: Results, level: float = intervals.LEVEL
) -> pd.DataFrame:
    """The rows of `cells` on several workers whose split was measured, with shares of `train_s` between 0 and 1.

    `exposed` is comm_s / train_s, `waiting` wait_s / train_s (for the last worker to
    arrive), `transfer` the difference, and `hidden` hidden_comm_s / train_s (simulated
    runs only); each the mean over repetitions, with `_low` and `_high` of a t interval
    for measured executions, ending at 0 and 1.
    """
    runs = timed(results)
    runs = runs[(runs["workers"] > 1) & runs["comm_s"].notna()]
    runs = runs.assign(
        exposed=runs["comm_s"] / runs["train_s"],
        waiting=runs["wait_s"] / runs["train_s"],
    )
    runs = runs.assign(
        transfer=runs["exposed"] - runs["waiting"],
        hidden=runs["hidden_comm_s"] / runs["train_s"],
    )
    rows = []
    for key, own in runs.groupby(CELL, dropna=False, sort=False):
        row = dict(zip(CELL, key, strict=True))
        for share in SHARES:
            found = intervals.mean_interval(own[share], level).within(0.0, 1.0)
            row |= (
                found if row["execution"] in MEASURED else Measured(found.value)
            ).named(share)
        rows.append(row)
    columns = [
        *CELL,
        *(f"{share}{end}" for share in SHARES for end in ("", "_low", "_high")),
    ]
    return cells(results).merge(table_by_cell(rows, columns), on=CELL)


COSTS = {"time": "train_s", "core-hours": "core_hours", "memory": "peak_mib"}


def non_dominated(cost: ArrayLike, metric: ArrayLike) -> NDArray[np.bool_]:
    """Mark points (n,) that no other point beats in one of cost and metric and equals or beats in the other.

    Points without a cost or a metric (NaN) are not marked; of equal points all or none
    are.
    """
    x = np.asarray(cost, dtype=np.float64)
    y = np.asarray(metric, dtype=np.float64)
    # [i, j]: point i costs no more than j and reaches at least its metric. NaN compares
    # false, and is no rival.
    as_good = (x[:, None] <= x) & (y[:, None] >= y)
    better = as_good & ((x[:, None] < x) | (y[:, None] > y))
    return np.asarray(np.isfinite(x) & np.isfinite(y) & ~better.any(axis=0))


def metric_by_cost(results: Results) -> pd.DataFrame:
    """The rows of `cells` that have a metric, with core-hours, memory and membership of the fronts.

    `core_hours` with `core_hours_low`, `core_hours_high` are `train_s` and its bounds
    times the cores of the run; they are NaN where the cores are not known. `peak_mib`
    is the mean over repetitions of the largest memory of a worker, on its device where
    that is measured, with the least and the largest of them as `peak_mib_low`,
    `peak_mib_high`; virtual workers share a process, and have none. `train_s_front`,
    `core_hours_front` and `peak_mib_front` mark the non-dominated rows of an execution
    and engine.
    """
    table = cells(results)
    runs = results.completed
    peaks = (
        # The device is what a model has to fit into; on a CPU it is the process.
        runs["peak_device_mib"]
        .fillna(runs["peak_rss_mib"])
        .where(~runs["execution"].isin(SIMULATED))
    )
    found = (
        runs.assign(peak_mib=peaks)
        .groupby(CELL, dropna=False)["peak_mib"]
        .agg(["mean", "min", "max"])
    )
    names = {"mean": "peak_mib", "min": "peak_mib_low", "max": "peak_mib_high"}
    table = table.merge(found.rename(columns=names).reset_index(), on=CELL, how="left")
    table = table[table["metric"].notna()].reset_index(drop=True)
    table = _with_cost(
        table, "core_hours", "cost_core_hours", ("train_s", "low_s", "high_s")
    )
    # A crowded point is no better choice, however it looks.
    compared = table[is_representative(table)]
    for cost in COSTS.values():
        marked = pd.Series(False, table.index)
        for _, own in compared.groupby(["execution", "engine"], sort=False):
            marked[own.index] = non_dominated(own[cost], own["metric"])
        table[f"{cost}_front"] = marked
    return table


def costs_to_target(results: Results) -> pd.DataFrame:
    """The rows of `cells` that have a target, with core-hours and energy until it.

    `core_hours` and `energy_j`, each with `_low` and `_high`, are the time to the
    target and its bounds times the cores, and times the mean power (W) of the whole
    trainings; they are NaN where these are not known.
    """
    table = cells(results)
    table = table[table["target_metric"].notna()].reset_index(drop=True)
    times = "time_to_target_s", "target_low_s", "target_high_s"
    for name, column in (("core_hours", "cost_core_hours"), ("energy_j", "energy_j")):
        table = _with_cost(table, name, column, times)
    return table


def _with_cost(
    table: pd.DataFrame, name: str, column: str, times: tuple[str, str, str]
) -> pd.DataFrame:
    """Add `name`, `name`_low and `name`_high: `times` at the rate of `column`, which is that of whole trainings."""
    # Mean cost over mean time is the rate of all runs together.
    rate = table[column] / table["mean_s"]
    ends = zip((name, f"{name}_low", f"{name}_high"), times, strict=True)
    return table.assign(**{end: table[seconds] * rate for end, seconds in ends})
