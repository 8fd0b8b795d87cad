"""Common part of `run` and `retry`: run a plan with progress on the screen, and print its summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.cli.options import verbosity
from scalebench.cli.progress import watching
from scalebench.formatting import counted

if TYPE_CHECKING:
    from rich.console import Console

    from scalebench.launch.planning import StudyPlan
    from scalebench.launch.reporter import Tally


def run_plan(
    plan: StudyPlan, output: Path, *, jobs: int | None = None, fail_fast: bool = False, only_failed: bool = False
) -> int:
    """Run `plan`, print the summary and return the exit code: 0, 1 (a run failed) or 128 + the signal that ended it."""
    from scalebench.launch.study_run import run_study
    from scalebench.records.durations import timed

    with timed(output / plan.study.name, "run", added=True), watching() as watcher:
        tally = run_study(plan, output, watcher, jobs=jobs, fail_fast=fail_fast, only_failed=only_failed)
    _summarise(tally)
    if tally.interrupted is not None:
        return 128 + tally.interrupted
    return 1 if tally.failed else 0


def enter_first_folder(folder: Path) -> Path:
    """Change to the folder in which the study in `folder` was begun, if known, and return `folder` from there.

    Relative paths in the study and in its own code start there.
    """
    from scalebench.records.progress import begun_in

    place = begun_in(folder)
    if place is None or place == Path.cwd():
        return folder
    folder = folder.resolve()
    os.chdir(place)
    return folder


def results_console() -> Console:
    """Standard output, wide enough for tables in a file or a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=200)


def _summarise(tally: Tally) -> None:
    console = results_console()
    if verbosity() >= 0 and (tally.completed or tally.done_before or tally.failed):
        from scalebench.analysis import load
        from scalebench.cli.terminal_table import summary_table
        from scalebench.report.answer import spoken

        results = load(tally.folder)
        console.print(summary_table(results))
        for line in spoken(results):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    done = f", {tally.done_before} were there before" if tally.done_before else ""
    failed = f", {len(tally.failed)} did not complete" if tally.failed else ""
    remain = f", {tally.remaining} remain (the same command goes on with them)" if tally.remaining else ""
    console.print(
        f"{counted(tally.completed, 'run')} completed{done}{failed}{remain}; results in {tally.folder}/",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
