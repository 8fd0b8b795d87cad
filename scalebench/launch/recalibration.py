"""New times for finished virtual runs, from a new measurement or another calibration, mostly without training.

The arithmetic of most strategies does not depend on time: their runs are replayed, in seconds for a whole study. The
others (servers, asynchronous merges, rows that move between workers) are trained again. The new rows are further
attempts at the same runs; they are written at the end, so that an interrupted command changes nothing.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from scalebench.analysis.loading import Results, load
from scalebench.data.dataset import open_dataset
from scalebench.errors import ResultsError
from scalebench.launch.cost_model import at_the_speed_of, cost_model_for
from scalebench.launch.planning import StudyPlan
from scalebench.launch.reporter import Reporter
from scalebench.launch.study_run import StudyRun
from scalebench.pricing.machine import Machine
from scalebench.pricing.price import NotLockStepError
from scalebench.records.folder import CALIBRATION, STUDY
from scalebench.records.lock import study_lock
from scalebench.records.store import Store
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Run
from scalebench.system.atomic_write import write_whole
from scalebench.system.interruption import Interruption
from scalebench.system.parent_watch import start_forkserver
from scalebench.training.outcome import Outcome
from scalebench.virtual.engine import replay, replays
from scalebench.virtual.pool import Simulator, run_virtual
from scalebench.virtual.replay import Trace


@dataclass(frozen=True)
class Recalibrated:
    """Numbers of virtual runs that were replayed and trained again."""

    replayed: int
    trained: int


def recalibrate(plan: StudyPlan, folder: Path, reporter: Reporter, *, jobs: int) -> Recalibrated:
    """Charge the completed virtual runs in `folder` again, by `plan.study.calibration` or a new measurement.

    Raises:
        ResultsError: no virtual run is completed, or the folder cannot be read or written.
        DisturbedError: nothing could be measured beside other programs.
    """
    results = load(folder)
    known = results.completed.set_index("run_id")
    runs = [run for run in plan.sweep.simulated if run.run_id in known.index]
    if not runs:
        raise ResultsError(f"{folder} holds no completed virtual run of this study; `scalebench run` makes them")
    start_forkserver()
    with study_lock(folder), Interruption() as interruption, tempfile.TemporaryDirectory() as scratch:
        reporter.phase("calibration", 0)
        cost_model = cost_model_for(plan, runs, Path(scratch), note=reporter.note)
        references = results.completed.loc[results.completed["execution"] != "virtual", "reference_step_s"].dropna()
        cost_model = at_the_speed_of(plan.study, cost_model, references.tolist(), Path(scratch))
        reporter.phase("virtual workers, charged anew", len(runs))
        outcomes = {
            run.run_id: outcome for run in runs if (outcome := _replayed(run, plan, cost_model, results, known))
        }
        again = [run for run in runs if run.run_id not in outcomes]
        run_virtual(
            again,
            Simulator(cost_model, plan.prepared.folders, folder / "weights"),
            jobs=jobs,
            on_start=reporter.started,
            on_outcome=lambda run, outcome: outcomes.update({run.run_id: outcome}),
            stopping=interruption.asked,
        )
        if missing := [run.run_id for run in runs if run.run_id not in outcomes]:
            raise ResultsError(f"interrupted before {len(missing)} runs were charged anew: nothing was changed")
        with Store(folder) as store:
            study_run = StudyRun(plan, store, reporter, interruption)
            study_run.collect_provenance()
            if (Path(scratch) / CALIBRATION).exists():
                shutil.move(Path(scratch) / CALIBRATION, folder / CALIBRATION)
            _name_calibration(plan.study.calibration, folder)
            for run in runs:
                study_run.ended(run, outcomes[run.run_id])
    return Recalibrated(len(runs) - len(again), len(again))


def _name_calibration(given: Path | None, folder: Path) -> None:
    """Let study.yaml name the calibration that now charges the virtual runs, if it named another before."""
    study = load_study(folder / STUDY, {}, [])
    if given is None or study.calibration is None:
        return
    here = Path.cwd()
    named = given.relative_to(here) if given.is_relative_to(here) else given
    write_whole(folder / STUDY, dump_study(study.model_copy(update={"calibration": named})))


def _replayed(run: Run, plan: StudyPlan, cost_model: Machine, results: Results, known: pd.DataFrame) -> Outcome | None:
    """Replay the run with new times; None if it has to be trained, or sends other bytes than its row records."""
    if not replays(run):
        return None
    row, dataset = known.loc[run.run_id], open_dataset(plan.prepared.folders[run.workers])
    trace = _recorded(run, row, results)
    try:
        outcome = replay(run, dataset, cost_model, trace)
        steady = run.model_copy(update={"virtual": run.virtual.model_copy(update={"jitter": "none"})})
        if run.also_without_jitter:
            found = replay(steady, dataset, cost_model, trace)
            outcome.add_facts(train_s_no_jitter=max(report.train_s for report in found.workers))
    except (NotLockStepError, RuntimeError):  # RuntimeError: the strategy reads values of tensors
        return None
    if outcome.status != "completed":
        return None
    sent = sum(report.bytes_sent for report in outcome.workers) / run.workers
    same = outcome.workers[0].syncs == int(str(row["syncs"])) and math.isclose(
        sent, float(str(row["bytes_sent_per_worker"]))
    )
    return outcome if same else None


def _recorded(run: Run, row: Any, results: Results) -> Trace:
    """Losses (recorded as means over workers) and metrics of a completed run."""
    epochs = results.epochs[results.epochs["run_id"] == run.run_id].sort_values("epoch")
    losses = [None if pd.isna(loss) else float(loss) for loss in epochs["train_loss"]]
    evaluated = epochs.dropna(subset=["test_metric"])
    metrics = {
        int(epoch): float(metric) for epoch, metric in zip(evaluated["epoch"], evaluated["test_metric"], strict=True)
    }
    if not pd.isna(row["final_metric"]):
        metrics[run.epochs - 1] = float(str(row["final_metric"]))
    return Trace([losses] * run.workers, metrics)
