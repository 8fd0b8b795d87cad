"""`scalebench compare A B`: changes of times and metrics between two studies, with verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import rich_click as click

from scalebench.cli.formats import format_option, show_tables
from scalebench.cli.options import (
    PATH,
    completed_study,
    json_option,
    parsed_by,
    strategies_option,
)
from scalebench.study.choices import Execution

_FAIL_ON = (
    "regression",
    "metric",
    "repeatable-metric",
    "failed",
    "undecided",
    "missing",
)


@click.command()
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="[B]", required=False, type=PATH)
@strategies_option(
    "Compare these only. With A alone, two: the reference first.", among_results=True
)
@click.option(
    "--execution",
    type=click.Choice(get_args(Execution)),
    help="Compare these runs only.",
)
@click.option(
    "--threshold",
    callback=parsed_by("parse_share"),
    metavar="SHARE",
    default="5%",
    show_default=True,
    help="A change of time that matters.",
)
@click.option(
    "--metric-margin",
    callback=parsed_by("parse_share"),
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
@format_option
@json_option
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
    from scalebench.cli.compare_table import comparison_facts, comparison_table

    if b is None:
        if len(strategies) != 2:
            raise click.UsageError(
                "name a second folder, or two strategies of the first (--strategy NAME, twice)"
            )
        if ignore:
            raise click.UsageError(
                "--ignore overrides a difference of two studies; strategies of one have none"
            )
        studies = [load(completed_study(a))]
        found = compare_strategies(studies[0], *strategies, **limits)
    else:
        studies = [load(completed_study(x)) for x in (a, b)]
        found = compare_studies(
            studies[0], studies[1], strategies=strategies, ignore=ignore, **limits
        )
    for study in studies:
        for note in study.notes:
            click.echo(f"{study.folder}: {note}", err=True)
    if as_json:
        click.echo(json.dumps(comparison_facts(found), indent=2, allow_nan=False))
    else:
        show_tables(form, comparison_table(found))
    bad = {
        "regression": found.regressed,
        "metric": found.metrics("worse") > 0,
        "repeatable-metric": found.repeats_worse > 0,
        "failed": bool(found.failed),
        "undecided": found.count("undecided") > 0,
        "missing": bool(found.missing or found.failed),
    }
    return 1 if any(bad[what] for what in fail_on) else 0
