"""The plan of a study as `scalebench run --dry-run` prints it: its points, its training, and an estimate."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from scalebench.cli.terminal_table import TableColumn, TerminalTable, print_results
from scalebench.comm.engines import cores
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.launch.study_run import Standing
    from scalebench.study.spec import Run

_Point = tuple[str, int, str, str, bool]
_COLUMNS = (
    TableColumn("strategy", shared=True),
    TableColumn("workers"),
    TableColumn("execution", shared=True),
    TableColumn("engine", left=True),
    TableColumn("repetitions"),
    TableColumn("steps per epoch", spare=2),
    TableColumn("batch per worker", spare=1),
)


def show_plan(standing: Standing, jobs: int | None) -> None:
    """Print the plan; the estimate, for `jobs` virtual runs at a time, takes about a second."""
    plan = standing.plan
    study = plan.study
    rate = "a tuned lr" if study.tune and "lr" in study.tune.over else f"lr {study.lr:g}"
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
        lines.append(f"each point is repeated until the interval of its time is {width:.3g} % of it wide")
    print_results(_table(standing), *lines, *(f"note: {note}" for note in plan.notes))


def _expected(standing: Standing, jobs: int) -> str:
    from scalebench.launch.model_check import estimate

    if not standing.left:
        return "all of it is done: the same command without --dry-run prints the answer"
    expected = estimate(standing.plan, standing.left, standing.most_to_come, jobs)
    return (
        f"{expected}, from a step of {expected.step_s * 1e3:.3f} ms measured here; communication, start-up and "
        "calibration come on top"
    )


def _table(standing: Standing) -> TerminalTable:
    plan = standing.plan
    runs, until = plan.sweep.runs, plan.study.until
    place = {str(strategy): number for number, strategy in enumerate(plan.study.strategies)}
    points = Counter[_Point]()
    for run in sorted(runs, key=lambda run: (run.execution, place[str(run.strategy)], run.workers)):
        points[_point_of(run)] += 1
    made = [run for run in standing.done if run.trial is None]
    done = Counter(map(_point_of, made))
    rows = []
    for point, count in points.items():
        strategy, workers, execution, engine, oversubscribed = point
        shards = plan.prepared.plans[workers]
        repetitions = f"{count} to {until.at_most}" if until else str(count)
        repetitions += f" ({done[point]} done)" * bool(done[point])
        mark = " (oversubscribed)" * oversubscribed
        values = (strategy, f"{workers}{mark}", execution, engine, repetitions, shards.steps(0), shards.batch_size)
        rows.append([str(value) for value in values])
    most = f" at least, {len(runs) + len(plan.sweep.further)} at most" if until else ""
    there = f", {len(made)} done" * bool(made)
    return TerminalTable(f"{plan.study.name}: {counted(len(runs), 'run')}{most}{there}", _COLUMNS, rows)


def _point_of(run: Run) -> _Point:
    from scalebench.launch.planning import is_oversubscribed

    return str(run.strategy), run.workers, run.execution, run.engine, is_oversubscribed(run)
