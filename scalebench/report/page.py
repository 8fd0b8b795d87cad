"""The report as one self-contained HTML file, and its tables, each from one function of the analysis."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from scalebench import __version__
from scalebench.analysis import Results, agreement, cells, load, ratios
from scalebench.analysis import quantities as quantity
from scalebench.analysis.laws import EFFICIENCY, Advice, Scaling, scaling_laws
from scalebench.analysis.laws.render import LAWS, count_text, law_rows, title
from scalebench.analysis.methodology import Evidence, check
from scalebench.analysis.target import times_to_target
from scalebench.analysis.tuning_trials import metric_of, tuned_cells, tuning_in_words
from scalebench.analysis.verdicts import METRIC_MARGIN
from scalebench.errors import writing
from scalebench.formatting import EMPTY
from scalebench.measured import Measured
from scalebench.records.provenance import redactor
from scalebench.report.answer import answer
from scalebench.report.comparison import Comparison, as_text, comparisons
from scalebench.report.drawings import StyleSheet, drawing_all, inlined
from scalebench.report.elastic import elastic_table
from scalebench.report.origin import machines, rerun_of, study_facts
from scalebench.study.cell import PLACE, Cell
from scalebench.study.choices import BASELINES, LIBRARY_BASELINES
from scalebench.study.spec import slug
from scalebench.system.file_access import atomic_file
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

TEMPLATES = Path(__file__).with_name("templates")
_ELSEWHERE = "choose another file with --output"
_SHORTEST = 6  # characters: shorter texts hold no path or secret
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

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


def write_report(folder: Path, output: Path | None = None, jobs: int = 1) -> Path:
    """Write the report on the study in `folder` to `output` (plots/<study>/report.html); return its path.

    With more than one of `jobs`, as many other processes draw the figures while this
    one computes the words. The same records give the same bytes.

    Raises:
        ResultsError: `folder` cannot be read, or `output` cannot be written.
    """
    evidence = Evidence(load(folder))
    results = evidence.results
    study = str(results.runs["study"].iloc[-1])
    output = output or Path("plots") / slug(study) / "report.html"
    with writing(output, _ELSEWHERE):  # fails before the figures are drawn
        output.parent.mkdir(parents=True, exist_ok=True)
    # One for all pictures, so that equal styles are one class of the page.
    sheet = StyleSheet()
    with drawing_all(results, jobs) as drawings:
        compared = comparisons(results)
        reply = answer(results, compared)
        facts = {
            "version": __version__,
            "study": study,
            "description": str(results.study.get("description") or ""),
            "answer": reply,
            "summary": as_text(reply.sentence),
            "facts": study_facts(results),
            "tables": tables(results, compared),
            "method": check(evidence),
            "machines": machines(evidence.rows, evidence.provenance),
            "rerun": rerun_of(results, evidence.provenance),
        }
        # Not in the processes that draw: classes are numbered in the order of the page.
        drawn = [inlined(drawing, sheet) for drawing in drawings]
    # Each process that draws finds notes of its own, some of them the same.
    notes = dict.fromkeys(
        [*results.notes, *(note for drawing in drawn for note in drawing.notes)]
    )
    text = render({**facts, "drawings": drawn, "notes": list(notes)}, sheet)
    with writing(output, _ELSEWHERE), atomic_file(output) as file:
        file.write(text)
    return output


def render(facts: Mapping[str, Any], sheet: StyleSheet) -> str:
    """Render the page; its content security policy allows its own style and script only, by their hashes."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Equal cells are many, and looked up faster than redacted.
        finalize=partial(_printable, cache(redactor(names=False))),
    )
    css = {
        "rules": sheet.rules(),
        "light": sheet.colors(dark=False),
        "dark": sheet.colors(dark=True),
    }
    # Escaped, the quotes of a style would be none.
    rules = {name: Markup(text) for name, text in css.items()}  # noqa: S704
    style = Markup(environment.get_template("report.css").render(sheet=rules))  # noqa: S704
    script = Markup((TEMPLATES / "report.js").read_text(encoding="utf-8"))  # noqa: S704
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template("report.html.j2")
    return page.render(facts, style=style, script=script, policy=Markup(policy)) + "\n"  # noqa: S704


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _printable(redacted: Callable[[str], str], value: Any) -> Any:
    """Remove control characters, which HTML forbids, home folders and secrets from text."""
    # Markup is made here: pictures, style and script.
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = _UNPRINTABLE.sub("\ufffd", value)
    return redacted(text) if len(text) >= _SHORTEST else text


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
        dict([*vars(one).items(), ("metric_verdict", one.metric_verdict)])
        for one in own
    ]
    return Table.of(
        f"Time saved against per-batch {own[0].baseline if own else ''}, and what it costs",
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
    table = times_to_target(results)
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
    rows = tuned_cells(results).to_dict("records")
    keys = list(dict.fromkeys(key for row in rows for key in row["tuned"]))
    edge = "of the best trial; *: the least or the largest that was tried"
    limit = Column(
        "time",
        fields("value"),
        TIME_ALONE,
        "virtual time to the target on the validation split",
    )
    words = tuning_in_words(results)
    return Table.of(
        "Tuned values",
        [
            quantity.STRATEGY,
            quantity.WORKERS,
            *(
                Column(key, partial(_tuned, key), meaning=edge, left=True)
                for key in keys
            ),
            *([limit] if metric_of(results) == "time_to_target" else []),
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
    shown = ("time", "median", "spread", "speedup", "efficiency", "metric", "runs")
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
    some = bool((results.completed["strategy"] != "serial").any())
    found = scaling_laws(results) if some else []
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
                f"{one.series.name}, {one.series.execution}: {note}"
                for one in found
                for note in one.notes
            ),
            *(f"{title(one)}: no law: {one.refusal}" for one in found if one.refusal),
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
        "execution": series.execution,
        "engine": series.engine,
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
        compared["baseline"].isin(LIBRARY_BASELINES)
        & (compared["strategy"] != "serial")
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
