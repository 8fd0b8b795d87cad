"""Trials of tuning: the best one of each strategy and worker count, best so far by trial, and what all of them cost.

A cell is a strategy at a worker count. Its trials are ordered by time to the target on
the validation split, those of equal time by their final metric; then come trials that
never reached it, by their final metric, and last those that were not completed. By
`final_metric` the order is that of the metric alone. Of equal trials the first is the
best.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis.loading import Results
from scalebench.formatting import counted
from scalebench.study.cell import BATCH, columns_without, strategy_rank
from scalebench.study.spec import is_range

# values are tuned in virtual time, and taken in every execution
_CELL = columns_without("execution", "engine", *BATCH)


def metric_of(results: Results) -> str:
    """Return the metric by which the study chose its trials."""
    return str((results.study.get("tune") or {}).get("metric", "time_to_target"))


def ranked(trials: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return `trials`, the best of each cell first, with `value`: seconds to the target or final metric.

    `value` is infinite where the target was not reached, and NaN where the trial was
    not completed.
    """
    done = (trials["status"] == "completed").to_numpy()
    final = trials["final_metric"].where(done)
    if metric == "time_to_target":
        value = trials["time_to_target_s"].fillna(math.inf).where(done)
        # Where none reached the target, infinite times are equal, and the metric
        # decides.
        first = value
    else:
        value = final
        first = -final
    table = trials.assign(
        value=value,
        _first=first,
        _second=-final,
        _rank=trials["label"].map(strategy_rank),
    )
    keys = ["_rank", "workers", "_first", "_second", "trial"]
    return table.sort_values(keys, kind="stable", na_position="last").drop(
        columns=["_first", "_second", "_rank"]
    )


def chosen(trials: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the best trial of each cell with a completed one: its row of `ranked`."""
    table = ranked(trials, metric)
    return table[table["value"].notna()].drop_duplicates(_CELL).reset_index(drop=True)


def tuned_cells(results: Results) -> pd.DataFrame:
    """One row per cell, named as in `cells`, with how many `trials` were made, `completed`, and `reached` the target.

    Of its best trial: number `trial`, `value`, final `metric`, and `tuned`, a dict;
    `edges` names the ranges of which it has the least or the largest tried value.
    """
    rows: list[dict[str, Any]] = []
    over = (results.study.get("tune") or {}).get("over", {})
    table = (
        ranked(results.trials, metric_of(results))
        if len(results.trials)
        else results.trials
    )
    for (label, _), own in table.groupby(_CELL, sort=False):
        # In the order of `ranked`: the first is the best trial's.
        values = [json.loads(text) for text in own["tuned"]]
        best = own.iloc[0]
        rows.append(
            {
                **{name: best[name] for name in ("execution", "engine", "strategy")},
                "label": label,
                "workers": int(best["workers"]),
                "trials": len(own),
                "completed": int(own["value"].notna().sum()),
                "reached": int(own["time_to_target_s"].notna().sum()),
                "trial": int(best["trial"]),
                "value": float(best["value"]),
                "metric": float(best["final_metric"]),
                "tuned": values[0],
                "edges": [
                    key
                    for key in values[0]
                    if is_range(over.get(key, [])) and _at_edge(key, values)
                ],
            }
        )
    return pd.DataFrame(rows)


def best_so_far(results: Results) -> pd.DataFrame:
    """One row per trial in the order of the sequence: `label`, `workers`, `trial` (from 1) and the best `value` so far.

    NaN as long as no trial has reached the target, or was completed.
    """
    metric = metric_of(results)
    table = ranked(results.trials, metric).sort_values([*_CELL, "trial"])
    value = table["value"].where(np.isfinite(table["value"].astype(float)))
    cell = [table[name] for name in _CELL]
    of_cell = value.groupby(cell)
    best = of_cell.cummin() if metric == "time_to_target" else of_cell.cummax()
    # A trial without a value keeps the best of those before it.
    best = best.groupby(cell).ffill()
    kept = table[[*_CELL, "execution", "engine", "strategy"]]
    return kept.assign(
        trial=table["trial"].astype(int) + 1, value=value, best=best
    ).reset_index(drop=True)


def search_in_words(results: Results) -> str:
    """Return the search space and trials of a tuned study: `best of 16 trials over lr 0.003 to 0.3`; else empty."""
    tune = results.study.get("tune")
    if not tune or not len(results.trials):
        return ""
    spaces = [f"{key} {_space(values)}" for key, values in tune["over"].items()]
    return f"best of {counted(tune['trials'], 'trial')} over {', '.join(spaces)}"


def tuning_in_words(results: Results) -> str:
    """Return search, metric, validation split and cost of tuning in half a sentence; empty if it was not tuned."""
    search = search_in_words(results)
    if not search:
        return ""
    trials = results.trials
    points = len(trials[_CELL].drop_duplicates())
    hours = trials["cost_core_hours"].sum()
    by = (
        "time to the target"
        if metric_of(results) == "time_to_target"
        else "the final metric"
    )
    share = 100 * results.study["tune"]["validation"]
    return (
        f"tuned for each strategy and worker count: {search}, by {by} on {share:g} % of the training samples, held "
        f"out; {counted(len(trials), 'trial')} of {counted(points, 'point')} cost {hours:.3g} core-hours (virtual)"
    )


def optimizer_in_words(results: Results, run: pd.Series[Any]) -> str:
    """Return optimizer and learning rate of a study by one of its runs: `sgd(momentum=0.9) at lr 0.03 (constant)`."""
    tuned = json.loads(run["tuned"]) if isinstance(run["tuned"], str) else {}
    inner = any(key.startswith("optimizer.") for key in tuned)
    optimizer = (
        f"{run['optimizer'].partition('(')[0]} with tuned options"
        if inner
        else run["optimizer"]
    )
    rate = "a tuned lr" if "lr" in tuned else f"lr {run['lr']:g}"
    search = search_in_words(results)
    return f"{optimizer} at {rate} ({run['lr_policy']}{f'; {search}' * bool(search)})"


def _space(values: list[Any]) -> str:
    if is_range(values):
        return f"{values[0]:g} to {values[1]:g}"
    return f"in {', '.join(map(str, values))}"


def _at_edge(key: str, values: list[dict[str, Any]]) -> bool:
    """Return True if the first of `values` has the least or the largest value of `key`."""
    tried = [value[key] for value in values]
    # One value for all trials has no edge.
    return min(tried) < max(tried) and values[0][key] in (min(tried), max(tried))
