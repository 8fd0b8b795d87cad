"""Common part of `run` and `retry`: run a plan with progress on the screen, and print its summary."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.cli.options import verbosity
from scalebench.cli.progress import watching
from scalebench.cli.terminal_table import TableColumn, TerminalTable, print_results
from scalebench.comm.engines import cores
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.launch.planning import StudyPlan
    from scalebench.launch.stopping_rule import Tally


def run_plan(
    plan: StudyPlan,
    output: Path,
    *,
    jobs: int | None = None,
    fail_fast: bool = False,
    only_failed: bool = False,
    against: Sequence[str] = (),
    full: bool = False,
) -> int:
    """Run `plan`, print the answer and return the exit code: 0, 1 (a run failed) or 128 + the signal that ended it.

    The table below the answer has reductions `against` baselines of the study; the `full` one has every point.
    """
    from scalebench.launch.study_run import run_study
    from scalebench.records.folder import timed

    with timed(output / plan.study.name, "run", added=True), watching() as watcher:
        tally = run_study(plan, output, watcher, jobs=jobs, fail_fast=fail_fast, only_failed=only_failed)
    _summarise(tally, against, full)
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


def _summarise(tally: Tally, against: Sequence[str], full: bool) -> None:
    from scalebench.cli.answer_table import answer_table
    from scalebench.cli.terminal_table import print_results, summary_table

    if verbosity() >= 0 and (tally.completed or tally.done_before or tally.failed):
        from scalebench.analysis import load
        from scalebench.report.answer import spoken

        results = load(tally.folder)
        print_results(None, spoken(results))
        print_results(summary_table(results) if full else answer_table(results, against))
    done = f", {tally.done_before} were there before" if tally.done_before else ""
    failed = f", {len(tally.failed)} did not complete" if tally.failed else ""
    remain = f", {tally.remaining} remain (the same command goes on with them)" if tally.remaining else ""
    made = f"{counted(tally.completed, 'run')} completed{done}{failed}{remain}"
    print_results(None, [f"{made}; results in {tally.folder}/"])


_COLUMNS = (
    TableColumn("strategy", left=True, shared=True),
    TableColumn("workers"),
    TableColumn("execution", left=True, shared=True),
    TableColumn("engine", left=True),
    TableColumn("repetitions"),
    TableColumn("steps per epoch", spare=2),
    TableColumn("batch per worker", spare=1),
)


def show_plan(plan: StudyPlan, jobs: int | None) -> None:
    """Print the plan; the estimate, for `jobs` virtual runs at a time, takes about a second."""
    from scalebench.launch.model_check import estimate

    study = plan.study
    expected = estimate(plan, jobs or cores())
    lines = [
        f"model {study.model} in {study.dtype}, data {study.dataset}, {counted(study.epochs, 'epoch')}, "
        f"{study.optimizer} at lr {study.lr:g} ({study.lr_policy}), virtual runs on {plan.cluster.name}",
        f"{expected}, from a step of {expected.step_s * 1e3:.3f} ms measured here; communication, start-up and "
        "calibration come on top",
    ]
    if study.until:
        width = 100 * study.until.ci_width
        lines.append(f"each point is repeated until the interval of its time is {width:.3g} % of it wide")
    print_results(_table(plan), [*lines, *(f"note: {note}" for note in plan.notes)])


def _table(plan: StudyPlan) -> TerminalTable:
    from rich.text import Text

    from scalebench.launch.planning import is_oversubscribed

    runs, until = plan.sweep.runs, plan.study.until
    place = {str(strategy): number for number, strategy in enumerate(plan.study.strategies)}
    points = Counter(
        (str(run.strategy), run.workers, is_oversubscribed(run), run.execution, run.engine)
        for run in sorted(runs, key=lambda run: (run.execution, place[str(run.strategy)], run.workers))
    )
    rows = []
    for (strategy, workers, oversubscribed, execution, engine), count in points.items():
        shards = plan.prepared.plans[workers]
        repetitions = f"{count} to {until.at_most}" if until else str(count)
        mark = " (oversubscribed)" * oversubscribed
        values = (strategy, f"{workers}{mark}", execution, engine, repetitions, shards.steps(0), shards.batch_size)
        rows.append([Text(str(value)) for value in values])
    most = f" at least, {len(runs) + len(plan.sweep.further)} at most" if until else ""
    return TerminalTable(f"{plan.study.name}: {counted(len(runs), 'run')}{most}", _COLUMNS, rows)
