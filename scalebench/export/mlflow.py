"""Write results as MLflow's file store (`mlruns`), without MLflow.

    FOLDER/<experiment id>/meta.yaml                        the study
    FOLDER/<experiment id>/<run id>/meta.yaml               a run: name, status, start and end in ms since 1970
    FOLDER/<experiment id>/<run id>/params/<name>           one value
    FOLDER/<experiment id>/<run id>/metrics/<name>          lines of "timestamp value step"
    FOLDER/<experiment id>/<run id>/tags/<name>             one value

as `mlflow.store.tracking.file_store.FileStore` reads it. MLflow 2 opens it as it is; MLflow 3 wants
MLFLOW_ALLOW_FILE_STORE=true, or `mlflow migrate-filestore`. Identifiers are hashes of the names of study and run, so
that a repeated export replaces the earlier one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from scalebench.analysis import Results
from scalebench.errors import writing
from scalebench.records.schema import EpochRow, RunRow, kinds

_STATUS = {"completed": 3, "failed": 4, "diverged": 4, "timeout": 4, "interrupted": 5}  # FINISHED, FAILED, KILLED
_KEYS = ("run_id", "attempt", "epoch")
_LONGEST = 6000  # of a parameter; a tag may have 8000 characters
# Measured columns; all other columns but _TAGS are parameters.
_MEASURED = (
    *("paced_overrun", "optimizer_steps", "syncs", "collective_calls", "bytes_sent_per_worker", "train_s"),
    *("compute_s", "comm_s", "hidden_comm_s", "wait_s", "bubble_s", "straggler_factor", "data_s", "other_s", "eval_s"),
    *("final_train_loss", "final_metric", "final_train_metric", "best_metric", "time_to_target_s", "epochs_to_target"),
    *("peak_rss_mib", "peak_device_mib", "energy_j", "others_load", "reference_step_s"),
    *("train_s_no_jitter", "cost_core_hours", "cost_gpu_hours"),
)
_TAGS = (
    *("study", "config_hash", "attempt", "status", "error", "execution", "engine", "oversubscribed", "warmup"),
    *("worker_weights", "staleness_histogram", "lead_histogram", "started_utc", "host_hash", "git_commit"),
    *("git_dirty", "packages_hash", "scheduler_job_id", "provenance", "energy_source", "schema_version", "run_id"),
)


def write_mlflow(results: Results, folder: Path) -> Path:
    """Write the study as one experiment below `folder`, which may hold other experiments; return its folder.

    A run's columns become parameters (settings), metrics (measurements; per epoch with step = epoch) and tags (status,
    place). A metric of both tables (compute_s) has its total under its name and the epochs' values under `epoch/...`.
    Missing values are left out. Metrics are stamped start + training time.

    Raises:
        ResultsError: `folder` cannot be written.
    """
    name = str(results.runs["study"].iloc[-1])
    number = str(int(_digest(name)[:15], 16) + 10**17)  # eighteen digits, as MLflow's
    experiment = folder / number
    with writing(experiment, "name another place"):
        if experiment.exists():
            shutil.rmtree(experiment)
        experiment.mkdir(parents=True)
        epochs = dict(iter(results.epochs.groupby("run_id", sort=False)))
        nothing = results.epochs.iloc[:0]
        spans = [
            _write_run(experiment, name, run, epochs.get(run["run_id"], nothing))
            for run in results.runs.to_dict("records")
        ]
        facts = {
            "artifact_location": experiment.absolute().as_uri(),
            "creation_time": min(start for start, _ in spans),
            "experiment_id": number,
            "last_update_time": max(end for _, end in spans),
            "lifecycle_stage": "active",
            "name": name,
        }
        _write(experiment / "meta.yaml", yaml.safe_dump(facts))
        _write(experiment / "tags" / "scalebench.source", "scalebench export --mlflow-dir")
    return experiment


def _write_run(experiment: Path, study: str, run: dict[Hashable, Any], epochs: pd.DataFrame) -> tuple[int, int]:
    """Write one run; return its start and end in milliseconds since 1970."""
    identity = _digest(f"{study}\n{run['run_id']}")
    folder = experiment / identity
    start = _milliseconds(run["started_utc"])
    end = start + _later(run["train_s"])
    facts = {
        "artifact_uri": f"{folder.absolute().as_uri()}/artifacts",
        "end_time": end,
        "entry_point_name": "",
        "experiment_id": experiment.name,
        "lifecycle_stage": "active",
        "run_id": identity,
        "run_name": str(run["run_id"]),
        "run_uuid": identity,
        "source_name": "",
        "source_type": 4,
        "source_version": "",
        "start_time": start,
        "status": _STATUS[str(run["status"])],
        "tags": [],
        "user_id": "",
    }
    _write(folder / "meta.yaml", yaml.safe_dump(facts))
    (folder / "artifacts").mkdir()
    held = {str(key): value for key, value in run.items() if not pd.isna(value)}
    for key in (key for key in held if key not in (*_MEASURED, *_TAGS)):
        _write(folder / "params" / key, _text(held[key]))
    for key in (key for key in _TAGS if key in held):
        _write(folder / "tags" / f"scalebench.{key}", _text(held[key]))
    tags = {"mlflow.runName": run["run_id"], "mlflow.source.name": "scalebench", "mlflow.source.type": "LOCAL"}
    if "git_commit" in held:
        tags["mlflow.source.git.commit"] = held["git_commit"]
    for key, value in tags.items():
        _write(folder / "tags" / key, str(value))
    for key in (key for key in _MEASURED if key in held):
        _write(folder / "metrics" / key, f"{end} {float(held[key])!r} 0\n")
    _write_epochs(folder / "metrics", start, epochs)
    return start, end


def _write_epochs(folder: Path, start: int, epochs: pd.DataFrame) -> None:
    measured = [key for key, kind in kinds(EpochRow).items() if key not in _KEYS and kind != "text"]
    stamps = [start + _later(elapsed) for elapsed in epochs["elapsed_s"]]
    for key in measured:
        lines = [
            f"{stamp} {float(value)!r} {epoch}\n"
            for stamp, value, epoch in zip(stamps, epochs[key], epochs["epoch"], strict=True)
            if not pd.isna(value)
        ]
        if lines:
            _write(folder / (f"epoch/{key}" if key in RunRow.model_fields else key), "".join(lines))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _text(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _later(seconds: Any) -> int:
    return 0 if pd.isna(seconds) else round(1000 * float(seconds))


def _milliseconds(started_utc: object) -> int:
    """Return milliseconds since 1970; 0 if unknown."""
    moment = pd.to_datetime(str(started_utc), utc=True, errors="coerce")
    return 0 if pd.isna(moment) else round(1000 * moment.timestamp())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
