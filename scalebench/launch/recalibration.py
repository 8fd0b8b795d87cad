"""New times for finished virtual runs: by a new measurement, another calibration, cluster or jitter.

The arithmetic of most strategies does not depend on time: their recorded schedules are
priced again, without training. The others (servers, asynchronous merges, rows that move
between workers, groups of another size) are trained again. Values that tuning chose are
kept, and so are the rows of its trials.

By other costs of the same machine the new rows are further attempts at the same runs.
Another cluster or jitter makes another study of the folder: its study.yaml says so, its
earlier files are kept in `earlier/`. Nothing is written before all runs have their
times, so that an interrupted command changes nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis.loading import Results, load
from scalebench.calibration import calibration_file, charging, cost_sources
from scalebench.errors import ResultsError, writing
from scalebench.formatting import counted
from scalebench.launch import calibrating, trials
from scalebench.launch.planning import StudyPlan, plan_study
from scalebench.launch.study_run import StudyRun
from scalebench.launch.work import Ended, Reporter, Timed, next_work
from scalebench.pricing.machine import Machine
from scalebench.records import folder as files
from scalebench.records import lock, study_file
from scalebench.records.store import Store, drop_simulated
from scalebench.study.cell import Cell
from scalebench.study.spec import Run, Study
from scalebench.system.interruption import Interruption
from scalebench.training.outcome import Evaluation, Outcome
from scalebench.virtual.lock_step import Trace, is_lock_step
from scalebench.virtual.pool import Simulator, run_virtual

# folder with the files before another cluster or jitter, numbered from 1
_EARLIER = "earlier"


@dataclass(frozen=True)
class Recalibrated:
    """Numbers of virtual runs that were replayed and trained again, and the folder of the rows before."""

    replayed: int
    trained: int
    earlier: Path | None = None


def plan_charged_by(study: Study, calibration: Path | None) -> StudyPlan:
    """Return the plan of `study`, whose virtual runs are to be charged by `calibration`, by its own or measured anew.

    Raises:
        ClusterError, ResultsError: `calibration` has not what charges them.
    """
    plan = plan_study(study)
    if calibration is not None:
        given = replace(
            plan, study=study.model_copy(update={"calibration": calibration})
        )
        cost_sources.check_given_calibration(
            calibrating.request_of(given, given.sweep.simulated)
        )
    # of which the file has nothing
    elif study.calibration is not None and plan.cluster.compute != "this-machine":
        plan = replace(plan, study=study.model_copy(update={"calibration": None}))
    return plan


def recalibrate(
    plan: StudyPlan,
    folder: Path,
    reporter: Reporter,
    *,
    jobs: int,
    before: StudyPlan | None = None,
    calibration: Path | None = None,
    require_quiet: bool = False,
) -> Recalibrated:
    """Charge the completed virtual runs in `folder` again: by `calibration`, that of the study, or a new measurement.

    `before` is the plan of the study in `folder` if `plan` has another cluster, step
    time or jitter: its calibration is used again unless another one is given, and
    study.yaml becomes that of `plan`.

    Raises:
        ResultsError: no virtual run is completed, or the folder cannot be read or written.
        DisturbedError: other programs disturbed what is required to be quiet.
    """
    results = load(folder)
    # tuned values are kept, though another machine might choose others
    plan = trials.with_chosen(plan, results.trials)
    before = before and trials.with_chosen(before, results.trials)
    pairs = _pairs(plan, before or plan, results)
    runs = _due(plan.only({run.run_id for run, _ in pairs}))
    charged = _charged_by(plan, calibration, require_quiet=require_quiet)
    with (
        lock.folder_lock(folder),
        Interruption() as interruption,
        # a calibration replaces the folder's only once all runs have their times
        tempfile.TemporaryDirectory() as scratch,
    ):
        reporter.phase("calibration", 0)
        machine = _machine(
            charged, runs, results, Path(scratch), reporter, keeps=before is not None
        )
        reporter.phase("virtual workers, charged anew", len(runs))
        # once for all runs: a filter for each would read the table as often
        epochs = dict(list(results.epochs.sort_values("epoch").groupby("run_id")))
        traces = {
            run.run_id: _trace(run, row, epochs.get(row.name, results.epochs[:0]))
            for run, row in pairs
            # arithmetic that depends on time, or on other batches, is done again
            if is_lock_step(run) and _same_batches(plan, before, run)
        }
        simulator = Simulator(
            machine, plan.prepared.folders, folder / "weights", traces=traces
        )
        outcomes = _outcomes(runs, simulator, jobs, reporter, interruption)
        # rows of another cluster are no further attempts at these runs
        earlier = _keep_earlier(folder) if before is not None else None
        if before is not None:
            drop_simulated(folder)
        study_file.replace_study(folder, plan.study)
        _replace_calibration(folder, Path(scratch), lapses=before is not None)
        _write(plan, folder, reporter, interruption, runs, outcomes)
    # nothing was evaluated
    replayed = sum(outcome.eval_s == 0.0 for outcome in outcomes.values())
    return Recalibrated(replayed, len(runs) - replayed, earlier)


def _charged_by(
    plan: StudyPlan, calibration: Path | None, *, require_quiet: bool
) -> StudyPlan:
    """Return `plan` with options of the command in place of those that its study does not state."""
    options = {
        "require_quiet": require_quiet or plan.study.require_quiet,
        "calibration": calibration or plan.study.calibration,
    }
    return replace(plan, study=plan.study.model_copy(update=options))


def _replace_calibration(folder: Path, scratch: Path, *, lapses: bool) -> None:
    """Move a new calibration in `scratch` to `folder`, whose own is also removed if it `lapses`."""
    measured = scratch / files.CALIBRATION
    if lapses or measured.exists():
        (folder / files.CALIBRATION).unlink(missing_ok=True)
    if measured.exists():
        shutil.move(measured, folder / files.CALIBRATION)


def _outcomes(
    runs: Sequence[Run],
    simulator: Simulator,
    jobs: int,
    reporter: Reporter,
    interruption: Interruption,
) -> dict[str, Outcome]:
    """Return the outcomes of all `runs` by their ids.

    Raises:
        ResultsError: one failed, or the command was interrupted.
    """
    outcomes: dict[str, Outcome] = {}
    run_virtual(
        runs,
        simulator,
        jobs=jobs,
        on_start=reporter.started,
        on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
        stopping=interruption.asked,
    )
    if missing := [run.run_id for run in runs if run.run_id not in outcomes]:
        runs_left = counted(len(missing), "run")
        raise ResultsError(
            f"interrupted with {runs_left} not yet charged anew: nothing was changed"
        )
    if failed := [
        outcome for outcome in outcomes.values() if outcome.status == "failed"
    ]:
        raise ResultsError(
            f"{failed[0].run_id} failed, as it had not before: {failed[0].error}; nothing was changed"
        )
    return outcomes


def _pairs(
    plan: StudyPlan, before: StudyPlan, results: Results
) -> list[tuple[Run, Any]]:
    """Return each simulated run of `plan` with the completed row of its counterpart in the study `before`.

    Raises:
        ResultsError: there is none.
    """
    rows = results.completed.set_index("run_id")
    known = {
        (Cell.of(run), run.repetition): run.run_id for run in before.sweep.simulated
    }
    pairs = [
        (run, rows.loc[run_id])
        for run in plan.sweep.simulated
        if (run_id := known.get((Cell.of(run), run.repetition))) in rows.index
    ]
    if not pairs:
        raise ResultsError(
            f"{results.folder} holds no completed virtual run of this study; `scalebench run` makes them"
        )
    return pairs


def _due(plan: StudyPlan) -> Sequence[Run]:
    """Return the runs of a plan that has virtual ones alone, as if none of them had ended."""
    work = next_work(plan, Ended({}))
    assert isinstance(work, Timed)
    return work.runs


def _same_batches(plan: StudyPlan, before: StudyPlan | None, run: Run) -> bool:
    """Return True if the workers of `run` take the batches that they took before."""
    if before is None:
        return True
    now, then = (each.prepared.plan_of(run).batch_sizes(0) for each in (plan, before))
    return np.array_equal(now, then)


def _machine(
    plan: StudyPlan,
    runs: Sequence[Run],
    results: Results,
    scratch: Path,
    reporter: Reporter,
    *,
    keeps: bool,
) -> Machine:
    """Measure, or read, what charges `runs`; its calibration is in `scratch`. If it `keeps`, the folder's is used."""
    study, kept = plan.study, results.folder / files.CALIBRATION
    keeps = keeps and study.calibration is None and kept.exists()
    # step times of other clusters are stated in their file
    if keeps and plan.cluster.compute == "this-machine":
        calibration = calibration_file.read_calibration(kept)
        if study.device_step_time is not None:
            # a stated step time replaces the measured ones; costs of engines stay
            calibration = calibration.model_copy(
                update={"tables": [], "operations": {}}
            )
        calibration.save(scratch / files.CALIBRATION)
    return charging.machine_for(
        calibrating.request_of(plan, runs),
        scratch,
        charged=keeps,
        anew=True,
        note=reporter.note,
    )


