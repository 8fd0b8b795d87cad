"""Our value of a published quantity, computed from the rows of a study."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis import Results, ratios
from scalebench.analysis.intervals import METRIC_RANGE, Interval, median_interval, metric_interval
from scalebench.analysis.target_ratios import target_ratios
from scalebench.errors import UsageError, nearest


@dataclass(frozen=True)
class Obtained:
    """A value with its interval (NaN where none is offered), the execution of its rows and their number."""

    value: float
    low: float
    high: float
    execution: str
    n: int


def obtain(results: Results, quantity: str, strategy: str, workers: int | None) -> list[Obtained]:
    """Return `quantity` of a strategy (with its options) at a worker count, one value per execution and engine.

    A quantity is a name of QUANTITIES, with its argument after @: `epochs_to@0.80`, `time_reduction@serial`. Empty if
    the study has no such rows.

    Raises:
        UsageError: an unknown quantity.
    """
    name, _, argument = quantity.partition("@")
    if name not in QUANTITIES:
        raise UsageError(f"unknown quantity {name!r}; {nearest(name, QUANTITIES)}")
    found = []
    completed = results.completed
    of_strategy = completed[completed["label"] == strategy]
    for (execution, engine), runs in of_strategy.groupby(["execution", "engine"], sort=False):
        at = runs if workers is None else runs[runs["workers"] == workers]
        if len(at):
            value = QUANTITIES[name](results, runs, at, argument)
            if value is not None and not math.isnan(value.centre):
                place = execution if execution == engine or engine == "virtual" else f"{execution} {engine}"
                found.append(Obtained(value.centre, value.low, value.high, str(place), value.n))
    return found


def _final_metric(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Metric after the last epoch, mean over seeds."""
    values = at["final_metric"].dropna()
    return _within_range(values, at) if len(values) else None


