"""Tables of the report, each from one function of the analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from scalebench.analysis import Results, agreement, cells, ratios
from scalebench.analysis.comparing import SPLIT_BASELINES
from scalebench.analysis.grouping import CELL
from scalebench.analysis.laws import EFFICIENCY, Advice, Scaling, scaling_laws
from scalebench.analysis.laws.render import LAWS, count_text, law_rows, title
from scalebench.analysis.tuning import metric_of, tuned_cells, tuning_in_words
from scalebench.analysis.verdicts import METRIC_MARGIN
from scalebench.formatting import (
    EMPTY,
    as_known,
    digits,
    digits_with_interval,
    metric_with_interval,
    percent,
    percent_with_interval,
    seconds,
    share,
    time_of_cell,
)
from scalebench.report.comparison import Comparison
from scalebench.report.table import (
    EXECUTION,
    STRATEGY,
    TIME,
    WORKERS,
    HtmlColumn,
    HtmlTable,
    Row,
    count,
    metric_head,
    place_order,
)
from scalebench.report.target_table import target_table

_MOST_REASONS = 5
_MOST_FAILED = 200
_SAVED = "1 - T(strategy) / T(baseline), with its interval"
_VERDICT = f"better or worse by more than {METRIC_MARGIN:g}, equal within that, or undecided"
_metric = partial(metric_with_interval, low=math.nan, high=math.nan)


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
    own = [one for one in compared if not one.per_batch]
    metric = metric_head({one.metric_name for one in own})
    difference = f"{metric} of the strategy minus that of the baseline, with its 95 % confidence interval"
    signed = partial(metric_with_interval, signed=True)
    test = "of the exact rank test of the times, adjusted for the worker counts"
    tested = HtmlColumn("p", "p_adjusted", partial(digits, significant=2), test)
    reasons = list(dict.fromkeys(one.note for one in own if one.note))
    return HtmlTable.of(
        "saved",
        f"Time saved against per-batch {own[0].baseline if own else ''}, and what it costs",
        [
            *(STRATEGY, EXECUTION, WORKERS, TIME._replace(values="strategy_s")),
            HtmlColumn("baseline", "baseline_s", seconds, "the same of the baseline"),
            HtmlColumn("time saved", "saved saved_low saved_high", percent_with_interval, _SAVED),
            HtmlColumn(metric, "metric", _metric, "mean over seeds"),
            HtmlColumn("difference", "difference difference_low difference_high", signed, difference),
            HtmlColumn("verdict", "metric_verdict", meaning=f"on the {metric}: {_VERDICT}", numeric=False),
            HtmlColumn("runs", "n", meaning="repetitions of each"),
            *([tested] if any(one.test for one in own) else []),
        ],
        sorted((vars(one) | {"metric_verdict": one.metric_verdict} for one in own), key=place_order),
        f"No test or no ratio: {'; '.join(reasons[:_MOST_REASONS])}." if reasons else "",
    )


def _tuning(results: Results) -> HtmlTable:
    """Values of the best trial of every strategy and worker count."""
    rows = tuned_cells(results).to_dict("records")
    keys = list(dict.fromkeys(key for row in rows for key in row["tuned"]))
    edge = "of the best trial; *: the least or the largest that was tried"
    limit = HtmlColumn("time", "value", seconds, "virtual time to the target on the validation split")
    words = tuning_in_words(results)
    return HtmlTable.of(
        "tuning",
        "Tuned values",
        [
            *(STRATEGY, WORKERS),
            *(HtmlColumn(key, "tuned edges", partial(_tuned, key), edge, numeric=False) for key in keys),
            *([limit] if metric_of(results) == "time_to_target" else []),
            HtmlColumn("metric", "metric", _metric, "final metric on the validation split"),
            HtmlColumn("reached", "reached trials", "{} of {}".format, "trials that reached the target, of those made"),
        ],
        rows,
        f"{words[:1].upper()}{words[1:]}.",
    )


def _tuned(key: str, tuned: dict[str, object], edges: list[str]) -> str:
    return f"{tuned.get(key, EMPTY)}{'*' * (key in edges)}"


def _cells(results: Results) -> HtmlTable:
    """Statistics of every cell."""
    table, scaling = cells(results), ratios(results)
    if len(table):
        bounds = [f"{name}{end}" for name in ("speedup", "efficiency") for end in ("", "_low", "_high")]
        table = table.merge(scaling.loc[scaling["baseline"] == "serial", [*CELL, *bounds]], on=CELL, how="left")
    metric = metric_head(set(table["metric_name"].dropna()))
    named = table[table["interval"] != ""]
    kinds = sorted({f"{kind}: {name}" for kind, name in zip(named["execution"], named["interval"], strict=True)})
    efficiency = "efficiency efficiency_low efficiency_high"
    mean = "geometric mean, with its interval"
    scaled = "T(serial, 1) / T(N); scaled where the study scales weakly"
    several = "mean over seeds, with its 95 % confidence interval"
    none = "One run each: no intervals." if (table["n"] == 1).all() else "No intervals of times."
    return HtmlTable.of(
        "cells",
        "Every point of the study",
        [
            *(STRATEGY, EXECUTION, WORKERS),
            HtmlColumn("batch", "batch_per_worker", count, "samples in one worker's batch"),
            HtmlColumn("steps", "steps_per_epoch", count, "optimizer steps per epoch"),
            HtmlColumn("time", "train_s low_s high_s oversubscribed disturbed", _time, mean),
            HtmlColumn("median", "median_s", seconds, "of the repetitions"),
            HtmlColumn("spread", "spread", share, "coefficient of variation"),
            HtmlColumn("speedup", "speedup speedup_low speedup_high", _times, scaled),
            HtmlColumn("efficiency", efficiency, digits_with_interval, "speedup / workers, with its interval"),
            HtmlColumn(metric, "metric metric_low metric_high", metric_with_interval, several),
            HtmlColumn("runs", "n", count, "completed repetitions"),
        ],
        table.to_dict("records"),
        f"Intervals of times, {'; '.join(kinds)}." if kinds else none,
    )


def _time(*values: float) -> str:
    return time_of_cell(dict(zip(("train_s", "low_s", "high_s", "oversubscribed", "disturbed"), values, strict=True)))


def _times(factor: float, low: float, high: float) -> str:
    return EMPTY if not math.isfinite(factor) else as_known(lambda *of: f"{digits(*of)}×", factor, low, high)


def _laws(results: Results) -> HtmlTable:
    """Scaling law of each series, with the worker counts that it recommends."""
    some = bool((results.completed["strategy"] != "serial").any())
    found = scaling_laws(results) if some else []
    knee = "the most speed for the workers spent; in brackets the point of the law and its interval"
    worth = f"most workers with an efficiency of {EFFICIENCY} or more, likewise"
    forecast = "error at the largest worker count when it is left out of the fit"
    return HtmlTable.of(
        "laws",
        "Scaling laws",
        [
            *(STRATEGY, EXECUTION),
            HtmlColumn("law", "law formula", "{}: {}".format, "the one of the lowest AICc", numeric=False),
            HtmlColumn("weight", "akaike weight", _second, "Akaike weight among the laws that were tried"),
            HtmlColumn("misfit", "distance misfit", _second, "typical distance of the means from the law"),
            HtmlColumn("leave-out", "error leave-out", _second, forecast),
            HtmlColumn("knee", "knee knee_text", _second, knee),
            HtmlColumn(f"worth {100 * EFFICIENCY:.0f} %", "worth worth_text", _second, worth),
            HtmlColumn("parameters", "parameters", meaning="with their intervals, as if the law held", numeric=False),
        ],
        [_law(one, one.advice) for one in found if one.advice],
        *(f"{one.series.label}, {one.series.execution}: {note}" for one in found for note in one.notes),
        *(f"{title(one)}: no law: {one.refusal}" for one in found if one.refusal),
    )


def _law(one: Scaling, advice: Advice) -> Row:
    series = one.series
    return {
        "label": series.label,
        "execution": series.execution,
        "engine": series.engine,
        "oversubscribed": False,
        "disturbed": False,
        **dict(zip(LAWS, law_rows(one)[0], strict=True)),
        "akaike": one.best.weight,
        "distance": one.best.fit.misfit,
        "error": one.best.leave_out_error,
        "formula": one.best.fit.law.formula,
        "knee": advice.knee.workers,
        "knee_text": count_text(advice.knee),
        "worth": advice.worth.workers,
        "worth_text": count_text(advice.worth),
    }


def _second(_: float, text: str) -> str:
    return text


def _split(results: Results) -> HtmlTable:
    """Reductions against Horovod and DDP, split into the parts of engine and frequency."""
    compared = ratios(results)
    own = compared[compared["baseline"].isin(SPLIT_BASELINES) & (compared["strategy"] != "serial")]
    rows = own[own["reduction"].notna()].to_dict("records")
    return HtmlTable.of(
        "split",
        "Time saved against Horovod and DDP, in two parts",
        [
            *(STRATEGY, HtmlColumn("baseline", "baseline", numeric=False), EXECUTION, WORKERS, TIME),
            HtmlColumn("baseline's time", "baseline_s", seconds),
            HtmlColumn("time saved", "reduction reduction_low reduction_high", percent_with_interval, _SAVED),
            HtmlColumn("by the engine", "engine_part", percent, "(T(baseline) - T(allreduce)) / T(baseline)"),
            HtmlColumn("by the frequency", "frequency_part", percent, "(T(allreduce) - T(strategy)) / T(baseline)"),
        ],
        sorted(rows, key=lambda row: (SPLIT_BASELINES.index(row["baseline"]), *place_order(row))),
        "The two parts add up to what is saved over the runs that all three share.",
    )


def _agreement(results: Results) -> HtmlTable:
    """Virtual and native times of the same cells."""
    interval = "with the interval over repetitions and the native 95 % confidence interval in quadrature"
    return HtmlTable.of(
        "agreement",
        "How close virtual times are",
        [
            *(STRATEGY, EXECUTION._replace(name="engine", meaning=""), WORKERS),
            *(HtmlColumn("native", "native_s", seconds), HtmlColumn("virtual", "virtual_s", seconds)),
            HtmlColumn("virtual / native", "ratio ratio_low ratio_high", digits_with_interval, interval),
            HtmlColumn("runs", "n_native n_virtual", "{}, {}".format, "native, virtual"),
        ],
        agreement(results).assign(execution="native").to_dict("records"),
    )


def _failed(results: Results) -> HtmlTable:
    """Runs that were not completed, which no other table holds."""
    shown = results.failed.head(_MOST_FAILED)
    more = len(results.failed) - len(shown)
    return HtmlTable.of(
        "failed",
        "Runs that were not completed",
        [
            HtmlColumn("run", "run_id", numeric=False),
            *(STRATEGY, EXECUTION, WORKERS),
            HtmlColumn("what became of it", "status", numeric=False),
            HtmlColumn("why", "error", numeric=False),
        ],
        shown.fillna({"error": ""}).to_dict("records"),
        f"They are in no other number here.{f' {more:,} more are in runs.csv.' if more else ''}",
    )
