"""The quantities of a cell: one column each, for the tables of `run --full`, of the report and of print."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from scalebench.analysis.comparing import compared_with, ratios
from scalebench.analysis.intervals import BOOTSTRAP_FROM, bootstrap_cells
from scalebench.analysis.loading import Results, table_by_cell
from scalebench.analysis.target import censor_mark, target_ratios
from scalebench.analysis.verdicts import verdict_of_metric
from scalebench.formatting import (
    DISTURBED,
    EMPTY,
    OVERSUBSCRIBED,
    is_supported,
    marks,
    metric_word,
)
from scalebench.measured import Measured
from scalebench.study.cell import CELL, group_of
from scalebench.study.choices import ALLREDUCE, LIBRARY_BASELINES, PER_BATCH, SERIAL
from scalebench.tables.table import (
    COUNT,
    EPOCHS,
    METRIC,
    RATIO,
    SAVED,
    SHARE,
    SPEEDUP,
    TIME,
    TIME_ALONE,
    Column,
    fields,
    text,
)

Row = Mapping[Hashable, Any]
_EVERY = ("", "_low", "_high")
_TRIMMED = ["trimmed_s", "trimmed_low_s", "trimmed_high_s"]


def _where(row: Row) -> str:
    """Return execution, engine and marks: `native mpi ×`."""
    return f"{group_of(row['execution'], row['engine'])}{marks(row)}"


def _time(row: Row) -> Measured:
    """Return the time of a cell with its interval; without it where the cell is marked and it leaves no digit."""
    time = fields("train_s low_s high_s")(row)
    # A marked time is a measurement, and stays; its interval would take its last digit.
    return Measured(time.value) if marks(row) and not is_supported(*time[:3]) else time


STRATEGY: Column[Row] = Column("strategy", text("label"), left=True)
EXECUTION: Column[Row] = Column(
    "execution",
    _where,
    meaning=f"how the number was obtained; {OVERSUBSCRIBED}: oversubscribed, {DISTURBED}: disturbed by other programs",
    left=True,
)
WORKERS: Column[Row] = Column("workers", fields("workers"), COUNT)
WORKERS_MARKED = replace(WORKERS, mark=marks)  # where no column has marks


def _saving(baseline: str, of: str = "") -> Column[Row]:
    """Return the column of the time saved against `baseline`; with `of` "target-", of the time to the target."""
    return Column(
        f"{'to target ' if of else ''}vs {baseline}",
        fields(" ".join(f"{of}{baseline}{end}" for end in _EVERY)),
        SAVED,
        f"1 - T(strategy) / T({baseline}), with its interval"
        + (", times to the target" if of else ""),
        spare=2 + LIBRARY_BASELINES.index(baseline)
        if baseline in LIBRARY_BASELINES
        else 0,
        title="" if of else f"vs {baseline}",
    )


def _verdict(row: Row) -> str:
    return EMPTY if pd.isna(row["metric_verdict"]) else str(row["metric_verdict"])


_TIMES: dict[str, Column[Row]] = {
    "time": Column("time", _time, TIME, "geometric mean, with its interval"),
    "median": Column(
        "median",
        fields("median_s median_low_s median_high_s"),
        TIME_ALONE,
        "of the repetitions",
        spare=5,
        title="Median time",
    ),
    "bootstrap": Column(
        "trimmed mean",
        fields("trimmed_s trimmed_low_s trimmed_high_s"),
        TIME,
        f"20 % trimmed geometric mean with its bootstrap interval, from {BOOTSTRAP_FROM} repetitions",
        title="Trimmed mean",
    ),
    "spread": Column(
        "spread", fields("spread"), SHARE, "coefficient of variation", spare=4
    ),
}
_RATIOS: dict[str, Column[Row]] = {
    "speedup": Column(
        "speedup",
        fields("speedup speedup_low speedup_high"),
        SPEEDUP,
        "T(serial, 1) / T(N); scaled where the study scales weakly",
        spare=1,
    ),
    "efficiency": Column(
        "efficiency",
        fields("efficiency efficiency_low efficiency_high"),
        RATIO,
        "speedup / workers, with its interval",
    ),
    **{f"vs-{name}": _saving(name) for name in PER_BATCH},
}
_TARGETS: dict[str, Column[Row]] = {
    "target": Column(
        "time to target",
        fields("time_to_target_s target_low_s target_high_s"),
        TIME,
        "training time until the target; a Kaplan-Meier median where runs stayed below",
        mark=censor_mark,
    ),
    "epochs": Column(
        "epochs to target",
        fields("epochs_to_target"),
        EPOCHS,
        "median number of epochs until then",
        mark=censor_mark,
    ),
    **{f"target-vs-{name}": _saving(name, "target-") for name in PER_BATCH},
}
SAVINGS = [f"vs-{name}" for name in PER_BATCH]
TO_TARGET = list(_TARGETS)


def quantities(metrics: Collection[str]) -> dict[str, Column[Row]]:
    """Return the columns of a table of `cells` and `with_ratios`, by the names that `scalebench table` takes.

    `metrics` are the names of the metrics of the cells; where these are several, each
    number has its own behind it.
    """

    def name_of_metric(row: Row) -> str:
        return (
            f" {metric_word(str(row['metric_name']))}" if len(set(metrics)) > 1 else ""
        )

    head = metric_head(metrics)
    return {
        **_TIMES,
        **_RATIOS,
        **_TARGETS,
        "metric": Column(
            head,
            fields("metric metric_low metric_high"),
            METRIC,
            "mean over seeds, with its 95 % confidence interval",
            mark=name_of_metric,
        ),
        "metric-vs-allreduce": Column(
            f"{head} vs allreduce",
            _verdict,
            meaning="better, worse, equal or undecided, as `scalebench compare` says",
        ),
        "runs": Column("runs", fields("n"), COUNT, "completed repetitions"),
    }


def quantities_without(left_out: Collection[str]) -> list[str]:
    """Return the names of all quantities but `left_out`: tables name these, so that each has a new one at once."""
    return [name for name in quantities(()) if name not in left_out]


def metric_head(names: Collection[str]) -> str:
    """Return a heading for metrics: `accuracy`, `accuracy/R²`."""
    return "/".join(sorted({metric_word(name) for name in names if name})) or "metric"


def with_ratios(
    results: Results, shown: pd.DataFrame, names: Sequence[str]
) -> pd.DataFrame:
    """Return the cells `shown` beside what the quantities `names` take from other cells than their own.

    That are speedup and efficiency, reductions against each baseline under its name,
    those of the time to the target under `target-<baseline>`, and `metric_verdict`,
    that of `compare` on the metric against allreduce. Bootstrap intervals, which take a
    while, are computed here too.

    Raises:
        UsageError: no cell has enough repetitions for a bootstrap that is asked for.
    """
    scaling = [f"{what}{end}" for what in ("speedup", "efficiency") for end in _EVERY]
    for of, compare in (("", ratios), ("target-", target_ratios)):
        # Both are columns of the ratio over serial.
        of_time = not of and {"speedup", "efficiency"} & set(names)
        wanted = [
            name
            for name in PER_BATCH
            if f"{of}vs-{name}" in names or (of_time and name == SERIAL)
        ]
        # Ratios of all cells take a while: a table that shows none computes none.
        compared = compare(results) if wanted else pd.DataFrame()
        for name in wanted:
            own = compared[compared["baseline"] == name]
            kept = {f"reduction{end}": f"{of}{name}{end}" for end in _EVERY}
            extra = scaling if of_time and name == SERIAL else []
            shown = shown.merge(
                own[[*CELL, *kept, *extra]].rename(columns=kept), on=CELL, how="left"
            )
    if "bootstrap" in names:
        resampled = bootstrap_cells(results).rename(
            columns={"low_s": "trimmed_low_s", "high_s": "trimmed_high_s"}
        )
        shown = shown.merge(resampled[[*CELL, *_TRIMMED]], on=CELL, how="left")
    if "metric-vs-allreduce" in names:
        shown = shown.merge(_verdicts(results), on=CELL, how="left")
    return shown


def _verdicts(results: Results) -> pd.DataFrame:
    rows = [
        {
            **one.top.at._asdict(),
            "metric_verdict": verdict_of_metric(one.metric.low, one.metric.high),
        }
        for one in compared_with(results, ALLREDUCE)
        if one.metric.n and one.top.label not in PER_BATCH
    ]
    # Where the baseline ran on other engines only, a cell meets each of them: the first
    # counts.
    return table_by_cell(rows, [*CELL, "metric_verdict"]).drop_duplicates(CELL)