def _final_train_metric(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """The same on training samples."""
    values = at["final_train_metric"].dropna()
    return _within_range(values, at) if len(values) else None


def _metric_after_epoch(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Metric after that many epochs, mean over seeds."""
    values = _curves(results, at).get(int(argument))
    return None if values is None or values.isna().any() else _within_range(values, at)


def _epochs_to(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Epochs until the metric is reached, median over seeds; infinite where most never reach it."""
    curves = _curves(results, at)
    return None if curves.empty else _median(_first_epochs(curves, float(argument)))


def _ideal_speedup_to(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Workers times the epochs of serial over its own epochs: the speedup to a metric if epochs scaled perfectly."""
    completed, first = results.completed, at.iloc[0]
    serial = completed[(completed["label"] == "serial") & (completed["execution"] == first["execution"])]
    both = [_curves(results, part) for part in (serial, at)]
    if any(curves.empty for curves in both):
        return None
    alone, own = (_median(_first_epochs(curves, float(argument))).centre for curves in both)
    if math.isinf(alone):
        return None
    return Interval(int(first["workers"]) * alone / own, math.nan, math.nan, len(at))


def _time_reduction(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """1 - T / T(baseline): against serial at one worker, else against the baseline at the same worker count.

    A baseline on another engine counts too: against real Horovod, say.
    """
    return _column(_ratio_row(ratios(results), at, argument), "reduction")


def _largest_time_reduction(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """The largest `time_reduction` over worker counts."""
    each = [_time_reduction(results, runs, some, argument) for _, some in runs.groupby("workers")]
    return max(filter(None, each), key=lambda found: found.centre, default=None)


def _target_time_reduction(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """The same of times to the study's target; not finite where most runs of either never reach it."""
    return _column(_ratio_row(target_ratios(results), at, argument), "reduction")


def _speedup(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """T(serial, 1) / T."""
    return _column(_ratio_row(ratios(results), at, "serial"), "speedup")


def _efficiency(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Speedup over workers."""
    return _column(_ratio_row(ratios(results), at, "serial"), "efficiency")


def _speedup_over(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """T at the worker count of the argument over T: above 1 where more workers still save time."""
    fewer = runs[runs["workers"] == int(argument)]
    if fewer.empty:
        return None
    ratio = math.exp(fewer["train_s"].map(math.log).mean() - at["train_s"].map(math.log).mean())
    return Interval(ratio, math.nan, math.nan, min(len(fewer), len(at)))


def _metric_difference(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Metric minus that of another strategy (serial: at one worker) over common seeds."""
    completed, first = results.completed, at.iloc[0]
    other = completed[(completed["label"] == argument) & (completed["execution"] == first["execution"])]
    if argument != "serial":
        other = other[other["workers"] == first["workers"]]
    pairs = at.merge(other, on="seed", suffixes=("", "_other"))
    values = (pairs["final_metric"] - pairs["final_metric_other"]).dropna()
    return metric_interval(values) if len(values) else None


def _optimum_workers(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Worker count of the shortest time."""
    times = runs.groupby("workers")["train_s"].mean()
    best = times.index.to_numpy(dtype=float)[times.argmin()]
    return Interval(float(best), math.nan, math.nan, len(runs))


def _largest_workers(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Worker count up to which each larger one takes less time than all before it."""
    times = runs.groupby("workers")["train_s"].mean().sort_index()
    falling = times.lt(times.cummin().shift(fill_value=math.inf))
    last = times.index[-1] if falling.all() else times.index[int((~falling).to_numpy().argmax()) - 1]
    return Interval(float(last), math.nan, math.nan, len(runs))


def _time_over(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """T over that of another strategy at the same worker count, medians over seeds."""
    return _ratio_of_medians(results, at, argument, lambda rows: rows["train_s"])


def _target_time_over(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """As `time_over`, of times to the study's target; infinite where most never reach it."""
    return _ratio_of_medians(results, at, argument, lambda rows: rows["time_to_target_s"].fillna(math.inf))


def _fewer_syncs(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Synchronisations of another strategy until the study's target, over its own."""

    def until_target(rows: pd.DataFrame) -> pd.Series[float]:
        return rows["syncs"] * rows["epochs_to_target"].astype(float).fillna(math.inf) / rows["epochs"]

    found = _ratio_of_medians(results, at, argument, until_target)
    return found and found._replace(centre=1 / found.centre if found.centre else math.nan)


def _largest_lead(results: Results, runs: pd.DataFrame, at: pd.DataFrame, argument: str) -> Interval | None:
    """Largest lead over the slowest worker with which a push came, in steps, of all runs."""
    leads = [int(lead) for text in at["lead_histogram"].dropna() for lead in json.loads(text)]
    return Interval(float(max(leads)), math.nan, math.nan, len(at)) if leads else None


Quantity = Callable[[Results, pd.DataFrame, pd.DataFrame, str], Interval | None]
QUANTITIES: dict[str, Quantity] = {
    "final_metric": _final_metric,
    "final_train_metric": _final_train_metric,
    "metric_after_epoch": _metric_after_epoch,
    "metric_difference": _metric_difference,
    "epochs_to": _epochs_to,
    "ideal_speedup_to": _ideal_speedup_to,
    "time_reduction": _time_reduction,
    "largest_time_reduction": _largest_time_reduction,
    "target_time_reduction": _target_time_reduction,
    "speedup": _speedup,
    "speedup_over": _speedup_over,
    "efficiency": _efficiency,
    "optimum_workers": _optimum_workers,
    "largest_workers": _largest_workers,
    "time_over": _time_over,
    "target_time_over": _target_time_over,
    "fewer_syncs": _fewer_syncs,
    "largest_lead": _largest_lead,
}


def _curves(results: Results, at: pd.DataFrame) -> pd.DataFrame:
    """Metric by run (rows) and number of epochs trained (columns); empty if nothing was evaluated."""
    epochs = results.epochs.merge(at[["run_id", "attempt"]], on=["run_id", "attempt"]).dropna(subset=["test_metric"])
    if epochs.empty:
        return pd.DataFrame()
    counted = epochs.assign(trained=epochs["epoch"].astype(int) + 1)
    return counted.pivot(index="run_id", columns="trained", values="test_metric")


def _within_range(values: pd.Series[float], at: pd.DataFrame) -> Interval:
    """Mean metric with its interval, which ends where no value of the metric exists."""
    found, (least, most) = metric_interval(values), METRIC_RANGE.get(at["metric_name"].iloc[0], (-math.inf, math.inf))
    return found._replace(low=np.clip(found.low, least, most), high=np.clip(found.high, least, most))


def _first_epochs(curves: pd.DataFrame, target: float) -> list[float]:
    trained = curves.columns.to_numpy(dtype=float)
    return [min(trained[row >= target], default=math.inf) for row in curves.to_numpy(dtype=float)]


def _median(values: list[float]) -> Interval:
    """Median with its rank interval, which six values or more have."""
    found = median_interval(np.array(values, dtype=float))
    return Interval(float(np.median(values)), float(found.low), float(found.high), len(values))


def _ratio_of_medians(
    results: Results, at: pd.DataFrame, label: str, values: Callable[[pd.DataFrame], pd.Series[float]]
) -> Interval | None:
    """Median of `values` of the rows `at` over that of strategy `label` at their worker count, without an interval."""
    completed, first = results.completed, at.iloc[0]
    same = completed["execution"].eq(first["execution"]) & completed["workers"].eq(first["workers"])
    other = completed[same & completed["label"].eq(label)]
    own, base = (float(np.median(values(rows))) if len(rows) else math.nan for rows in (at, other))
    return None if math.isnan(own / base) else Interval(own / base, math.nan, math.nan, len(at))


def _ratio_row(table: pd.DataFrame, at: pd.DataFrame, baseline: str) -> dict[str, Any] | None:
    same, first = table["baseline"].eq(baseline), at.iloc[0]
    for column in ("execution", "engine", "label", "workers"):
        same &= table[column].eq(first[column])
    rows = table[same]
    return None if rows.empty else dict(rows.iloc[-1])


def _column(row: dict[str, Any] | None, name: str) -> Interval | None:
    """The value of the column `name` with its interval; None where the row has no finite value."""
    if row is None or not math.isfinite(row[name]):
        return None
    return Interval(row[name], row[f"{name}_low"], row[f"{name}_high"], int(row["n"]))
