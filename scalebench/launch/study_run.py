"""Executes a study: native launches first, then the virtual runs; each row is on disk before the next run counts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from scalebench.cache import cache_folder
from scalebench.errors import ModelError, ResultsError
from scalebench.launch import engines
from scalebench.launch.mpirun import launch
from scalebench.launch.planning import Plan, is_oversubscribed
from scalebench.launch.pool import run_virtual
from scalebench.launch.rows import rows_of
from scalebench.launch.scenery import read_calibration, scenery_for
from scalebench.models.registry import build_model
from scalebench.outcome import Outcome
from scalebench.records.provenance import collect
from scalebench.records.store import Store
from scalebench.study.load import dump_study, load_study
from scalebench.study.spec import Run, Study
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
    """How a study went."""

    folder: Path
    done_before: int = 0
    completed: int = 0
    failed: list[tuple[Run, Outcome]] = field(default_factory=list)


def run_study(plan: Plan, output: Path, reporter: Reporter, *, jobs: int | None = None) -> Tally:
    """Run what is not done yet and keep it in `output`/<study>; failed runs are rows, not exceptions.

    Raises:
        ResultsError: the folder cannot be written, or holds another study of this name.
    """
    study = plan.study
    _check_model(plan)
    if study.calibration is not None:
        read_calibration(study.calibration)
    folder = output / study.name
    _check_same_study(folder, study)
    with _open_store(folder) as store:
        for note in plan.notes:
            reporter.note(note)
        done = store.completed()
        todo = [run for run in plan.sweep.runs if (run.run_id, run.config_hash) not in done]
        todo = [run.model_copy(update={"attempt": store.next_attempt(run.run_id)}) for run in todo]
        tally = Tally(folder, done_before=len(plan.sweep.runs) - len(todo))
        if not todo:
            return tally
        provenance = collect()
        store.keep_provenance(provenance)
        keeper = _Keeper(store, reporter, tally, {name: provenance.get(name) for name in _PROVENANCE_COLUMNS})
        virtual = [run for run in todo if run.execution == "virtual"]
        scenery = None
        if virtual:
            reporter.phase("calibration", 0)
            scenery = scenery_for(
                study, plan.cluster, virtual, plan.prepared, folder=folder, cache=cache_folder("engines"),
                host=str(provenance["host_hash"]),
            )  # fmt: skip
        for engine in dict.fromkeys(run.engine for run in todo if run.execution != "virtual"):
            runs = [run for run in todo if run.engine == engine and run.execution != "virtual"]
            reporter.phase(f"{engine} processes", len(runs))
            _launch(engine, runs, plan, folder, keeper, reporter.note)
        if virtual and scenery is not None:
            reporter.phase("virtual workers", len(virtual))
            run_virtual(
                virtual,
                plan.prepared.folders,
                scenery,
                jobs=jobs or engines.cores(),
                weights_folder=folder / "weights",
                on_start=keeper.started,
                on_outcome=keeper.ended,
            )
    return tally


def _check_model(plan: Plan) -> None:
    """Build the model once, so that a factory that fails or weights that do not fit are one line, not a row per run."""
    import torch

    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    dtype = getattr(torch, study.dtype)
    model = build_model(study.model, dataset.input_shape, dataset.outputs, dataset.task, dtype, study.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if parameters == 0:
        raise ModelError(f"model {study.model} has no parameters to train")
    if study.init_weights is not None:
        load_weights(study.init_weights, parameters)


class _Keeper:
    """Writes the row of each run as it ends."""

    def __init__(self, store: Store, reporter: Reporter, tally: Tally, provenance: dict[str, Any]) -> None:
        self._store, self._reporter, self._provenance = store, reporter, provenance
        self.tally = tally
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
        self._store.append(row, epochs)
        if outcome.status == "completed":
            self.tally.completed += 1
        else:
            self.tally.failed.append((run, outcome))
        self._reporter.ended(run, outcome)


def _launch(
    engine: str, runs: list[Run], plan: Plan, folder: Path, keeper: _Keeper, log: Callable[[str], None]
) -> None:
    """One engine's launches; what their processes printed is kept if a run failed."""
    failed_before = len(keeper.tally.failed)
    logs = folder / "logs" / datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    launch(
        engine,
        runs,
        plan.prepared.folders,
        ranks=max(run.workers for run in runs),
        work_dir=logs,
        weights_folder=folder / "weights",
        on_start=keeper.started,
        on_outcome=keeper.ended,
        log=log,
    )
    if len(keeper.tally.failed) == failed_before:
        shutil.rmtree(logs, ignore_errors=True)


def _open_store(folder: Path) -> Store:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(
            f"cannot write results to {folder}: {error.strerror}; choose another folder with --output"
        ) from None
    return Store(folder)


def _check_same_study(folder: Path, study: Study) -> None:
    """A folder holds one study: the same one goes on, a changed one is refused with what changed."""
    path = folder / "study.yaml"
    text = dump_study(study)
    if path.exists():
        before, now = load_study(path, {}, []).model_dump(mode="json"), study.model_dump(mode="json")
        changed = [
            f"{key} was {before[key]}, is {now[key]}"
            for key in now
            if key not in _MAY_CHANGE and before[key] != now[key]
        ]
        if changed:
            raise ResultsError(
                f"{folder} holds another study of this name ({'; '.join(changed[:4])}); "
                "use --name or --output for the new one, or delete the old one"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultsError(
            f"cannot write results to {folder}: {error.strerror}; choose another folder with --output"
        ) from None


# What a study may change and still be the same: more points are added, none of the old ones means something else.
_MAY_CHANGE = {"description", "workers", "strategies", "repetitions", "time_limit_s", "save_weights", "calibration"}
