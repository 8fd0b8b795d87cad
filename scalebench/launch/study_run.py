"""Executes a study: native launches first, then the virtual runs; each row is on disk before the next run counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from scalebench.cache import cache_folder
from scalebench.errors import ModelError
from scalebench.launch import engines
from scalebench.launch.interruption import AbandonedError, Interruption
from scalebench.launch.lock import study_lock
from scalebench.launch.mpirun import launch
from scalebench.launch.planning import Plan, is_oversubscribed
from scalebench.launch.pool import run_virtual
from scalebench.launch.preparation import local_statistics
from scalebench.launch.resume import keep_study
from scalebench.launch.rows import rows_of
from scalebench.launch.scenery import read_calibration, scenery_for
from scalebench.models.registry import build_model
from scalebench.outcome import Outcome
from scalebench.records.progress import Planned, group_of, keep_planned
from scalebench.records.provenance import collect
from scalebench.records.store import Store
from scalebench.study.spec import Run
from scalebench.weights import load_weights

_PROVENANCE_COLUMNS = ("host_hash", "git_commit", "git_dirty", "packages_hash", "scheduler_job_id")


class Reporter(Protocol):
    """Whoever watches a study."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def phase(self, name: str, runs: int) -> None:
        """A group of `runs` runs, or a preparation (0), begins."""

    def started(self, run: Run) -> None: ...

    def ended(self, run: Run, outcome: Outcome) -> None: ...


@dataclass
class Tally:
    """How a study went. `interrupted` is the signal that ended it early, None if none did."""

    folder: Path
    done_before: int = 0
    completed: int = 0
    failed: list[tuple[Run, Outcome]] = field(default_factory=list)
    remaining: int = 0
    interrupted: int | None = None


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
    plan.prepared.notes += _check_model(plan)
    if study.calibration is not None:
        read_calibration(study.calibration)
    with study_lock(folder), Interruption() as interruption:
        keep_study(folder, study)
        with Store(folder) as store:
            if not only_failed:
                keep_planned(
                    folder,
                    [Planned(r.run_id, r.config_hash, group_of(r.execution, r.engine)) for r in plan.sweep.runs],
                )
            done = store.completed()
            todo = [run for run in plan.sweep.runs if (run.run_id, run.config_hash) not in done]
            tally = Tally(folder, done_before=len(plan.sweep.runs) - len(todo))
            if only_failed:
                failed = store.failed()
                todo = [run for run in todo if run.run_id in failed]
            todo = [run.model_copy(update={"attempt": store.next_attempt(run.run_id)}) for run in todo]
            with suppress(AbandonedError):
                _run(todo, plan, store, reporter, tally, interruption, jobs or engines.cores(), fail_fast)
            tally.interrupted = interruption.signum
            tally.remaining = len(todo) - tally.completed - len(tally.failed)
    return tally


def _run(
    todo: list[Run],
    plan: Plan,
    store: Store,
    reporter: Reporter,
    tally: Tally,
    interruption: Interruption,
    jobs: int,
    fail_fast: bool,
) -> None:
    for note in plan.notes:
        reporter.note(note)
    if not todo:
        return
    provenance = collect()
    store.keep_provenance(provenance)
    facts = {name: provenance.get(name) for name in _PROVENANCE_COLUMNS}
    keeper = _Keeper(store, reporter, tally, facts, interruption)
    folder, virtual = store.folder, [run for run in todo if run.execution == "virtual"]
    real = [run for run in todo if run.execution != "virtual"]

    def stopping() -> bool:
        return interruption.asked() or (fail_fast and bool(tally.failed))

    scenery = None
    if virtual:
        reporter.phase("calibration", 0)
        scenery = scenery_for(
            plan.study, plan.cluster, virtual, plan.prepared, folder=folder, cache=cache_folder("engines"),
            host=str(provenance["host_hash"]),
        )  # fmt: skip
    with interruption.runs_under_way():
        if real and not stopping():
            reporter.phase(f"{_listed(real)} processes", len(real))
            _launch(real, plan, folder, keeper, reporter.note, stopping)
        if scenery is not None and not stopping():
            reporter.phase("virtual workers", len(virtual))
            run_virtual(
                virtual,
                plan.prepared.folders,
                scenery,
                jobs=jobs,
                weights_folder=folder / "weights",
                on_start=keeper.started,
                on_outcome=keeper.ended,
                stopping=stopping,
            )


def _check_model(plan: Plan) -> list[str]:
    """Build the model once, so that a factory that fails or weights that do not fit are one line, not a row per run.

    The notes are what is odd about it.
    """
    import torch

    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    dtype = getattr(torch, study.dtype)
    model = build_model(study.model, dataset.input_shape, dataset.outputs, dataset.task, dtype, study.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if parameters == 0:
        raise ModelError(f"model {study.model} has no parameters to train")
    if study.init_weights is not None:
        load_weights(study.init_weights, parameters)
    statistics = any(buffer.is_floating_point() for buffer in model.buffers())
    return local_statistics(study) if statistics else []


class _Keeper:
    """Writes the row of each run as it ends."""

    def __init__(
        self,
        store: Store,
        reporter: Reporter,
        tally: Tally,
        provenance: dict[str, Any],
        interruption: Interruption,
    ) -> None:
        self._store, self._reporter, self._provenance = store, reporter, provenance
        self._interruption, self.tally = interruption, tally
        self._started: dict[str, str] = {}

    def started(self, run: Run) -> None:
        self._started[run.run_id] = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._reporter.started(run)

    def ended(self, run: Run, outcome: Outcome) -> None:
        begun = self._started.get(run.run_id) or datetime.now(UTC).isoformat(timespec="milliseconds")
        row, epochs = rows_of(
            run,
            outcome,
            attempt=run.attempt,
            oversubscribed=is_oversubscribed(run),
            started_utc=begun,
            provenance=self._provenance,
        )
        with self._interruption.shielded():
            self._store.append(row, epochs)
            if outcome.status == "completed":
                self.tally.completed += 1
            else:
                self.tally.failed.append((run, outcome))
        self._reporter.ended(run, outcome)


def _listed(runs: list[Run]) -> str:
    """The runs' engines: `mpi, horovod and gloo`."""
    *names, last = sorted({run.engine for run in runs}, key=engines.NAMES.index)
    return f"{', '.join(names)} and {last}" if names else last


def _launch(
    runs: list[Run],
    plan: Plan,
    folder: Path,
    keeper: _Keeper,
    log: Callable[[str], None],
    stopping: Callable[[], bool],
) -> None:
    """The launches of real processes; what these printed is kept if a run failed."""
    failed_before = len(keeper.tally.failed)
    logs = folder / "logs" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    launch(
        runs,
        plan.prepared.folders,
        ranks=max(run.workers for run in runs),
        work_dir=logs,
        weights_folder=folder / "weights",
        on_start=keeper.started,
        on_outcome=keeper.ended,
        log=log,
        stopping=stopping,
    )
    if len(keeper.tally.failed) == failed_before:
        shutil.rmtree(logs, ignore_errors=True)