def _trace(run: Run, row: Any, epochs: pd.DataFrame) -> Trace:
    """Return losses (recorded as means over workers) and evaluations of a completed run, by its rows."""
    losses = [None if np.isnan(loss) else float(loss) for loss in epochs["train_loss"]]
    last = run.epochs - 1
    found = epochs[epochs["test_metric"].notna() & (epochs["epoch"] != last)]
    evaluated = [
        Evaluation(int(epoch), at, metric)
        for epoch, at, metric in zip(
            found["epoch"], found["elapsed_s"], found["test_metric"], strict=True
        )
    ]
    if not np.isnan(row["final_metric"]):
        train = (
            None if np.isnan(row["final_train_metric"]) else row["final_train_metric"]
        )
        evaluated.append(Evaluation(last, row["train_s"], row["final_metric"], train))
    sent = int(row["syncs"]), float(row["bytes_sent_per_worker"])
    arithmetic = None if pd.isna(row["arithmetic"]) else str(row["arithmetic"])
    return Trace(
        # rows hold the mean over workers, which each of them stands for
        [losses] * run.workers,
        evaluated,
        int(row["workers_per_node"]),
        arithmetic,
        sent,
    )


def _keep_earlier(folder: Path) -> Path:
    """Copy the study in `folder` as it is to a numbered folder in it, which every command reads."""
    place = next(
        place
        for number in count(1)
        if not (place := folder / _EARLIER / str(number)).exists()
    )
    with writing(place, "nothing was changed"):
        place.mkdir(parents=True)
        for name in (
            files.RUNS,
            files.EPOCHS,
            files.STUDY,
            files.CALIBRATION,
            files.PLANNED,
        ):
            if (folder / name).exists():
                shutil.copy(folder / name, place / name)
        shutil.copytree(
            folder / files.PROVENANCE, place / files.PROVENANCE, dirs_exist_ok=True
        )
    return place


def _write(
    plan: StudyPlan,
    folder: Path,
    reporter: Reporter,
    interruption: Interruption,
    runs: Sequence[Run],
    outcomes: dict[str, Outcome],
) -> None:
    with Store(folder) as store:
        study_run = StudyRun(plan, store, reporter, interruption)
        # that of this command: it is what made the new times
        study_run.collect_provenance()
        study_run.keep_plan()
        numbered = {run.run_id: run for run in study_run.plan.sweep.simulated}
        for run in runs:
            study_run.ended(numbered[run.run_id], outcomes[run.run_id])
