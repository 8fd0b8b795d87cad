"""The plan of a study as `scalebench run --dry-run` prints it: a matrix of its points, its training, and an estimate.

Rows are strategies, columns worker counts; each cell marks in which executions its
point runs, and how much is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from scalebench.formatting import OVERSUBSCRIBED, counted
from scalebench.records.progress import lost_epochs
from scalebench.system.hardware import cores
from scalebench.tables import Column, Table
from scalebench.tables.screen import print_results

if TYPE_CHECKING:
    from pathlib import Path

    from scalebench.launch.planning import StudyPlan
    from scalebench.launch.study_run import Standing
    from scalebench.study.spec import Run

_Point = tuple[str, int, str]  # strategy, workers and execution
_MARKS = {
    "virtual": "v",
    "modelled": "m",
    "native": "n",
    "paced": "p",
}  # in the order of a cell


def show_plan(plan: StudyPlan, output: Path, jobs: int | None) -> None:
    """Print the plan of a study whose folder is in `output`, what of it is done, and remarks on its model.

    The estimate, for `jobs` virtual runs at a time, takes about a second.
    """
    from scalebench.launch.model_check import look_at_model
    from scalebench.launch.study_run import standing

    plan.prepared.notes += look_at_model(plan)
    _show(standing(plan, output / plan.study.name), jobs)


def _show(standing: Standing, jobs: int | None) -> None:
    plan = standing.plan
    study = plan.study
    rate = (
        "a tuned lr" if study.tune and "lr" in study.tune.over else f"lr {study.lr:g}"
    )
    lines = [
        f"model {study.model} in {study.dtype}, data {study.dataset}, {counted(study.epochs, 'epoch')}, "
        f"{study.optimizer} at {rate} ({study.lr_policy}), virtual runs on {plan.cluster.name}",
        _expected(standing, jobs or cores()),
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
    print_results(_table(standing), *lines, *(f"note: {note}" for note in notes))


def _expected(standing: Standing, jobs: int) -> str:
    from scalebench.launch.model_check import estimate, trains

    if not standing.left:
        return "all of it is done: the same command without --dry-run prints the answer"
    if not trains(standing.left):
        return "nothing is trained: modelled runs are priced in seconds"
    expected = estimate(standing.plan, standing.left, standing.most_to_come, jobs)
    return (
        f"{expected}, from a step of {expected.step_s * 1e3:.3f} ms measured here; communication, start-up and "
        "calibration come on top"
    )


def _table(standing: Standing) -> Table:
    plan = standing.plan
    runs, until = plan.sweep.runs, plan.study.until
    made = [run for run in standing.done if run.trial is None]
    counts = sorted({run.workers for run in runs})
    shards = [plan.prepared.plans[workers] for workers in counts]
    rows = [
        *_strategies(plan, counts, made),
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
                spare=0 if is_last else 2 + number % 2,
            )
        )
    most = f" at least, {len(runs) + len(plan.sweep.further)} at most" if until else ""
    there = f", {len(made)} done" * bool(made)
    title = f"{plan.study.name}: {counted(len(runs), 'run')}{most}{there}"
    return Table.of(title, columns, rows, [_legend(standing)])


def _strategies(
    plan: StudyPlan, counts: Sequence[int], made: Sequence[Run]
) -> list[list[str]]:
    """Return a row for each strategy: its name, the engine of its real processes, and the marks at each count."""
    from scalebench.launch.sweep import is_oversubscribed

    runs = plan.sweep.runs
    planned = Counter(map(_point_of, runs))
    done = Counter(map(_point_of, made))
    crowded = {
        _point_of(run) for run in runs if is_oversubscribed(run, plan.allocation)
    }
    usual = max(planned.values(), default=0)
    rows = []
    for strategy in map(str, plan.study.strategies):
        engines = {
            run.engine
            for run in runs
            if str(run.strategy) == strategy and run.engine != "virtual"
        }
        cells = []
        for workers in counts:
            marks = []
            for execution, mark in _MARKS.items():
                point = (strategy, workers, execution)
                number = planned[point]
                if not number:
                    continue
                sign = OVERSUBSCRIBED * (point in crowded)
                if done[point] >= number:
                    sign += ":done"
                elif done[point] or number != usual:
                    sign += f":{done[point]}/{number}"
                marks.append(f"{mark}{sign}")
            cells.append(" ".join(marks) or "-")
        rows.append([strategy, ", ".join(sorted(engines)), *cells])
    return rows


def _legend(standing: Standing) -> str:
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
    usual = max(Counter(map(_point_of, runs)).values(), default=0)
    each = (
        f"{usual} to {until.at_most} repetitions"
        if until
        else counted(usual, "repetition")
    )
    progress = (
        ", done/planned where that differs or some are done" if standing.done else ""
    )
    return f"{', '.join(named)}; {each} of each{progress}"


def _point_of(run: Run) -> _Point:
    return str(run.strategy), run.workers, run.execution
