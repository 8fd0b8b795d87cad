"""`scalebench run --elastic`: the native runs of a plan, which go on when a worker dies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from scalebench.cli.live_progress import watching
from scalebench.cli.options import verbosity
from scalebench.cli.run_common import exit_code
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.launch.planning import StudyPlan


def run_elastic_plan(
    plan: StudyPlan, output: Path, *, restarts: int, fail_fast: bool, dry_run: bool
) -> int:
    """Make the elastic runs of `plan`, print their table, and return the exit code, as of `run_plan`."""
    from scalebench.launch.elastic import elastic_runs, run_elastic
    from scalebench.report.elastic import elastic_table
    from scalebench.tables.screen import print_results

    if dry_run:
        for run in elastic_runs(plan):
            click.echo(run.run_id)
        return 0
    with watching() as watcher:
        tally = run_elastic(
            plan, output, watcher, restarts=restarts, fail_fast=fail_fast
        )
    if verbosity() >= 0 and (table := elastic_table(tally.folder)).rows:
        print_results(table)
    done = f", {tally.done_before} were there before" if tally.done_before else ""
    failed = f", {len(tally.failed)} did not complete" if tally.failed else ""
    print_results(
        f"{counted(tally.completed, 'elastic run')} completed{done}{failed}; in {tally.folder}/elastic.csv"
    )
    if tally.remaining:
        left = f"{counted(tally.remaining, 'elastic run')} {'is' if tally.remaining == 1 else 'are'} left"
        print_results(f"{left}: the same command goes on with them")
    return exit_code(tally)
