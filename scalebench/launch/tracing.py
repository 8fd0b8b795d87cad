"""Executes one short run, virtual or real, and returns its timeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from scalebench.calibration.charging import machine_for
from scalebench.comm.engines import named
from scalebench.comm.launchers import using
from scalebench.data.dataset import open_dataset
from scalebench.errors import RunError
from scalebench.launch import calibrating, model_check, real_runs, sweep, traffic
from scalebench.launch.planning import StudyPlan
from scalebench.records import provenance, rows
from scalebench.study.spec import Run
from scalebench.training.outcome import (
    Lane,
    Outcome,
    Timeline,
    read_horovod,
    timeline_from,
)
from scalebench.virtual.engine import simulate


def trace(plan: StudyPlan, folder: Path) -> Timeline:
    """Execute the only run of `plan` and keep every lap; calibration and logs go to `folder`.

    Raises:
        StudyError: the plan has several runs.
        RunError: the run did not complete.
    """
    run = traffic.only_run(plan).model_copy(update={"trace": True})
    model_check.look_at_model(plan)
    lanes: list[Lane] = []
    if run.is_virtual:
        machine = machine_for(calibrating.request_of(plan, [run]), folder)
        outcome, _ = simulate(
            run, open_dataset(plan.prepared.folders[run.workers]), machine
        )
    else:
        # Horovod reads the variable when it starts
        with _timeline_of_engine(run, folder) as path:
            outcome = _execute(run, plan, folder)
        if path is not None and path.exists() and outcome.status == "completed":
            lanes = read_horovod(path, began_unix_s=outcome.facts.began_unix_s)
    if outcome.status != "completed":
        happened = {"timeout": "ran out of time", "interrupted": "was interrupted"}.get(
            outcome.status, outcome.status
        )
        raise RunError(f"the run {happened}: {outcome.error}")
    overrun = max(
        (worker.paced_overrun or 0.0 for worker in outcome.workers), default=0.0
    )
    outcome.add_facts(
        oversubscribed=sweep.is_oversubscribed(run, plan.allocation)
        or overrun > rows.PACED_OVERRUN_LIMIT
    )
    timeline = timeline_from(run, outcome)
    # it can hold the path of a user's own model or cluster
    about = provenance.redact(timeline.about, names=False)
    return replace(timeline, about=about, lanes=timeline.lanes + lanes)


def _execute(run: Run, plan: StudyPlan, folder: Path) -> Outcome:
    outcomes: list[Outcome] = []
    runs = real_runs.RealRuns(
        plan.prepared.folders,
        ranks=run.workers,
        work_dir=folder / "logs",
        on_start=lambda run: None,
        on_outcome=lambda run, outcome: outcomes.append(outcome),
        log=lambda text: None,
    )
    with using(plan.study.launcher):
        runs.launch([run])
    return outcomes[0]


@contextmanager
def _timeline_of_engine(run: Run, folder: Path) -> Iterator[Path | None]:
    """Ask the engine for a timeline of its own, if it writes one, unless the user has done so."""
    variable = named(run.engine).timeline_variable
    stated = os.environ.get(variable)
    if not variable or run.workers == 1 or stated:
        yield Path(stated) if stated else None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "horovod-timeline.json").absolute()
    # one of an earlier trace would be shown for this run
    path.unlink(missing_ok=True)
    os.environ[variable] = str(path)
    try:
        yield path
    finally:
        del os.environ[variable]
