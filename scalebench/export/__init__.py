"""Records in the formats of other tools: JSON, Parquet, MLflow's file store, and Chrome's traces.

JSON is strict (RFC 8259) and exact, one row per line; Parquet has meanings and units in
its schema and needs pyarrow.

MLflow's file store (`mlruns`) is written without MLflow:

    FOLDER/<experiment id>/meta.yaml                        the study
    FOLDER/<experiment id>/<run id>/meta.yaml               a run: name, status, start and end in ms since 1970
    FOLDER/<experiment id>/<run id>/params/<name>           one value
    FOLDER/<experiment id>/<run id>/metrics/<name>          lines of "timestamp value step"
    FOLDER/<experiment id>/<run id>/tags/<name>             one value

as `mlflow.store.tracking.file_store.FileStore` reads it. MLflow 2 opens it as it is;
MLflow 3 wants MLFLOW_ALLOW_FILE_STORE=true, or `mlflow migrate-filestore`. Identifiers
are hashes of the names of study and run, so that a repeated export replaces the earlier
one.

A trace opens in ui.perfetto.dev and chrome://tracing. Viewers count in whole
nanoseconds and drop an event that overlaps the next one of its lane by one: times are
rounded, and durations are differences of rounded times, so that adjacent laps stay
adjacent. Shorter laps, as in Horovod's own timeline (microseconds), are left out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel

from scalebench.analysis import Results, cells, ratios
from scalebench.errors import UsageError, writing
from scalebench.records.schema import SCHEMA_VERSION, Doc, EpochRow, RunRow, kinds
from scalebench.system.file_access import atomic_file, open_own
from scalebench.training.outcome import Timeline

if TYPE_CHECKING:
    import pyarrow as pa

# Nullable types of a column by the types of its values.
_KINDS: dict[Any, set[type]] = {
    "boolean": {bool, np.bool_},
    "Int64": {int, np.int64},
    "float64": {float, np.float64},
}
FORMAT_VERSION = 1  # of the JSON file
# turned into text at a time, so that a large study does not lie in memory twice
_ROWS_AT_ONCE = 10_000
ADD_PARQUET = "pip install 'scalebench[parquet]'"
_OWN = {"label": Doc("the strategy with its options as written")}

_STATUS = {
    "completed": 3,
    "failed": 4,
    "diverged": 4,
    "timeout": 4,
    "interrupted": 5,
}  # FINISHED, FAILED, KILLED
_KEYS = ("run_id", "attempt", "epoch")
_LONGEST = 6000  # of a parameter; a tag may have 8000 characters
# Measured columns; all other columns but _TAGS are parameters.
_MEASURED = (
    "paced_overrun",
    "optimizer_steps",
    "syncs",
    "collective_calls",
    "bytes_sent_per_worker",
    "train_s",
    "compute_s",
    "comm_s",
    "hidden_comm_s",
    "wait_s",
    "bubble_s",
    "straggler_factor",
    "data_s",
    "other_s",
    "eval_s",
    "final_train_loss",
    "final_metric",
    "final_train_metric",
    "best_metric",
    "time_to_target_s",
    "epochs_to_target",
    "peak_rss_mib",
    "peak_device_mib",
    "energy_j",
    "others_load",
    "reference_step_s",
    "train_s_no_jitter",
    "cost_core_hours",
    "cost_gpu_hours",
)
_TAGS = (
    "study",
    "config_hash",
    "attempt",
    "status",
    "error",
    "execution",
    "engine",
    "oversubscribed",
    "warmup",
    "worker_weights",
    "staleness_histogram",
    "lead_histogram",
    "started_utc",
    "host_hash",
    "git_commit",
    "git_dirty",
    "packages_hash",
    "scheduler_job_id",
    "provenance",
    "energy_source",
    "schema_version",
    "run_id",
)

_PROCESS = 1  # 0 is the idle process of viewers


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """Return `runs`, `epochs` (latest attempts), `cells` (one row per cell) and `ratios` (one per cell and baseline).

    Texts are of type str and flags nullable, so that the type of a column does not
    depend on its values. `cells` has a column `target_reached` (true, false, missing
    without a target) beside `time_to_target_s`, as not every format holds its infinity.
    """
    summary = cells(results)
    time = summary["time_to_target_s"].astype("float64")
    # JSON and Parquet readers may lack infinity, which stands for never.
    summary["target_reached"] = pd.Series(np.isfinite(time), dtype="boolean").mask(
        time.isna()
    )
    found = {
        "runs": results.runs,
        "epochs": results.epochs,
        "cells": summary,
        "ratios": ratios(results),
    }
    return {name: _typed(table) for name, table in found.items()}


def columns_of(name: str) -> dict[str, Doc]:
    """Meaning and unit of the columns of `runs` or `epochs`; the other tables are described in docs/export.md."""
    row_types: dict[str, type[BaseModel]] = {"runs": RunRow, "epochs": EpochRow}
    fields = row_types[name].model_fields if name in row_types else {}
    docs = {
        key: item
        for key, field in fields.items()
        for item in field.metadata
        if isinstance(item, Doc)
    }
    return docs | _OWN if name == "runs" else docs


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """Give columns of Python objects the type of their values; an empty one counts as text."""
    objects = [
        name for name in table if pd.api.types.is_object_dtype(table[name].dtype)
    ]
    return table.astype({name: _kind(table[name]) for name in objects})


def _kind(column: pd.Series) -> Any:
    # pandas takes a column with missing values for one of objects.
    held = set(map(type, column.dropna()))
    for dtype, types in _KINDS.items():
        if held and held <= types:
            return dtype
    return "str"


def write_json(results: Results, file: Path) -> Path:
    """Write `results` to `file` atomically.

    An object with `format` ("scalebench-results"), `format_version`, `schema_version`
    of the rows, `study` (study.yaml), `notes`, `columns` (meaning and unit by table and
    column), then the tables `runs`, `epochs`, `cells` and `ratios`, each a list of
    objects, one per row. Numbers round-trip exactly; missing and non-finite values are
    null.

    Raises:
        ResultsError: `file` cannot be written.
    """
    with writing(file, "name another place"), atomic_file(file) as stream:
        stream.writelines(json_text(results))
    return file


def json_text(results: Results) -> Iterator[str]:
    """Yield the content of `write_json` in pieces."""
    found = tables(results)
    meanings = {name: columns_of(name) for name in found}
    head: dict[str, Any] = {
        "format": "scalebench-results",
        "format_version": FORMAT_VERSION,
        "schema_version": SCHEMA_VERSION,
        "study": results.study,
        "notes": results.notes,
        "columns": {
            table: _described(columns) for table, columns in meanings.items() if columns
        },
    }
    # Piece by piece: json.dumps of a large study would hold all its text.
    yield "{\n"
    for key, value in head.items():
        yield f"{json.dumps(key)}: {_dumps(value)},\n"
    for number, (name, table) in enumerate(found.items()):
        yield f"{',' if number else ''}{json.dumps(name)}: ["
        yield from _rows(table)
        yield "]\n"
    yield "}\n"


def _described(columns: dict[str, Doc]) -> dict[str, dict[str, str | None]]:
    return {
        name: {"meaning": column.meaning, "unit": column.unit or None}
        for name, column in columns.items()
    }


def _rows(table: pd.DataFrame) -> Iterator[str]:
    # JSON allows no comma behind the last row.
    separator = "\n"
    for start in range(0, len(table), _ROWS_AT_ONCE):
        part = table.iloc[start : start + _ROWS_AT_ONCE]
        for row in _plain(part).to_dict("records"):
            yield separator + _dumps(row)
            separator = ",\n"


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Convert to Python numbers and texts, with None for missing and non-finite values."""
    # RFC 8259 has neither NaN nor infinity.
    plain = table.replace([np.inf, -np.inf], np.nan).astype(object)
    return plain.where(plain.notna(), None)


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=str)


