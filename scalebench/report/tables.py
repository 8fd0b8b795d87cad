"""Tables of the report, each from one function of the analysis."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import pandas as pd

from scalebench.analysis import Results, agreement, cells, ratios
from scalebench.analysis.comparing import SPLIT_BASELINES
from scalebench.analysis.grouping import CELL
from scalebench.analysis.laws import EFFICIENCY, scaling_laws
from scalebench.analysis.laws.render import LAWS, count_text, law_rows, title
from scalebench.analysis.tuning import metric_of, tuned_cells, tuning_in_words
from scalebench.formatting import (
    EMPTY,
    digits,
    metric_with_interval,
    percent,
    percent_with_interval,
    seconds_with_interval,
    share,
)
from scalebench.report.comparison import Comparison
from scalebench.report.table import (
    EXECUTION,
    STRATEGY,
    WORKERS,
    Entry,
    HtmlColumn,
    HtmlTable,
    count_entry,
    execution_entry,
    metric_head,
    number_entry,
    place_entries,
    place_order,
    row_order,
    seconds_entry,
    text_entry,
)
from scalebench.report.target_table import target_table

_MOST_REASONS = 5
_MOST_FAILED = 200


def tables(results: Results, compared: Sequence[Comparison]) -> list[HtmlTable]:
    """Return the tables that have rows."""
    made = [
        _cost(compared),
        target_table(results),
        _tuning(results),
        _cells(results),
        _laws(results),
        _split(results),
        _agreement(results),
        _failed(results),
    ]
    return [table for table in made if table.rows]


def _cost(compared: Sequence[Comparison]) -> HtmlTable:
    """Time saved against the baseline and difference in the metric, at every worker count."""
    own = sorted(
        (one for one in compared if not one.per_batch),
        key=lambda one: row_order(one.execution, one.label, one.engine, one.workers),
    )
    tested = any(one.test for one in own)
    metric = metric_head({one.metric_name for one in own if one.metric_name})
    columns = (
        *(STRATEGY, EXECUTION, WORKERS),
        HtmlColumn("time", "geometric mean of the runs that strategy and baseline share"),
        HtmlColumn("baseline", "the same of the baseline"),
        HtmlColumn("time saved", "1 - T(strategy) / T(baseline), with its interval"),
        HtmlColumn(metric, "mean over seeds"),
        HtmlColumn(
            "difference", f"{metric} of the strategy minus that of the baseline, with its 95 % confidence interval"
        ),
        HtmlColumn("runs", "repetitions of each"),
        *([HtmlColumn("p", "of the exact rank test of the times, adjusted for the worker counts")] if tested else []),
    )
    rows = [
        (
            text_entry(one.label),
            execution_entry(one.execution, one.engine, one.oversubscribed),
            number_entry(str(one.workers), one.workers),
            seconds_entry(one.strategy_s),
            seconds_entry(one.baseline_s),
            number_entry(percent_with_interval(one.saved, one.saved_low, one.saved_high), one.saved),
            number_entry(metric_with_interval(one.metric, math.nan, math.nan), one.metric),
            number_entry(
                metric_with_interval(one.difference, one.difference_low, one.difference_high, signed=True),
                one.difference,
            ),
            number_entry(str(one.n), one.n),
            *([number_entry(digits(one.p_adjusted, 2), one.p_adjusted)] if tested else []),
        )
        for one in own
    ]
    name = own[0].baseline if own else ""
    reasons = list(dict.fromkeys(one.note for one in own if one.note))
    more = [f"{len(reasons) - _MOST_REASONS} more of this kind"] if len(reasons) > _MOST_REASONS else []
    note = f"No test or no ratio: {'; '.join(reasons[:_MOST_REASONS] + more)}." if reasons else ""
    return HtmlTable(
        "saved",
        f"Time saved against per-batch {name}, and what it costs",
        columns,
        tuple(rows),
        (note,) if note else (),
    )


def _tuning(results: Results) -> HtmlTable:
    """Values of the best trial of every strategy and worker count."""
    table = tuned_cells(results)
    keys = list(dict.fromkeys(key for tuned in table["tuned"] for key in tuned)) if len(table) else []
    by_time = metric_of(results) == "time_to_target"
    columns = (
        *(STRATEGY, WORKERS),
        *(HtmlColumn(key, "of the best trial; *: the least or the largest that was tried") for key in keys),
        *([HtmlColumn("time", "virtual time to the target on the validation split")] if by_time else []),
        HtmlColumn("metric", "final metric on the validation split"),
        HtmlColumn("reached", "trials that reached the target, of those made"),
    )
    rows = [
        (
            text_entry(row["label"]),
            count_entry(row["workers"]),
            *(text_entry(f"{row['tuned'].get(key, EMPTY)}{'*' * (key in row['edges'])}") for key in keys),
            *([seconds_entry(row["value"])] if by_time else []),
            number_entry(metric_with_interval(row["metric"], math.nan, math.nan), row["metric"]),
            number_entry(f"{row['reached']} of {row['trials']}", row["reached"]),
        )
        for row in table.to_dict("records")
    ]
    words = tuning_in_words(results)
    return HtmlTable("tuning", "Tuned values", columns, tuple(rows), (f"{words[:1].upper()}{words[1:]}.",))


def _cells(results: Results) -> HtmlTable:
    """Statistics of every cell."""
    table = cells(results)
    if table.empty:
        return HtmlTable("cells", "", (), ())
    scaling = ratios(results)
    scaling = scaling[scaling["baseline"] == "serial"]
    bounds = [f"{name}{end}" for name in ("speedup", "efficiency") for end in ("", "_low", "_high")]
    table = table.merge(scaling[[*CELL, *bounds]], on=CELL, how="left")
    metric = metric_head(set(table["metric_name"].dropna()))
    columns = (
        *(STRATEGY, EXECUTION, WORKERS),
        *(HtmlColumn("batch", "samples in one worker's batch"), HtmlColumn("steps", "optimizer steps per epoch")),
        HtmlColumn("time", "geometric mean, with its interval"),
        *(HtmlColumn("median", "of the repetitions"), HtmlColumn("spread", "coefficient of variation")),
        HtmlColumn("speedup", "T(serial, 1) / T(N); scaled where the study scales weakly"),
        HtmlColumn("efficiency", "speedup / workers, with its interval"),
        HtmlColumn(metric, "mean over seeds, with its 95 % confidence interval"),
        HtmlColumn("runs", "completed repetitions"),
    )
    rows = [_cell(row) for row in table.to_dict("records")]
    named = "; ".join(sorted(f"{kind}: {name}" for kind, name in _intervals(table)))
    none = "One run each: no intervals." if (table["n"] == 1).all() else "No intervals of times."
    note = f"Intervals of times, {named}." if named else none
    return HtmlTable("cells", "Every point of the study", columns, tuple(rows), (note,) if note else ())


def _cell(row: dict[Hashable, Any]) -> tuple[Entry, ...]:
    efficiency = metric_with_interval(row["efficiency"], row["efficiency_low"], row["efficiency_high"])
    return (
        *place_entries(row),
        *(count_entry(row[name]) for name in ("batch_per_worker", "steps_per_epoch")),
        number_entry(seconds_with_interval(row["train_s"], row["low_s"], row["high_s"]), row["train_s"]),
        seconds_entry(row["median_s"]),
        number_entry(share(row["spread"]), row["spread"]),
        number_entry(f"{digits(row['speedup'])}×" if math.isfinite(row["speedup"]) else EMPTY, row["speedup"]),
        number_entry(efficiency, row["efficiency"]),
        number_entry(metric_with_interval(row["metric"], row["metric_low"], row["metric_high"]), row["metric"]),
        count_entry(row["n"]),
    )


def _laws(results: Results) -> HtmlTable:
    """Scaling law of each series, with the worker counts that it recommends."""
    columns = (
        *(STRATEGY, EXECUTION, HtmlColumn("law", "the one of the lowest AICc", numeric=False)),
        HtmlColumn("weight", "Akaike weight among the laws that were tried"),
        HtmlColumn("misfit", "typical distance of the means from the law"),
        HtmlColumn("leave-out", "error at the largest worker count when it is left out of the fit"),
        HtmlColumn("knee", "the most speed for the workers spent; in brackets the point of the law and its interval"),
        HtmlColumn(
            f"worth {100 * EFFICIENCY:.0f} %", f"most workers with an efficiency of {EFFICIENCY} or more, likewise"
        ),
        HtmlColumn("parameters", "with their intervals, as if the law held", numeric=False),
    )
    some = bool((results.completed["strategy"] != "serial").any())
    found = scaling_laws(results) if some else []
    rows = []
    for one in found:
        if one.advice is None:
            continue
        texts = dict(zip(LAWS, law_rows(one)[0], strict=True))
        rows.append(
            (
                text_entry(one.series.label),
                execution_entry(one.series.execution, one.series.engine),
                Entry(f"{texts['law']}: {one.best.fit.law.formula}", texts["law"]),
                number_entry(texts["weight"], one.best.weight),
                number_entry(texts["misfit"], one.best.fit.misfit),
                number_entry(texts["leave-out"], one.best.leave_out_error),
                number_entry(count_text(one.advice.knee), one.advice.knee.workers),
                number_entry(count_text(one.advice.worth), one.advice.worth.workers),
                text_entry(texts["parameters"]),
            )
        )
    remarks = [f"{one.series.label}, {one.series.execution}: {note}" for one in found for note in one.notes]
    refused = [f"{title(one)}: no law: {one.refusal}" for one in found if one.refusal]
    remarks += refused[:_MOST_REASONS]
    if len(refused) > _MOST_REASONS:
        remarks.append(f"and {len(refused) - _MOST_REASONS} more series without a law")
    return HtmlTable("laws", "Scaling laws", columns, tuple(rows), tuple(remarks))


def _split(results: Results) -> HtmlTable:
    """Reductions against Horovod and DDP, split into the parts of engine and frequency."""
    compared = ratios(results)
    columns = (
        *(STRATEGY, HtmlColumn("baseline", numeric=False), EXECUTION, WORKERS),
        HtmlColumn("time", "geometric mean of the runs that strategy and baseline share"),
        HtmlColumn("baseline's time"),
        HtmlColumn("time saved", "1 - T(strategy) / T(baseline), with its interval"),
        HtmlColumn("by the engine", "(T(baseline) - T(allreduce)) / T(baseline)"),
        HtmlColumn("by the frequency", "(T(allreduce) - T(strategy)) / T(baseline)"),
    )
    if compared.empty:
        return HtmlTable("split", "", columns, ())
    own = compared[
        compared["baseline"].isin(SPLIT_BASELINES) & compared["reduction"].notna() & (compared["strategy"] != "serial")
    ]
    rows = [
        (
            text_entry(row["label"]),
            text_entry(row["baseline"]),
            *place_entries(row)[1:],
            seconds_entry(row["train_s"]),
            seconds_entry(row["baseline_s"]),
            number_entry(
                percent_with_interval(row["reduction"], row["reduction_low"], row["reduction_high"]), row["reduction"]
            ),
            number_entry(percent(row["engine_part"]), row["engine_part"]),
            number_entry(percent(row["frequency_part"]), row["frequency_part"]),
        )
        for row in sorted(
            own.to_dict("records"), key=lambda row: (SPLIT_BASELINES.index(row["baseline"]), *place_order(row))
        )
    ]
    note = "The two parts add up to what is saved over the runs that all three share."
    return HtmlTable("split", "Time saved against Horovod and DDP, in two parts", columns, tuple(rows), (note,))


def _agreement(results: Results) -> HtmlTable:
    """Virtual and native times of the same cells."""
    columns = (
        *(STRATEGY, HtmlColumn("engine", numeric=False), WORKERS),
        *(HtmlColumn("native"), HtmlColumn("virtual")),
        HtmlColumn(
            "virtual / native", "with the interval over draws and the native 95 % confidence interval in quadrature"
        ),
        HtmlColumn("runs", "native, virtual"),
    )
    rows = [
        (
            text_entry(row["label"]),
            execution_entry("native", row["engine"], row["oversubscribed"]),
            count_entry(row["workers"]),
            seconds_entry(row["native_s"]),
            seconds_entry(row["virtual_s"]),
            number_entry(_ratio(row["ratio"], row["ratio_low"], row["ratio_high"]), row["ratio"]),
            number_entry(f"{row['n_native']}, {row['n_virtual']}", row["n_native"]),
        )
        for row in agreement(results).to_dict("records")
    ]
    return HtmlTable("agreement", "How close the simulation is", columns, tuple(rows))


def _failed(results: Results) -> HtmlTable:
    """Runs that were not completed, which no other table holds."""
    columns = tuple(
        HtmlColumn(name, numeric=name == "workers")
        for name in ("run", "strategy", "execution", "workers", "what became of it", "why")
    )
    rows = [
        (
            text_entry(row["run_id"]),
            *place_entries(row),
            text_entry(row["status"]),
            text_entry("" if pd.isna(row["error"]) else row["error"]),
        )
        for row in results.failed.head(_MOST_FAILED).to_dict("records")
    ]
    more = len(results.failed) - len(rows)
    note = f"They are in no other number here.{f' {more:,} more are in runs.csv.' if more else ''}"
    return HtmlTable("failed", "Runs that were not completed", columns, tuple(rows), (note,))


def _ratio(value: float, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return digits(value)
    return f"{digits(value)} [{digits(low)}, {digits(high)}]"


def _intervals(table: pd.DataFrame) -> set[tuple[str, str]]:
    named = table[table["interval"] != ""]
    return set(zip(named["execution"], named["interval"], strict=True))
