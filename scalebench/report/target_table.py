"""The table of times and epochs to the target metric."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from scalebench.analysis import Results
from scalebench.analysis.grouping import CELL
from scalebench.analysis.target_ratios import target_ratios
from scalebench.analysis.time_to_target import times_to_target
from scalebench.formatting import EMPTY, percent_with_interval, seconds, seconds_with_interval
from scalebench.report.comparison import BASELINES
from scalebench.report.table import (
    EXECUTION,
    STRATEGY,
    WORKERS,
    HtmlColumn,
    HtmlTable,
    metric_head,
    number_entry,
    place_entries,
    place_order,
)


def target_table(results: Results) -> HtmlTable:
    """Time and epochs to the target metric of every cell, with the runs that never reached it, and the time saved."""
    table, compared = times_to_target(results), target_ratios(results)
    baselines = [name for name in BASELINES if (compared["baseline_s"].notna() & (compared["baseline"] == name)).any()]
    saved = ("reduction", "reduction_low", "reduction_high")
    for name in baselines:
        own = compared.loc[compared["baseline"] == name, [*CELL, *saved]]
        table = table.merge(own.rename(columns={key: f"{key} {name}" for key in saved}), on=CELL, how="left")
    metric = metric_head(set(table["metric_name"].dropna()) - {""})
    goal = "/".join(f"{value:g}" for value in table["target_metric"].dropna().unique())
    columns = (
        *(STRATEGY, EXECUTION, WORKERS),
        HtmlColumn(
            "time", f"training time until {metric} was {goal} or more; a Kaplan-Meier median where runs stayed below"
        ),
        HtmlColumn("epochs", "median number of epochs until then"),
        HtmlColumn("reached", "runs that reached it, of those made"),
        *(HtmlColumn(f"vs {name}", f"1 - T(strategy) / T({name}), times to the target") for name in baselines),
    )
    rows = [
        (
            *place_entries(row),
            number_entry(_time_to_target(row), row["time_to_target_s"]),
            number_entry(_epochs_to_target(row["epochs_to_target"]), row["epochs_to_target"]),
            number_entry(f"{row['n_reached']} of {row['n_aimed']}", row["n_reached"]),
            *(
                number_entry(percent_with_interval(*(row[f"{key} {name}"] for key in saved)), row[f"{saved[0]} {name}"])
                for name in baselines
            ),
        )
        for row in sorted(table.to_dict("records"), key=place_order)
    ]
    note = f"Never: at most half of the runs had {metric} {goal} before their last epoch ended."
    some = bool(table["time_to_target_s"].eq(math.inf).any())
    return HtmlTable("target", f"Time and epochs to {metric} {goal}", columns, tuple(rows), (note,) if some else ())


def _time_to_target(row: dict[Hashable, Any]) -> str:
    """The time with its interval; an upper bound that the runs leave open is infinite."""
    time, low, high = row["time_to_target_s"], row["target_low_s"], row["target_high_s"]
    if math.isfinite(low) and high == math.inf and math.isfinite(time):
        return f"{seconds(time)} [from {seconds(low)}]"
    return seconds_with_interval(time, low, high)


def _epochs_to_target(epochs: float) -> str:
    return "never" if epochs == math.inf else EMPTY if math.isnan(epochs) else f"{epochs:g}"
