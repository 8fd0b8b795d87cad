"""Tables of the report, each from one function of the analysis, and the one of elastic runs, beside the study."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from scalebench.analysis import Results, agreement, cells, ratios, target, tuning_trials
from scalebench.analysis import quantities as quantity
from scalebench.analysis.laws import EFFICIENCY, Advice, Scaling, all_laws
from scalebench.analysis.laws.render import LAWS, count_text, law_rows, name_of
from scalebench.analysis.loading import label_of
from scalebench.analysis.verdicts import METRIC_MARGIN
from scalebench.formatting import EMPTY, seconds
from scalebench.measured import Measured
from scalebench.records import attempts, reading, schema
from scalebench.records.folder import ELASTIC
from scalebench.report.comparison import Comparison
from scalebench.study.cell import PLACE, Cell
from scalebench.study.choices import BASELINES, LIBRARY_BASELINES, SERIAL
from scalebench.tables import Column, Entry, Table
from scalebench.tables.table import (
    CHANGE,
    COUNT,
    DIFFERENCE,
    METRIC_ALONE,
    RATIO,
    SAVED,
    TIME_ALONE,
    TWO_DIGITS,
    fields,
    text,
)

_MOST_REASONS = 5
_MOST_FAILED = 200
_SAVED = "1 - T(strategy) / T(baseline), with its interval"
_VERDICT = (
    f"better or worse by more than {METRIC_MARGIN:g}, equal within that, or undecided"
)
_TIME = Column(
    "time",
    fields("train_s"),
    TIME_ALONE,
    "geometric mean of the runs that strategy and baseline share",
)
_ELASTIC_LISTS = ("rank", "epoch", "lost_s", "pause_s")
_ELASTIC_COLUMNS: list[Column[quantity.Row]] = [
    Column("strategy", text("label"), left=True),
    Column("engine", text("engine"), left=True),
    Column(
        "workers",
        text("counts"),
        meaning="at the start, and at the end where some were lost",
    ),
    Column(
        "interruptions",
        fields("interruptions"),
        COUNT,
        "times that a worker died and the run went on",
    ),
    Column(
        "died",
        text("ranks"),
        meaning="ranks that died, by their number at the start",
        left=True,
    ),
    Column(
        "epochs begun again",
        text("epochs_again"),
        meaning="counted from 1",
        left=True,
    ),
    Column("lost", text("lost"), meaning="training since the last committed epoch"),
    Column("pause", text("pauses"), meaning="from the death until training went on"),
    Column(
        "total time",
        fields("total_s"),
        TIME_ALONE,
        "with what was lost and the pauses",
    ),
    Column("metric", fields("final_metric"), METRIC_ALONE, "at the end"),
    Column("what became of it", text("end"), left=True),
]


def tables(results: Results, compared: Sequence[Comparison]) -> list[Table]:
    """Return the tables that have rows."""
    made = [
        _cost(compared),
        _target(results),
        _tuning(results),
        _cells(results),
        _laws(results),
        _split(results),
        _agreement(results),
        _failed(results),
        elastic_table(results.folder),
    ]
    return [
        replace(
            table, notes=[*filter(None, table.notes), *map("{}.".format, table.told())]
        )
        for table in made
        if table.rows
    ]


def _cost(compared: Sequence[Comparison]) -> Table:
    """Time saved against the baseline and difference in the metric, at every worker count."""
    own = [one for one in compared if not one.per_batch]
    metric = quantity.metric_head({one.metric_name for one in own})
    difference = f"{metric} of the strategy minus that of the baseline, with its 95 % confidence interval"
    test = "of the exact rank test of the times, adjusted for the worker counts"
    tested = Column("p", fields("p_adjusted"), TWO_DIGITS, test)
    reasons = list(dict.fromkeys(one.note for one in own if one.note))
    rows: list[quantity.Row] = [
        dict(
            [
                *one.cell._asdict().items(),
                *vars(one).items(),
                ("metric_verdict", one.metric_verdict),
            ]
        )
        for one in own
    ]
    return Table.of(
        f"Time saved against per-batch {own[0].baseline.label if own else ''}, and what it costs",
        [
            quantity.STRATEGY,
            quantity.EXECUTION,
            quantity.WORKERS,
            replace(_TIME, of=fields("strategy_s")),
            Column(
                "baseline", fields("baseline_s"), TIME_ALONE, "the same of the baseline"
            ),
            Column("time saved", itemgetter("saved"), SAVED, _SAVED),
            Column(metric, fields("metric"), METRIC_ALONE, "mean over seeds"),
            Column("difference", itemgetter("difference"), DIFFERENCE, difference),
            Column(
                "verdict",
                text("metric_verdict"),
                meaning=f"on the {metric}: {_VERDICT}",
                left=True,
            ),
            Column[quantity.Row](
                "runs",
                lambda row: Measured(row["saved"].n),
                COUNT,
                "repetitions of each",
            ),
            *([tested] if any(one.test for one in own) else []),
        ],
        sorted(rows, key=_place_order),
        [
            f"No test or no ratio: {'; '.join(reasons[:_MOST_REASONS])}."
            if reasons
            else ""
        ],
        name="saved",
    )


def _target(results: Results) -> Table:
    """Time and epochs to the target metric of every cell, with the runs that never reached it, and the time saved."""
    table = target.times_to_target(results)
    ran = set(results.completed["strategy"])
    # A baseline that did not run has no ratios, and no column.
    against = [f"target-vs-{name}" for name in BASELINES if name in ran]
    table = quantity.with_ratios(results, table, against)
    known = quantity.quantities(table["metric_name"].dropna().unique())
    columns = [
        known[name] for name in against if table[name.replace("vs-", "")].notna().any()
    ]
    metric = quantity.metric_head(table["metric_name"].dropna().unique())
    goal = "/".join(f"{value:g}" for value in table["target_metric"].dropna().unique())
    never = f"Never: at most half of the runs had {metric} {goal} before their last epoch ended."
    return Table.of(
        f"Time and epochs to {metric} {goal}",
        [
            quantity.STRATEGY,
            quantity.EXECUTION,
            quantity.WORKERS,
            known["target"],
            known["epochs"],
            Column(
                "reached",
                partial(_of, "n_reached", "n_aimed"),
                meaning="runs that reached it, of those made",
            ),
            *columns,
        ],
        sorted(table.to_dict("records"), key=_place_order),
        [never if table["time_to_target_s"].eq(math.inf).any() else ""],
        name="target",
    )


def _of(part: str, whole: str, row: quantity.Row) -> Entry:
    """Return `3 of 5`."""
    return Entry(f"{row[part]:.0f} of {row[whole]:.0f}", Measured(row[part]))


def _tuning(results: Results) -> Table:
    """Values of the best trial of every strategy and worker count."""
    rows = tuning_trials.tuned_cells(results).to_dict("records")
    keys = list(dict.fromkeys(key for row in rows for key in row["tuned"]))
    edge = "of the best trial; *: the least or the largest that was tried"
    limit = Column(
        "time",
        fields("value"),
        TIME_ALONE,
        "virtual time to the target on the validation split",
    )
    words = tuning_trials.tuning_in_words(results)
    return Table.of(
        "Tuned values",
        [
            quantity.STRATEGY,
            quantity.WORKERS,
            *(
                Column(key, partial(_tuned, key), meaning=edge, left=True)
                for key in keys
            ),
            *([limit] if tuning_trials.metric_of(results) == "time_to_target" else []),
            Column(
                "metric",
                fields("metric"),
                METRIC_ALONE,
                "final metric on the validation split",
            ),
            Column(
                "reached",
                partial(_of, "reached", "trials"),
                meaning="trials that reached the target, of those made",
            ),
        ],
        rows,
        [f"{words[:1].upper()}{words[1:]}."],
        name="tuning",
    )


def _tuned(key: str, row: quantity.Row) -> str:
    return f"{row['tuned'].get(key, EMPTY)}{'*' * (key in row['edges'])}"


def _cells(results: Results) -> Table:
    """Statistics of every cell."""
    table = cells(results)
    others = {*quantity.SAVINGS, *quantity.TO_TARGET, "metric-vs-allreduce"}
    shown = quantity.quantities_without({*others, "bootstrap"})
    known = quantity.quantities(table["metric_name"].dropna().unique())
    named = table[table["interval"] != ""]
    kinds = sorted(
        {
            f"{kind}: {name}"
            for kind, name in zip(named["execution"], named["interval"], strict=True)
        }
    )
    # Of one run there is no interval, which is said once in place of in each cell.
    none = (
        "One run each: no intervals."
        if (table["n"] == 1).all()
        else "No intervals of times."
    )
    return Table.of(
        "Every point of the study",
        [
            quantity.STRATEGY,
            quantity.EXECUTION,
            quantity.WORKERS,
            Column(
                "batch",
                fields("batch_per_worker"),
                COUNT,
                "samples in one worker's batch",
            ),
            Column(
                "steps", fields("steps_per_epoch"), COUNT, "optimizer steps per epoch"
            ),
            *(known[name] for name in shown),
        ],
        quantity.with_ratios(results, table, shown).to_dict("records")
        if len(table)
        else [],
        [f"Intervals of times, {'; '.join(kinds)}." if kinds else none],
        name="cells",
    )


def _laws(results: Results) -> Table:
    """Scaling law of each series, with the worker counts that it recommends."""
    # A law of serial alone would be drawn through one worker count.
    some = bool((results.completed["strategy"] != SERIAL).any())
    found = all_laws(results) if some else []
    knee = "the most speed for the workers spent; in brackets the point of the law and its interval"
    worth = f"most workers with an efficiency of {EFFICIENCY} or more, likewise"
    forecast = "error at the largest worker count when it is left out of the fit"
    return Table.of(
        "Scaling laws",
        [
            quantity.STRATEGY,
            quantity.EXECUTION,
            Column("law", text("law"), meaning="the one of the lowest AICc", left=True),
            Column(
                "weight",
                itemgetter("weight"),
                meaning="Akaike weight among the laws that were tried",
            ),
            Column(
                "misfit",
                itemgetter("misfit"),
                meaning="typical distance of the means from the law",
            ),
            Column("leave-out", itemgetter("leave-out"), meaning=forecast),
            Column("knee", itemgetter("knee"), meaning=knee),
            Column(
                f"worth {100 * EFFICIENCY:.0f} %", itemgetter("worth"), meaning=worth
            ),
            Column(
                "parameters",
                text("parameters"),
                meaning="with their intervals, as if the law held",
                left=True,
            ),
        ],
        [_law(one, one.advice) for one in found if one.advice],
        [
            *(
                f"{one.series.name}, {one.series.key.execution}: {note}"
                for one in found
                for note in one.notes
            ),
            *(f"{name_of(one)}: no law: {one.refusal}" for one in found if one.refusal),
        ],
        name="laws",
    )


def _law(one: Scaling, advice: Advice) -> quantity.Row:
    series, best = one.series, one.best
    texts = dict(zip(LAWS, law_rows(one)[0], strict=True))
    numbers = {
        "weight": best.weight,
        "misfit": best.fit.misfit,
        "leave-out": best.leave_out_error,
    }
    return {
        "label": series.name,
        "execution": series.key.execution,
        "engine": series.key.engine,
        # Laws are fitted to neither of these; the column of the execution asks for
        # both.
        "oversubscribed": False,
        "disturbed": False,
        **{
            name: Entry(texts[name], Measured(value)) for name, value in numbers.items()
        },
        "law": f"{best.fit.law.name}: {best.fit.law.formula}",
        "knee": Entry(count_text(advice.knee), Measured(advice.knee.workers)),
        "worth": Entry(count_text(advice.worth), Measured(advice.worth.workers)),
        "parameters": texts["parameters"],
    }


def _split(results: Results) -> Table:
    """Reductions against Horovod and DDP, split into the parts of engine and frequency."""
    compared = ratios(results)
    # The engine's part is what Horovod or DDP themselves take more, or less, than
    # allreduce.
    own = compared[
        compared["baseline"].isin(LIBRARY_BASELINES) & (compared["strategy"] != SERIAL)
    ]
    rows = own[own["reduction"].notna()].to_dict("records")
    return Table.of(
        "Time saved against Horovod and DDP, in two parts",
        [
            quantity.STRATEGY,
            Column("baseline", text("baseline"), left=True),
            quantity.EXECUTION,
            quantity.WORKERS,
            _TIME,
            Column("baseline's time", fields("baseline_s"), TIME_ALONE),
            Column(
                "time saved",
                fields("reduction reduction_low reduction_high"),
                SAVED,
                _SAVED,
            ),
            Column(
                "by the engine",
                fields("engine_part"),
                CHANGE,
                "(T(baseline) - T(allreduce)) / T(baseline)",
            ),
            Column(
                "by the frequency",
                fields("frequency_part"),
                CHANGE,
                "(T(allreduce) - T(strategy)) / T(baseline)",
            ),
        ],
        sorted(
            rows,
            key=lambda row: (
                LIBRARY_BASELINES.index(row["baseline"]),
                *_place_order(row),
            ),
        ),
        ["The two parts add up to what is saved over the runs that all three share."],
        name="split",
    )


def _agreement(results: Results) -> Table:
    """Virtual and native times of the same cells."""
    interval = "with the interval over repetitions and the native 95 % confidence interval in quadrature"
    return Table.of(
        "How close virtual times are",
        [
            quantity.STRATEGY,
            replace(quantity.EXECUTION, name="engine", meaning=""),
            quantity.WORKERS,
            Column("native", fields("native_s"), TIME_ALONE),
            Column("virtual", fields("virtual_s"), TIME_ALONE),
            Column(
                "virtual / native",
                fields("ratio ratio_low ratio_high"),
                RATIO,
                interval,
            ),
            Column("runs", _both, meaning="native, virtual"),
        ],
        # The column shows the engine behind the execution, as in other tables.
        agreement(results).assign(execution="native").to_dict("records"),
        name="agreement",
    )


def _both(row: quantity.Row) -> Entry:
    return Entry(f"{row['n_native']}, {row['n_virtual']}", Measured(row["n_native"]))


def _failed(results: Results) -> Table:
    """Runs that were not completed, which no other table holds."""
    # A study of thousands of failed runs would be a page of these.
    shown = results.failed.head(_MOST_FAILED)
    more = len(results.failed) - len(shown)
    return Table.of(
        "Runs that were not completed",
        [
            Column("run", text("run_id"), left=True),
            quantity.STRATEGY,
            quantity.EXECUTION,
            quantity.WORKERS,
            Column("what became of it", text("status"), left=True),
            Column("why", text("error"), left=True),
        ],
        shown.fillna({"error": ""}).to_dict("records"),
        [
            f"They are in no other number here.{f' {more:,} more are in runs.csv.' if more else ''}"
        ],
        name="failed",
    )


def _place_order(row: quantity.Row) -> tuple[object, ...]:
    """Return the sort key of a row, in the order of `cells`."""
    return Cell(*(row[name] for name in PLACE)).sort_key


def elastic_table(folder: Path) -> Table:
    """Return the latest attempt at each elastic run of the study in `folder`; without rows if there is none.

    Raises:
        ResultsError: elastic.csv cannot be read, or a cell is damaged.
    """
    rows: list[quantity.Row] = []
    if (folder / ELASTIC).is_file():
        table = reading.read_table(folder / ELASTIC, schema.ElasticRow)
        # A run that was repeated has a row for each attempt.
        places = attempts.latest_places(
            table["run_id"].tolist(), table["attempt"].tolist()
        )
        rows = [
            _elastic_row(row)
            for row in table.iloc[sorted(places.values())].to_dict("records")
        ]
    return Table.of(
        "Elastic runs",
        _ELASTIC_COLUMNS,
        rows,
        [
            "Their times hold interruptions, so that they are in no figure, law or ratio."
            if rows
            else ""
        ],
        name="elastic",
    )


def _elastic_row(row: quantity.Row) -> quantity.Row:
    lists = (
        {name: json.loads(row[f"interrupted_{name}"]) for name in _ELASTIC_LISTS}
        if row["interruptions"]
        else {}
    )
    # Data are dealt anew where fewer workers went on.
    shrunk = row["dealt_anew"] is True
    return {
        **row,
        "label": label_of(row["strategy"], row["strategy_options"]),
        "counts": f"{row['workers']} to {row['workers_at_end']}"
        if shrunk
        else str(row["workers"]),
        "ranks": _joined(
            EMPTY if rank is None else str(rank) for rank in lists.get("rank", ())
        ),
        "epochs_again": _joined(str(epoch + 1) for epoch in lists.get("epoch", ())),
        "lost": _joined(seconds(each) for each in lists.get("lost_s", ())),
        "pauses": _joined(seconds(each) for each in lists.get("pause_s", ())),
        "end": row["status"]
        if row["status"] == "completed"
        else f"{row['status']}: {row['error']}",
    }


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(texts) or EMPTY
