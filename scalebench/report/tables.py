"""The tables of the report: text for readers, and for each cell the number that it is sorted by."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from scalebench.analysis import Results, agreement, cells, ratios
from scalebench.analysis.comparing import SPLIT_BASELINES
from scalebench.analysis.formatting import EMPTY, digits, percent, seconds, seconds_with_interval
from scalebench.analysis.grouping import CELL, EXECUTIONS, strategy_rank
from scalebench.report.comparison import Comparison
from scalebench.report.wording import metric_with_interval, metric_word, percent_with_interval, share

OVERSUBSCRIBED = "×"
_MOST_REASONS = 5
_MOST_FAILED = 200  # a page is no log


class Column(NamedTuple):
    """A head, what it means, and whether numbers stand under it."""

    name: str
    meaning: str = ""
    numeric: bool = True


class Entry(NamedTuple):
    """What is read, and what is sorted by (empty: always last)."""

    text: str
    key: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns; `note` is what has to be known to read them."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Entry, ...], ...]
    note: str = ""


def tables(results: Results, compared: Sequence[Comparison]) -> list[Table]:
    """All that have a row."""
    made = [_cost(compared), _cells(results), _split(results), _agreement(results), _failed(results)]
    return [table for table in made if table.rows]


def _cost(compared: Sequence[Comparison]) -> Table:
    """What synchronising less often saves and costs, at every worker count."""
    own = sorted((one for one in compared if not one.per_batch), key=_place)
    tested = any(one.test for one in own)
    metric = _metric_head({one.metric_name for one in own if one.metric_name})
    columns = (
        *(Column("strategy", numeric=False), _EXECUTION, Column("workers")),
        Column("time", "geometric mean of the runs that strategy and baseline share"),
        Column("baseline", "the same of the baseline"),
        Column("time saved", "1 - T(strategy) / T(baseline), with its interval"),
        Column(metric, "mean over seeds"),
        Column("difference", f"{metric} of the strategy minus that of the baseline, with its 95 % confidence interval"),
        Column("runs", "repetitions of each"),
        *([Column("p", "of the exact rank test of the times, adjusted for the worker counts")] if tested else []),
    )
    rows = [
        (
            _text(one.label),
            _execution(one.execution, one.engine, one.oversubscribed),
            _number(str(one.workers), one.workers),
            _number(seconds(one.strategy_s), one.strategy_s),
            _number(seconds(one.baseline_s), one.baseline_s),
            _number(percent_with_interval(one.saved, one.saved_low, one.saved_high), one.saved),
            _number(metric_with_interval(one.metric, math.nan, math.nan), one.metric),
            _number(
                metric_with_interval(one.difference, one.difference_low, one.difference_high, signed=True),
                one.difference,
            ),
            _number(str(one.n), one.n),
            *([_number(digits(one.p_adjusted, 2), one.p_adjusted)] if tested else []),
        )
        for one in own
    ]
    name = own[0].baseline if own else ""
    reasons = list(dict.fromkeys(one.note for one in own if one.note))
    more = [f"{len(reasons) - _MOST_REASONS} more of this kind"] if len(reasons) > _MOST_REASONS else []
    note = f"No test or no ratio: {'; '.join(reasons[:_MOST_REASONS] + more)}." if reasons else ""
    return Table("saved", f"Time saved against per-batch {name}, and what it costs", columns, tuple(rows), note)


def _place(one: Comparison) -> tuple[object, ...]:
    """Where it stands in a table, as cells do."""
    return (EXECUTIONS.index(one.execution), strategy_rank(one.label), one.engine, one.workers)


def _cells(results: Results) -> Table:
    """Every cell with everything that is known of it."""
    table = cells(results)
    if table.empty:
        return Table("cells", "", (), ())
    scaling = ratios(results)
    scaling = scaling[scaling["baseline"] == "serial"]
    bounds = [f"{name}{end}" for name in ("speedup", "efficiency") for end in ("", "_low", "_high")]
    table = table.merge(scaling[[*CELL, *bounds]], on=CELL, how="left")
    target = bool(table["time_to_target_s"].notna().any())
    metric = _metric_head(set(table["metric_name"].dropna()))
    columns = (
        *(Column("strategy", numeric=False), _EXECUTION, Column("workers")),
        *(Column("batch", "samples in one worker's batch"), Column("steps", "optimizer steps per epoch")),
        Column("time", "geometric mean, with its interval"),
        *(Column("median", "of the repetitions"), Column("spread", "coefficient of variation")),
        *([Column("to target", "median time until the target metric was reached")] if target else []),
        Column("speedup", "T(serial, 1) / T(N); scaled where the study scales weakly"),
        Column("efficiency", "speedup / workers, with its interval"),
        Column(metric, "mean over seeds, with its 95 % confidence interval"),
        Column("runs", "completed repetitions"),
    )
    rows = [_cell(row, target) for row in table.to_dict("records")]
    named = "; ".join(sorted(f"{kind}: {name}" for kind, name in _intervals(table)))
    note = f"Intervals of times, {named}." if named else "One run each: no intervals."
    return Table("cells", "Every point of the study", columns, tuple(rows), note)


def _cell(row: dict[Hashable, Any], target: bool) -> tuple[Entry, ...]:
    efficiency = metric_with_interval(row["efficiency"], row["efficiency_low"], row["efficiency_high"])
    return (
        _text(row["label"]),
        _execution(row["execution"], row["engine"], row["oversubscribed"]),
        *(_count(row[name]) for name in ("workers", "batch_per_worker", "steps_per_epoch")),
        _number(seconds_with_interval(row["train_s"], row["low_s"], row["high_s"]), row["train_s"]),
        _number(seconds(row["median_s"]), row["median_s"]),
        _number(share(row["spread"]), row["spread"]),
        *([_number(seconds(row["time_to_target_s"]), row["time_to_target_s"])] if target else []),
        _number(f"{digits(row['speedup'])}×" if math.isfinite(row["speedup"]) else EMPTY, row["speedup"]),
        _number(efficiency, row["efficiency"]),
        _number(metric_with_interval(row["metric"], row["metric_low"], row["metric_high"]), row["metric"]),
        _count(row["n"]),
    )


def _split(results: Results) -> Table:
    """Reductions against real engines in their two parts."""
    compared = ratios(results)
    columns = (
        *(Column("strategy", numeric=False), Column("baseline", numeric=False), _EXECUTION, Column("workers")),
        Column("time", "geometric mean of the runs that strategy and baseline share"),
        Column("baseline's time"),
        Column("time saved", "1 - T(strategy) / T(baseline), with its interval"),
        Column("by the engine", "(T(baseline) - T(allreduce)) / T(baseline)"),
        Column("by the frequency", "(T(allreduce) - T(strategy)) / T(baseline)"),
    )
    if compared.empty:
        return Table("split", "", columns, ())
    own = compared[
        compared["baseline"].isin(SPLIT_BASELINES) & compared["reduction"].notna() & (compared["strategy"] != "serial")
    ]
    rows = [
        (
            _text(row["label"]),
            _text(row["baseline"]),
            _execution(row["execution"], row["engine"], row["oversubscribed"]),
            _count(row["workers"]),
            _number(seconds(row["train_s"]), row["train_s"]),
            _number(seconds(row["baseline_s"]), row["baseline_s"]),
            _number(
                percent_with_interval(row["reduction"], row["reduction_low"], row["reduction_high"]), row["reduction"]
            ),
            _number(percent(row["engine_part"]), row["engine_part"]),
            _number(percent(row["frequency_part"]), row["frequency_part"]),
        )
        for row in sorted(own.to_dict("records"), key=_row_place)
    ]
    note = "The two parts add up to what is saved over the runs that all three share."
    return Table("split", "Time saved against Horovod and DDP, in two parts", columns, tuple(rows), note)


def _row_place(row: dict[Hashable, Any]) -> tuple[object, ...]:
    """By baseline, then as cells do."""
    at = EXECUTIONS.index(row["execution"]), strategy_rank(row["label"]), row["engine"], row["workers"]
    return (SPLIT_BASELINES.index(row["baseline"]), *at)


def _agreement(results: Results) -> Table:
    """Virtual beside native."""
    columns = (
        *(Column("strategy", numeric=False), Column("engine", numeric=False), Column("workers")),
        *(Column("native"), Column("virtual")),
        Column("virtual / native", "ratio of two independent samples, with Welch's 95 % interval"),
        Column("runs", "native, virtual"),
    )
    rows = [
        (
            _text(row["label"]),
            _execution("native", row["engine"], row["oversubscribed"]),
            _count(row["workers"]),
            _number(seconds(row["native_s"]), row["native_s"]),
            _number(seconds(row["virtual_s"]), row["virtual_s"]),
            _number(_ratio(row["ratio"], row["ratio_low"], row["ratio_high"]), row["ratio"]),
            _number(f"{row['n_native']}, {row['n_virtual']}", row["n_native"]),
        )
        for row in agreement(results).to_dict("records")
    ]
    return Table("agreement", "How close the simulation is", columns, tuple(rows))


def _failed(results: Results) -> Table:
    """What is in no other table."""
    columns = tuple(
        Column(name, numeric=name == "workers")
        for name in ("run", "strategy", "execution", "workers", "what became of it", "why")
    )
    rows = [
        (
            _text(row["run_id"]),
            _text(row["label"]),
            _execution(row["execution"], row["engine"], row["oversubscribed"]),
            _count(row["workers"]),
            _text(row["status"]),
            _text("" if pd.isna(row["error"]) else row["error"]),
        )
        for row in results.failed.head(_MOST_FAILED).to_dict("records")
    ]
    more = len(results.failed) - len(rows)
    note = f"They are in no other number here.{f' {more:,} more are in runs.csv.' if more else ''}"
    return Table("failed", "Runs that were not completed", columns, tuple(rows), note)


_EXECUTION = Column("execution", f"how the number was obtained; {OVERSUBSCRIBED}: oversubscribed", numeric=False)


def _text(value: object) -> Entry:
    return Entry(str(value), str(value))


def _number(text: str, key: float) -> Entry:
    return Entry(text, "" if math.isnan(key) else repr(float(key)))


def _count(value: Any) -> Entry:
    return Entry(EMPTY) if pd.isna(value) else _number(f"{int(value):,}", int(value))


def _execution(execution: str, engine: str, oversubscribed: bool) -> Entry:
    where = execution if execution == engine else f"{execution} {engine}"
    return _text(f"{where} {OVERSUBSCRIBED}" if oversubscribed else where)


def _ratio(value: float, low: float, high: float) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return digits(value)
    return f"{digits(value)} [{digits(low)}, {digits(high)}]"


def _metric_head(names: set[str]) -> str:
    return "/".join(sorted(metric_word(name) for name in names)) or "metric"


def _intervals(table: pd.DataFrame) -> set[tuple[str, str]]:
    named = table[table["interval"] != ""]
    return set(zip(named["execution"], named["interval"], strict=True))
