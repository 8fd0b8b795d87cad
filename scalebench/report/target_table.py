"""The table of times and epochs to the target metric."""

from __future__ import annotations

import math

from scalebench.analysis import Results
from scalebench.analysis.grouping import CELL
from scalebench.analysis.target_ratios import target_ratios
from scalebench.analysis.time_to_target import times_to_target
from scalebench.formatting import EMPTY, percent_with_interval, seconds, seconds_with_interval
from scalebench.report.comparison import BASELINES
from scalebench.report.table import EXECUTION, STRATEGY, WORKERS, HtmlColumn, HtmlTable, metric_head, place_order


def target_table(results: Results) -> HtmlTable:
    """Time and epochs to the target metric of every cell, with the runs that never reached it, and the time saved."""
    table, compared = times_to_target(results), target_ratios(results)
    baselines = [name for name in BASELINES if (compared["baseline_s"].notna() & (compared["baseline"] == name)).any()]
    saved = {name: [f"{name}_reduction{end}" for end in ("", "_low", "_high")] for name in baselines}
    for name, columns in saved.items():
        own = compared.loc[compared["baseline"] == name, [*CELL, "reduction", "reduction_low", "reduction_high"]]
        table = table.merge(own.set_axis([*CELL, *columns], axis=1), on=CELL, how="left")
    metric = metric_head(set(table["metric_name"].dropna()))
    goal = "/".join(f"{value:g}" for value in table["target_metric"].dropna().unique())
    reached = f"training time until {metric} was {goal} or more; a Kaplan-Meier median where runs stayed below"
    return HtmlTable.of(
        "target",
        f"Time and epochs to {metric} {goal}",
        [
            *(STRATEGY, EXECUTION, WORKERS),
            HtmlColumn("time", "time_to_target_s target_low_s target_high_s", _time_to_target, reached),
            HtmlColumn("epochs", "epochs_to_target", _epochs_to_target, "median number of epochs until then"),
            HtmlColumn("reached", "n_reached n_aimed", "{} of {}".format, "runs that reached it, of those made"),
            *(
                HtmlColumn(
                    f"vs {name}",
                    " ".join(columns),
                    percent_with_interval,
                    f"1 - T(strategy) / T({name}), times to the target",
                )
                for name, columns in saved.items()
            ),
        ],
        sorted(table.to_dict("records"), key=place_order),
        f"Never: at most half of the runs had {metric} {goal} before their last epoch ended."
        if table["time_to_target_s"].eq(math.inf).any()
        else "",
    )


def _time_to_target(time: float, low: float, high: float) -> str:
    """The time with its interval; an upper bound that the runs leave open is infinite."""
    if math.isfinite(low) and high == math.inf and math.isfinite(time):
        return f"{seconds(time)} [from {seconds(low)}]"
    return seconds_with_interval(time, low, high)


def _epochs_to_target(epochs: float) -> str:
    return "never" if epochs == math.inf else EMPTY if math.isnan(epochs) else f"{epochs:g}"
