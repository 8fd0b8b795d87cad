"""`scalebench compare A B`: changes of times and metrics between two studies, with verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import rich_click as click

from scalebench.cli import formats, options
from scalebench.formatting import digits_as_known, listed, tell_marks
from scalebench.study.cell import group_of, in_words
from scalebench.study.choices import Execution
from scalebench.tables import table

if TYPE_CHECKING:
    import pandas as pd
    from rich.text import Text

    from scalebench.analysis.verdicts import Verdicts

_FAIL_ON = (
    "regression",
    "metric",
    "repeatable-metric",
    "failed",
    "undecided",
    "missing",
)
Row = Mapping[Any, Any]
JSON_SCHEMA = 2  # of `--json`; raised when a key changes its meaning or goes
_COLORS = {
    "regression": "red",
    "improvement": "green",
    "undecided": "yellow",
    "unchanged": "",
    "not compared": "dim",
}
_PARTICIPLES = {verdict: verdict for verdict in _COLORS} | {
    "regression": "regressed",
    "improvement": "improved",
}
_METRIC_COLORS = {"worse": "red", "better": "green"}


@click.command()
@click.argument("a", metavar="A", type=options.PATH)
@click.argument("b", metavar="[B]", required=False, type=options.PATH)
@options.strategies_option(
    "Compare these only. With A alone, two: the reference first.", among_results=True
)
@click.option(
    "--execution",
    type=click.Choice(get_args(Execution)),
    help="Compare these runs only.",
)
@click.option(
    "--threshold",
    callback=options.parsed_by("parse_share"),
    metavar="SHARE",
    default="5%",
    show_default=True,
    help="A change of time that matters.",
)
@click.option(
    "--metric-margin",
    callback=options.parsed_by("parse_share"),
    metavar="SHARE",
    default="0.01",
    show_default=True,
    help="A change of the metric that matters.",
)
@click.option(
    "--fail-on",
    multiple=True,
    type=click.Choice(_FAIL_ON),
    help="Leave with 1 if there is one; repeatable.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="KEY",
    help="Compare although this key differs; repeatable.",
)
@formats.format_option
@options.json_option
def compare(
    a: Path,
    b: Path | None,
    strategies: tuple[str, ...],
    fail_on: tuple[str, ...],
    ignore: tuple[str, ...],
    form: str,
    as_json: bool,
    **limits: Any,
) -> int:
    """Compare the study in folder B with the one in A, or two strategies of the study in A (of several the newest).

    Each worker count gets a verdict on T_B / T_A: a regression, if its whole interval
    lies above 1 + threshold; an improvement, if below 1 / (1 + threshold); unchanged,
    if between; else undecided. Its metric is worse, better, equal (within the margin)
    or undecided. Studies that differ in more than code, packages and machine state are
    refused; the key that differs is named.

    \b
    scalebench compare results/before results/after --threshold 5% --fail-on regression
    scalebench compare results/mine --strategy allreduce --strategy epoch_average
    """
    from scalebench.analysis import load
    from scalebench.analysis.verdicts import compare_strategies, compare_studies

    if b is None:
        if len(strategies) != 2:
            ran = load(options.completed_study(a)).completed["label"].unique()
            raise click.UsageError(
                "name a second folder, or two strategies of the first (--strategy NAME, twice), which has "
                f"{listed(map(str, ran))}"
            )
        if ignore:
            raise click.UsageError(
                "--ignore overrides a difference of two studies; strategies of one have none"
            )
        studies = [load(options.completed_study(a))]
        found = compare_strategies(studies[0], *strategies, **limits)
    else:
        studies = [load(options.completed_study(x)) for x in (a, b)]
        found = compare_studies(
            studies[0], studies[1], strategies=strategies, ignore=ignore, **limits
        )
    for study in studies:
        for note in study.notes:
            click.echo(f"{study.folder}: {note}", err=True)
    if as_json:
        click.echo(json.dumps(_facts(found), indent=2, allow_nan=False))
    else:
        formats.show_tables(form, _counts_in_words(found), _comparison(found))
    bad = {
        "regression": found.regressed,
        "metric": found.metrics("worse") > 0,
        "repeatable-metric": found.repeats_worse > 0,
        "failed": bool(found.failed),
        "undecided": found.count("undecided") > 0,
        "missing": bool(found.missing or found.failed),
    }
    # nothing fails by itself: what is bad depends on who asks
    return 1 if any(bad[what] for what in fail_on) else 0


def _comparison(found: Verdicts) -> table.Table:
    """Return a row for each cell that both have."""
    rows = found.table.to_dict("records")
    # then the title names it
    one_pair = len({(row["label_a"], row["label_b"]) for row in rows}) == 1
    metrics = {row["metric_name"] for row in rows} - {""}
    change = f"{metrics.pop() if len(metrics) == 1 else 'metric'} B - A"
    # with few repetitions there is no test, and no column for it
    tested = any(row["test"] for row in rows)
    columns: list[table.Column[Row]] = [
        *(
            []
            if one_pair
            else [table.Column("strategy", table.text("label_a"), shared=True)]
        ),
        table.Column("execution", _execution, shared=True),
        table.Column("workers", table.fields("workers"), table.COUNT),
        table.Column("A", table.fields("a_s a_low a_high"), table.TIME_ALONE, spare=1),
        table.Column("A median", table.fields("a_median_s"), table.TIME_ALONE, spare=5),
        table.Column("A spread", table.fields("a_spread"), table.SHARE, spare=4),
        table.Column("B", table.fields("b_s b_low b_high"), table.TIME_ALONE, spare=1),
        table.Column("B median", table.fields("b_median_s"), table.TIME_ALONE, spare=5),
        table.Column("B spread", table.fields("b_spread"), table.SHARE, spare=4),
        table.Column(
            "B / A [interval]",
            table.fields("ratio ratio_low ratio_high"),
            table.RATIO,
            title="B / A",
        ),
        *(
            [
                table.Column(
                    "p (Holm)", table.fields("p_adjusted"), table.TWO_DIGITS, spare=3
                )
            ]
            if tested
            else []
        ),
        table.Column(
            change,
            table.fields("metric_difference metric_low metric_high"),
            table.DIFFERENCE,
            spare=2,
        ),
        table.Column("verdict", _verdict, left=True),
    ]
    pair = (
        f" ({rows[0]['label_a']})"
        if one_pair and rows[0]["label_a"] == rows[0]["label_b"]
        else ""
    )
    title = f"A: {found.a}   B: {found.b}{pair}"
    return table.Table.of(title, columns, rows, _notes(found))


def _execution(row: Row) -> str:
    kind = group_of(row["execution"], row["engine_a"])
    return kind if row["engine_a"] == row["engine_b"] else f"{kind} → {row['engine_b']}"


def _verdict(row: Row) -> Text:
    from rich.text import Text

    verdict = Text("time: ").append(row["verdict"], style=_COLORS[row["verdict"]])
    if row["note"] in ("oversubscribed", "disturbed"):
        verdict.append(f", {row['note']}")
    if row["metric_name"]:
        verdict.append(f", {row['metric_name']}: ")
        verdict.append(
            row["metric_verdict"], style=_METRIC_COLORS.get(row["metric_verdict"], "")
        )
    return verdict


def _notes(found: Verdicts) -> list[str]:
    """Notes below the table."""
    from scalebench.analysis.intervals import NOTHING_VARIES

    ratios = found.table[["ratio", "ratio_low", "ratio_high"]].itertuples(index=False)
    notes = tell_marks(digits_as_known(*own) for own in ratios)
    if found.changed:
        notes.append(f"what changed: {', '.join(found.changed)}")
    notes += [
        f"differs and was ignored: {difference}" for difference in found.overridden
    ]
    kinds = sorted(set(found.table["interval"]) - {""})
    if kinds:
        notes.append(f"intervals: {'; '.join(kinds)}; of the metric 95 % over seeds")
    if (
        (found.table["execution"] == "virtual")
        & (found.table["interval"] != NOTHING_VARIES)
    ).any():
        notes.append(_virtual(found))
    tests = sorted(set(found.table["test"]) - {""})
    if tests:
        notes.append(
            f"p: {', '.join(tests)} test, adjusted by Holm over the worker counts of a strategy"
        )
    elif (found.table["repetitions_needed"] > 0).any():
        notes.append(
            f"no test, as so few repetitions cannot reach its level: {found.repeat} or more"
        )
    repeated = found.table[["n_a", "n_b"]].min(axis=1) > 1
    # a single run has no pair to lose
    unpaired = ~found.table["paired"].astype(bool) & repeated
    fewer_pairs = found.table["left_out"] > 0
    apart = found.table[
        (unpaired | fewer_pairs) & (found.table["execution"] != "virtual")
    ]
    if found.one_study and len(apart):
        notes.append(
            f"independent samples or fewer pairs, as not all runs were made side by side: {_place(apart)}"
        )
    for what, cells in (
        ("completed in A, failed in B", found.failed),
        ("in A only", found.missing),
        ("in B only", found.added),
    ):
        if cells:
            notes.append(f"{what}: {in_words(cells)}")
    notes += _on_metrics(found)
    return notes


def _on_metrics(found: Verdicts) -> list[str]:
    """Return notes on metrics that vary by themselves, and on those that are undecided."""
    notes = []
    racing = found.table[~found.table["metric_repeats"].astype(bool)]
    if len(racing) and not found.one_study:
        notes.append(
            f"metric varies from run to run, as workers merge when they arrive: {_place(racing)}"
        )
    unsure = found.table[found.table["metric_verdict"] == "undecided"]
    if 0 < len(unsure) < len(found.table):
        notes.append(f"metric undecided: {_place(unsure)}")
    return notes


def _counts(found: Verdicts) -> tuple[dict[str, int], dict[str, int]]:
    """Return the numbers of verdicts on times, and of those on metrics."""
    from scalebench.analysis.verdicts import METRIC_VERDICTS, VERDICTS

    return (
        {verdict: found.count(verdict) for verdict in VERDICTS},
        {verdict: found.metrics(verdict) for verdict in METRIC_VERDICTS},
    )


def _counts_in_words(found: Verdicts) -> str:
    of_times, of_metrics = _counts(found)
    counts = [
        f"{number} {_PARTICIPLES[verdict]}"
        for verdict, number in of_times.items()
        if number
    ]
    metrics = [
        f"{number} {verdict}" for verdict, number in of_metrics.items() if number
    ]
    return (
        f"time: {', '.join(counts)} (threshold {100 * found.threshold:g} %); "
        f"metric: {', '.join(metrics)} (margin {found.metric_margin:g})"
    )


def _virtual(found: Verdicts) -> str:
    """The known error of virtual times in words, and how much of it the intervals of ratios hold."""
    from scalebench.analysis.native_check import NATIVE_ERROR

    both = zip("AB", found.virtual_errors, strict=True)
    errors = {
        name: error for name, error in both if error and error.name == NATIVE_ERROR
    }
    if not errors:
        return "virtual times: no native point checks them: verdicts on them hold for virtual time alone"
    # one machine, one calibration: what it is wrong by divides out
    if found.one_study:
        return f"virtual times are off native ones by {errors['A'].words}; what is common to all cancels in B / A"
    known = [
        f"{error.words} in {name}{'' if error.known else ', too few'}"
        for name, error in errors.items()
    ]
    return f"virtual times are off native ones by {', '.join(known)}; B / A holds both, as nothing says what is common"


def _place(rows: pd.DataFrame) -> str:
    from scalebench.analysis.loading import cells_in

    return in_words(
        cells_in(rows.rename(columns={"engine_b": "engine", "label_b": "label"}))
    )


def _facts(found: Verdicts) -> dict[str, Any]:
    of_times, of_metrics = _counts(found)
    cells = {"failed": found.failed, "missing": found.missing, "added": found.added}
    errors = dict(zip("ab", found.virtual_errors, strict=True))
    rows = found.table.to_dict("records")
    return {
        "schema": JSON_SCHEMA,
        "a": found.a,
        "b": found.b,
        "threshold": found.threshold,
        "metric_margin": found.metric_margin,
        "regressed": found.regressed,
        "time": of_times,
        "metric": of_metrics,
        **{name: [cell._asdict() for cell in own] for name, own in cells.items()},
        "changed": found.changed,
        "virtual_error": {
            name: asdict(error) if error is not None else None
            for name, error in errors.items()
        },
        "overridden": [asdict(difference) for difference in found.overridden],
        "cells": [{key: _plain(value) for key, value in row.items()} for row in rows],
    }


def _plain(value: Any) -> Any:
    """Replace a number that is not finite by None, for JSON."""
    # JSON knows no NaN
    return None if isinstance(value, float) and not math.isfinite(value) else value