def write_parquet(results: Results, folder: Path) -> list[Path]:
    """Write `folder`/runs.parquet, epochs.parquet, cells.parquet and ratios.parquet; each is replaced whole.

    A column's field metadata has its `unit` and `meaning`; the schema's metadata has
    `scalebench`, a JSON object with `schema_version` and `study`. Missing values are
    null; numbers are exact.

    Raises:
        UsageError: pyarrow is not installed.
        ResultsError: `folder` cannot be written.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(
            f"Parquet files need pyarrow; add it with: {ADD_PARQUET}"
        ) from None
    facts = json.dumps(
        {"schema_version": SCHEMA_VERSION, "study": results.study}, default=str
    )
    files = []
    for name, table in tables(results).items():
        file = folder / f"{name}.parquet"
        with writing(file, "name another place"), atomic_file(file) as stream:
            pq.write_table(
                _arrow(name, table, facts), stream.buffer, compression="zstd"
            )
        files.append(file)
    return files


def _arrow(name: str, table: pd.DataFrame, facts: str) -> pa.Table:
    import pyarrow as pa

    made = pa.Table.from_pandas(table, preserve_index=False)
    schema = made.schema
    for key, column in columns_of(name).items():
        # By place: a schema is replaced field by field.
        at = schema.get_field_index(key)
        schema = schema.set(
            at,
            schema.field(at).with_metadata(
                {"meaning": column.meaning, "unit": column.unit}
            ),
        )
    return made.cast(
        schema.with_metadata({**(schema.metadata or {}), b"scalebench": facts.encode()})
    )


def write_mlflow(results: Results, folder: Path) -> Path:
    """Write the study as one experiment below `folder`, which may hold other experiments; return its folder.

    A run's columns become parameters (settings), metrics (measurements; per epoch with
    step = epoch) and tags (status, place). A metric of both tables (compute_s) has its
    total under its name and the epochs' values under `epoch/...`. Missing values are
    left out. Metrics are stamped start + training time.

    Raises:
        ResultsError: `folder` cannot be written.
    """
    name = str(results.runs["study"].iloc[-1])
    number = str(int(_digest(name)[:15], 16) + 10**17)  # eighteen digits, as MLflow's
    experiment = folder / number
    with writing(experiment, "name another place"):
        # Runs that the study no longer has must not stay in it.
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
        _write(
            experiment / "tags" / "scalebench.source", "scalebench export --mlflow-dir"
        )
    return experiment


def _write_run(
    experiment: Path, study: str, run: dict[Hashable, Any], epochs: pd.DataFrame
) -> tuple[int, int]:
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
    # MLflow lists the folder, also where nothing is in it.
    (folder / "artifacts").mkdir()
    # MLflow has no missing values: a parameter is there or is not.
    held = {str(key): value for key, value in run.items() if not pd.isna(value)}
    for key in (key for key in held if key not in (*_MEASURED, *_TAGS)):
        _write(folder / "params" / key, _text(held[key]))
    for key in (key for key in _TAGS if key in held):
        _write(folder / "tags" / f"scalebench.{key}", _text(held[key]))
    tags = {
        "mlflow.runName": run["run_id"],
        "mlflow.source.name": "scalebench",
        "mlflow.source.type": "LOCAL",
    }
    if "git_commit" in held:
        tags["mlflow.source.git.commit"] = held["git_commit"]
    for key, value in tags.items():
        _write(folder / "tags" / key, str(value))
    for key in (key for key in _MEASURED if key in held):
        # Known at the end of a run; `repr` of a float gives all its digits.
        _write(folder / "metrics" / key, f"{end} {float(held[key])!r} 0\n")
    _write_epochs(folder / "metrics", start, epochs)
    return start, end


def _write_epochs(folder: Path, start: int, epochs: pd.DataFrame) -> None:
    measured = [
        key
        for key, kind in kinds(EpochRow).items()
        if key not in _KEYS and kind != "text"
    ]
    stamps = [start + _later(elapsed) for elapsed in epochs["elapsed_s"]]
    for key in measured:
        lines = [
            f"{stamp} {float(value)!r} {epoch}\n"
            for stamp, value, epoch in zip(
                stamps, epochs[key], epochs["epoch"], strict=True
            )
            if not pd.isna(value)
        ]
        if lines:
            _write(
                # Two series under one name would be drawn as one.
                folder / (f"epoch/{key}" if key in RunRow.model_fields else key),
                "".join(lines),
            )


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


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write `timeline` to `path` as JSON trace events: a lane is a thread, a lap a complete event in microseconds.

    Raises:
        ResultsError: the file cannot be written.
    """
    events = [_event("M", "process_name", 1, args={"name": timeline.title})]
    for number, lane in enumerate(timeline.lanes, start=1):
        events.append(_event("M", "thread_name", number, args={"name": lane.name}))
        events.append(
            _event("M", "thread_sort_index", number, args={"sort_index": number})
        )
        for lap in lane.laps:
            begin = _nanoseconds(lap.begin_s)
            end = _nanoseconds(lap.end_s)
            if begin != end:
                times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
                events.append(_event("X", lap.activity, number, cat=lap.group, **times))
        for epoch, end_s in enumerate(lane.epochs, start=1):
            events.append(
                _event(
                    "i",
                    f"end of epoch {epoch}",
                    number,
                    s="t",
                    ts=_nanoseconds(end_s) / 1000,
                )
            )
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"about": timeline.about},
    }
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_own(path, "w") as file:
            file.write(json.dumps(document) + "\n")


def _event(kind: str, name: str, lane_number: int, **values: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": _PROCESS, "tid": lane_number, **values}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
