"""Executes a study: native launches first, then the virtual runs; each row is on disk before the next run counts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scalebench.errors import DisturbedError
from scalebench.launch import engines
from scalebench.launch.conduct import Conduct, keep_plan
from scalebench.launch.cost_model import at_the_speed_of, given_calibration, scenery_for
from scalebench.launch.interruption import AbandonedError, Interruption
from scalebench.launch.keeping import Keeper, Reporter, Tally
from scalebench.launch.lock import study_lock
from scalebench.launch.model_check import look_at_model
from scalebench.launch.planning import Plan
from scalebench.launch.resume import keep_study
from scalebench.launch.stopping_rule import StoppingRule, together
from scalebench.launch.sweep import is_virtual
from scalebench.launch.traffic import TrafficCheck
from scalebench.records.provenance import collect
from scalebench.records.store import Store
from scalebench.study.spec import Until
from scalebench.system.background_load import BackgroundLoad, disturbed
from scalebench.system.cache import cache_folder
from scalebench.system.parent_watch import start_forkserver
from scalebench.virtual.engine import CostModel

__all__ = ["Reporter", "Tally", "run_study"]

_LOOK_S = 0.1  # at what others do, before anything is measured


def run_study(
    plan: Plan,
    output: Path,
    reporter: Reporter,
    *,
    jobs: int | None = None,
    fail_fast: bool = False,
    only_failed: bool = False,
) -> Tally:
    """Run what is not done yet and keep it in `output`/<study>; failed runs are rows, not exceptions.

    SIGINT, SIGTERM and SIGUSR1 end it early, as `launch.interruption` says; so does the first failed run if
    `fail_fast`. With `only_failed`, runs that were never tried are left.

    Raises:
        ResultsError: the folder cannot be written, is being written by another command, or holds another study of
            this name.
    """
    study, folder = plan.study, output / plan.study.name
    others = _cores_elsewhere() if measures(plan) else 0.0
    if plan.sweep.of("virtual"):
        start_forkserver()
    plan.prepared.notes += look_at_model(plan)
    given_calibration(study, plan.cluster)
    with study_lock(folder), Interruption() as interruption:
        keep_study(folder, study)
        with Store(folder) as store:
            plan = replace(plan, sweep=plan.sweep.continued(store.numbered()))
            replication = _replication(plan, store.completed())
            tally = Tally(folder, done_before=len(replication.planned()) - len(replication.left()))
            if only_failed:
                replication = replication.of(store.failed())
            else:
                keep_plan(folder, replication)
            notes = [*plan.notes, *_noise(others)] if replication.left() else plan.notes
            notes = [
                *(f"what a command that was killed left half-written is now in {p}" for p in store.set_aside),
                *notes,
            ]
            for note in notes:
                reporter.note(note)
            if replication.left():
                provenance = collect()
                provenance["provenance"] = store.keep_provenance(provenance)
                keeper = Keeper(store, reporter, tally, provenance, interruption, replication, TrafficCheck(plan))

                def stopping() -> bool:
                    return interruption.asked() or (fail_fast and bool(tally.failed))

                conduct = Conduct(plan, replication, folder, keeper, reporter, stopping, fail_fast=fail_fast)
                with suppress(AbandonedError):
                    charged = any(is_virtual(run_id) for run_id, _ in store.completed())
                    cost_model = _cost_model(plan, conduct, folder, charged, reporter, str(provenance["host_hash"]))
                    with interruption.runs_under_way():
                        conduct.real()
                        if cost_model is not None:
                            if not charged:
                                cost_model = at_the_speed_of(study, cost_model, keeper.references(), folder)
                            conduct.virtual(cost_model, jobs or engines.cores())
            tally.interrupted = interruption.signum
            tally.remaining = len(replication.left())
            for note in _too_wide(replication, study.until):
                reporter.note(note)
    return tally


def _cost_model(
    plan: Plan, conduct: Conduct, folder: Path, charged: bool, reporter: Reporter, host: str
) -> CostModel | None:
    """What virtual runs are charged by, measured now or before; None if none is left. `charged`: some were already."""
    if not conduct.left(virtual=True):
        return None
    try:
        return _measured_scenery(plan, folder, charged, reporter, host)
    except DisturbedError as error:
        reporter.note(f"nothing is simulated: {error}")
        return None


def _measured_scenery(plan: Plan, folder: Path, charged: bool, reporter: Reporter, host: str) -> CostModel:
    if plan.cluster.compute == "this-machine":  # of others nothing is measured: their step times are stated
        reporter.phase("calibration", 0)
    return scenery_for(
        plan.study, plan.cluster, plan.sweep.of("virtual"), plan.prepared,
        folder=folder, cache=cache_folder("engines"), host=host, charged=charged, note=reporter.note,
    )  # fmt: skip


def measures(plan: Plan) -> bool:
    """Whether any time is measured for the study: by a real run, or by a calibration that nobody gave or stated."""
    study = plan.study
    given = study.calibration is not None or study.device_step_time is not None
    return len(plan.sweep.runs) > len(plan.sweep.of("virtual")) or (
        plan.cluster.compute == "this-machine" and not given
    )


def _cores_elsewhere() -> float:
    background = BackgroundLoad()
    time.sleep(_LOOK_S)
    return background.cores()


def _noise(others: float) -> list[str]:
    """What is wrong with times that are measured while others keep `others` cores busy."""
    if not disturbed(others):
        return []
    return [
        f"other programs keep {others:.1f} of {engines.cores()} cores busy: "
        "times measured now are not those of a quiet machine"
    ]


def _too_wide(replication: StoppingRule, until: Until | None) -> list[str]:
    """Which points are not known as well as asked, once no run is left."""
    wide = [] if replication.left() else replication.wide()
    if until is None or not wide:
        return []
    return [
        f"{len(wide)} point{'s are' if len(wide) > 1 else ' is'} still wider than {100 * until.ci_width:.3g} % of the "
        f"time: {together(wide)}"
    ]


def _replication(plan: Plan, done: Mapping[tuple[str, str], float | None]) -> StoppingRule:
    """What the study consists of, with the training times of those of its runs that are `done`."""
    runs, further = plan.sweep.runs, plan.sweep.further
    known = ((run.run_id, run.config_hash) for run in (*runs, *further))
    return StoppingRule(runs, further, plan.study.until, {key[0]: done[key] for key in known if key in done})
