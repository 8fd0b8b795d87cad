"""Plans on the screen, for `run` and its kin: shown by `--dry-run`, run with progress, run elastic, and summarised."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from scalebench.cli.formats import show
from scalebench.cli.live_progress import watching
from scalebench.cli.options import verbosity
from scalebench.errors import ScalebenchError
from scalebench.formatting import OVERSUBSCRIBED, counted
from scalebench.study.cell import Cell
from scalebench.study.choices import VIRTUAL
from scalebench.tables import Column, Table

if TYPE_CHECKING:
    from scalebench.launch import planning, study_run, work
    from scalebench.study.spec import Run

RUNS_LEFT = 3  # exit code
# in the order of a cell
_MARKS = {
    "virtual": "v",
    "modelled": "m",
    "native": "n",
    "paced": "p",
}


def run_plan(
    plan: planning.StudyPlan,
    output: Path,
    *,
    jobs: int | None = None,
    fail_fast: bool = False,
    only_failed: bool = False,
    against: Sequence[str] = (),
    full: bool = False,
) -> int:
    """Run `plan`, print the answer and return the exit code.

    0: every run was made; 1: a run failed; RUNS_LEFT: runs are left; 128 + the signal
    that ended it. A job that goes back into the queue after the signal of its time
    limit would do so for ever where no run ends in its time: then RUNS_LEFT.

    The table below the answer has reductions `against` baselines of the study; the
    `full` one has every point.
    """
    from scalebench.launch.study_run import run_study
    from scalebench.records.folder import is_submitted, timed
    from scalebench.system.interruption import AbandonedError

    folder = output / plan.study.name
    if is_submitted(folder) and verbosity() >= 0:
        click.echo(
            f"note: {folder} was submitted as jobs, whose runs count here once scalebench collect {folder} merges them",
            err=True,
        )
    try:
        # added: a study that went on has taken the time of all its commands
        with timed(folder, "run", added=True), watching() as watcher:
            tally = run_study(
                plan,
                output,
                watcher,
                jobs=jobs,
                fail_fast=fail_fast,
                only_failed=only_failed,
            )
    except AbandonedError as error:
        if error.signum != signal.SIGUSR1:
            raise
        # a scheduler would queue such a job again and again
        raise TooShortError from None
    _summarise(tally, against, full)
    if (
        tally.interrupted == signal.SIGUSR1
        and tally.remaining
        and not (tally.completed or tally.trials or tally.failed)
    ):
        raise TooShortError
    return exit_code(tally)


def exit_code(tally: work.Tally) -> int:
    """Return the exit code of a command that made the runs of `tally`, as `run_plan` gives it."""
    if tally.interrupted is not None:
        return 128 + tally.interrupted
    # before what is left: a failure wants to be looked at
    if tally.failed:
        return 1
    return RUNS_LEFT if tally.remaining else 0


class TooShortError(ScalebenchError):
    """The time limit of a job left no time for a run; to queue the job again would change nothing."""

    exit_code = RUNS_LEFT

    def __init__(self) -> None:
        super().__init__(
            "no run ended before SIGUSR1, the signal of the time limit: the job is too short for one; give it more time"
        )


def refuse_early_signal() -> None:
    """Let SIGUSR1 end the command as too short from now on; while runs are made, they end first."""

    def too_early(signum: int, frame: FrameType | None) -> None:
        raise TooShortError

    # Python lets only this one set handlers; a notebook may run in another
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, too_early)


def enter_first_folder(folder: Path) -> Path:
    """Change to the folder in which the study in `folder` was begun, if known, and return `folder` from there.

    Relative paths in the study and in its own code start there.
    """
    from scalebench.records.progress import begun_in

    place = begun_in(folder)
    if place is None or place == Path.cwd():
        return folder
    folder = folder.resolve()
    # of the whole process: a user's own model may open files by relative paths, too
    os.chdir(place)
    return folder


def _summarise(tally: work.Tally, against: Sequence[str], full: bool) -> None:
    from scalebench.analysis.summary import answer_table, summary

    # without rows, now or from before, there is nothing to answer with
    if verbosity() >= 0 and (tally.completed or tally.done_before or tally.failed):
        from scalebench.analysis import load
        from scalebench.report.answer import spoken

        results = load(tally.folder)
        show(
            *spoken(results),
            summary(results) if full else answer_table(results, against),
        )
    done = _done_before(tally.done_before)
    failed = f", {len(tally.failed)} did not complete" if tally.failed else ""
    trials = f" and {counted(tally.trials, 'trial')}" if tally.trials else ""
    made = f"{counted(tally.completed, 'run')}{trials} completed{done}{failed}"
    show(f"{made}; results in {tally.folder}/")
    if tally.remaining:
        show(runs_left(tally))


def _done_before(runs: int) -> str:
    return f", {runs} {'was' if runs == 1 else 'were'} there before" if runs else ""


def runs_left(tally: work.Tally) -> str:
    """The last line: which runs are left, why, and what makes them."""
    from scalebench.records.progress import progress_of

    groups = progress_of(tally.folder).remaining
    which = (
        f" ({', '.join(f'{number} {group}' for group, number in groups.items())})"
        if groups
        else ""
    )
    why = tally.why_left
    if tally.interrupted is not None:
        why = f"{signal.Signals(tally.interrupted).name} ended the command"
    elif tally.failed and not why:
        why = f"{counted(len(tally.failed), 'run')} failed"
    left = f"{counted(tally.remaining, 'run')} {'is' if tally.remaining == 1 else 'are'} left{which}"
    return f"{left}{f', as {why}' if why else ''}: the same command goes on with them"


def run_elastic(
    plan: planning.StudyPlan,
    output: Path,
    restarts: int,
    fail_fast: bool,
    dry_run: bool,
) -> int:
    """Make the elastic runs of `plan`, print their table, and return the exit code, as of `run_plan`."""
    from scalebench.launch import elastic
    from scalebench.report.tables import elastic_table

    if dry_run:
        for run in elastic.elastic_runs(plan):
            click.echo(run.run_id)
        return 0
    with watching() as watcher:
        tally = elastic.run_elastic(
            plan, output, watcher, restarts=restarts, fail_fast=fail_fast
        )
    if verbosity() >= 0 and (table := elastic_table(tally.folder)).rows:
        show(table)
    done = _done_before(tally.done_before)
    failed = f", {len(tally.failed)} did not complete" if tally.failed else ""
    show(
        f"{counted(tally.completed, 'elastic run')} completed{done}{failed}; in {tally.folder}/elastic.csv"
    )
    if tally.remaining:
        left = f"{counted(tally.remaining, 'elastic run')} {'is' if tally.remaining == 1 else 'are'} left"
        show(f"{left}: the same command goes on with them")
    return exit_code(tally)


def show_plan(plan: planning.StudyPlan, output: Path, jobs: int | None) -> int:
    """Print the plan of a study whose folder is in `output`, what of it is done, and remarks on its model; return 0.

    The estimate, for `jobs` virtual runs at a time, takes about a second.
    """
    from scalebench.launch.model_check import look_at_model
    from scalebench.launch.study_run import standing

    # a dry run promises what a run would do, and that would refuse such a model
    plan = replace(plan, remarks=tuple(look_at_model(plan)))
    _show_standing(standing(plan, output / plan.study.name), jobs)
    return 0


def _show_standing(standing: study_run.Standing, jobs: int | None) -> None:
    from scalebench.records.progress import lost_epochs

    plan = standing.plan
    study = plan.study
    rate = (
        "a tuned lr" if study.tune and "lr" in study.tune.over else f"lr {study.lr:g}"
    )
    simulated = any(run.is_virtual for run in plan.sweep.runs)
    cluster = f", virtual runs on {plan.cluster.name}" * simulated
    lines = [
        f"model {study.model} in {study.dtype}, data {study.dataset}, {counted(study.epochs, 'epoch')}, "
        f"{study.optimizer} at {rate} ({study.lr_policy}){cluster}",
        _expected_compute(standing, jobs),
    ]
    if study.tune:
        spaces = ", ".join(f"{key} {values}" for key, values in study.tune.over.items())
        held_out = f"{100 * study.tune.validation:g} % of the training samples"
        lines.append(
            f"before them {counted(len(plan.trials), 'trial')}: {study.tune.trials} of each strategy and worker count "
            f"over {spaces}, judged by {study.tune.metric} on {held_out}"
        )
    if study.until:
        width = 100 * study.until.ci_width
        lines.append(
            f"each point is repeated until the interval of its time is {width:.3g} % of it wide"
        )
    notes = list(plan.notes)
    if standing.without_epochs:
        notes.insert(0, f"{lost_epochs(standing.without_epochs)}: they are run again")
    show(_matrix(standing), *lines, *(f"note: {note}" for note in notes))


def _expected_compute(standing: study_run.Standing, jobs: int | None) -> str:
    from scalebench.launch.compute_estimate import estimate, trains
    from scalebench.system.hardware import cores

    if not standing.left:
        return "all of it is done: the same command without --dry-run prints the answer"
    if not trains(standing.left):
        return "nothing is trained: modelled runs are priced in seconds"
    expected = estimate(
        standing.plan, standing.left, standing.most_to_come, jobs or cores()
    )
    return (
        f"{expected}, from a step of {expected.step_s * 1e3:.3f} ms measured here; communication, start-up and "
        "calibration come on top"
    )


def _matrix(standing: study_run.Standing) -> Table:
    """Return rows of strategies, columns of worker counts, and in each cell marks of the executions of its point."""
    plan = standing.plan
    runs, until = plan.sweep.runs, plan.study.until
    # trials are in a line of their own
    made = [run for run in standing.done if run.trial is None]
    counts = sorted({run.workers for run in runs})
    shards = [plan.prepared.plans[workers] for workers in counts]
    rows = [
        *_marks_of_strategies(plan, counts, made),
        ["steps per epoch", "", *(str(shard.steps(0)) for shard in shards)],
        ["batch per worker", "", *(str(shard.batch_size) for shard in shards)],
    ]
    columns: list[Column[Sequence[str]]] = [Column("workers", itemgetter(0), left=True)]
    if any(row[1] for row in rows):  # else nothing runs in real processes
        columns.append(Column("engine", itemgetter(1), left=True, spare=1))
    for number, workers in enumerate(counts):
        is_last = number == len(counts) - 1
        columns.append(
            Column(
                str(workers),
                itemgetter(2 + number),
                # on a narrow screen every second count goes first, and the largest
                # stays
                spare=0 if is_last else 2 + number % 2,
            )
        )
    most = f" at least, {len(runs) + len(plan.sweep.further)} at most" if until else ""
    there = f", {len(made)} done" * bool(made)
    title = f"{plan.study.name}: {counted(len(runs), 'run')}{most}{there}"
    return Table.of(title, columns, rows, [_legend(standing)])


def _marks_of_strategies(
    plan: planning.StudyPlan, counts: Sequence[int], made: Sequence[Run]
) -> list[list[str]]:
    """Return a row for each strategy: its name, the engine of its real processes, and the marks at each count."""
    from scalebench.launch.sweep import is_oversubscribed

    runs = plan.sweep.runs
    planned = Counter(map(Cell.of, runs))
    done = Counter(map(Cell.of, made))
    crowded = {Cell.of(run) for run in runs if is_oversubscribed(run, plan.allocation)}
    # a number is printed only where it differs: most cells have all repetitions
    usual = max(planned.values(), default=0)
    rows = []
    for strategy in map(str, plan.study.strategies):
        own = {
            (cell.workers, cell.execution): cell
            for cell in planned
            if cell.label == strategy
        }
        engines = {cell.engine for cell in own.values() if cell.engine != VIRTUAL}
        texts = []
        for workers in counts:
            marks = []
            for execution, mark in _MARKS.items():
                cell = own.get((workers, execution))
                if cell is None:
                    continue
                number = planned[cell]
                sign = OVERSUBSCRIBED * (cell in crowded)
                if done[cell] >= number:
                    sign += ":done"
                elif done[cell] or number != usual:
                    sign += f":{done[cell]}/{number}"
                marks.append(f"{mark}{sign}")
            texts.append(" ".join(marks) or "-")
        rows.append([strategy, ", ".join(sorted(engines)), *texts])
    return rows


def _legend(standing: study_run.Standing) -> str:
    """Return the meaning of the marks that the table has, and the repetitions of each."""
    from scalebench.launch.sweep import is_oversubscribed

    runs, until = standing.plan.sweep.runs, standing.plan.study.until
    executions = {run.execution for run in runs}
    named = [
        f"{mark} {execution}"
        for execution, mark in _MARKS.items()
        if execution in executions
    ]
    if any(is_oversubscribed(run, standing.plan.allocation) for run in runs):
        named.append(f"{OVERSUBSCRIBED} oversubscribed")
    usual = max(Counter(map(Cell.of, runs)).values(), default=0)
    each = (
        f"{usual} to {until.at_most} repetitions"
        if until
        else counted(usual, "repetition")
    )
    progress = (
        ", done/planned where that differs or some are done" if standing.done else ""
    )
    return f"{', '.join(named)}; {each} of each{progress}"
