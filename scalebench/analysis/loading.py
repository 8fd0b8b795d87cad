"""Reader of a study's folder: tables of runs and epochs, validated."""

from __future__ import annotations

import io
import json
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel

from scalebench.errors import ResultsError
from scalebench.formatting import counted
from scalebench.records.attempts import counting
from scalebench.records.cells import from_line, to_text
from scalebench.records.plausible import (
    LARGEST,
    METRICS,
    ROUNDING,
    WITHIN,
    largest_whole,
    no_time,
    other_columns,
    time_columns,
    time_expected,
)
from scalebench.records.schema import READABLE, EpochRow, RunRow, columns, kinds
from scalebench.records.table import check_version, columns_lacking

CELL = ["execution", "engine", "label", "workers", "batch_per_worker", "batch_global"]
PACE_OVERRUN_LIMIT = 0.01
_OF_A_CHECKSUM = 12  # digits
_DIGITS = 1000  # longest integer that is parsed; Python refuses more than 4,300
# Equal for all runs of a study. The batch may be reduced to a small shard, so it belongs to the cell.
CONDITION = [
    *("model", "model_sha256", "init_weights_sha256", "dtype", "dataset", "partition", "shuffle", "threads_per_worker"),
    *("scaling", "batch_policy", "lr", "lr_policy", "optimizer", "epochs"),
]
T = TypeVar("T")
_TEXT = pd.StringDtype("python", na_value=np.nan)  # pyarrow is slower on tables of this size
_DTYPES: dict[str, Any] = {"integer": "Int64", "number": "float64", "flag": "boolean", "text": _TEXT}


@dataclass(frozen=True, eq=False)
class Results:
    """Latest attempts at the runs of one study, with any status, and their epochs.

    `runs` has the columns of runs.csv and `label`, the strategy with its options; `oversubscribed` includes paced runs
    that missed their pace. `epochs` has the columns of epochs.csv. Do not change either in place: statistics are
    computed once per Results (`cached`). `repeated` are further rows of runs that `runs` contains.
    """

    folder: Path
    runs: pd.DataFrame
    epochs: pd.DataFrame
    study: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    repeated: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def completed(self) -> pd.DataFrame:
        """Completed runs without those for warm-up: the input of statistics."""
        return self.runs[(self.runs["status"] == "completed") & ~self.runs["warmup"].fillna(False).astype(bool)]

    @cached_property
    def failed(self) -> pd.DataFrame:
        """Runs with another status than completed."""
        return self.runs[self.runs["status"] != "completed"]


def cached(function: Callable[[Results], T]) -> Callable[[Results], T]:
    """Decorate a statistic to be computed once per `Results`; tables are returned as copies."""
    kept: WeakKeyDictionary[Results, T] = WeakKeyDictionary()

    @wraps(function)
    def answer(results: Results) -> T:
        if results not in kept:
            kept[results] = function(results)
        found = kept[results]
        return found.copy() if isinstance(found, pd.DataFrame) else found

    return answer


def load(folder: Path | str) -> Results:
    """Read the study in `folder`.

    Only the latest attempt at a run counts, and the last of several rows of one attempt. Of several configurations
    (another learning rate, another model) that of the last row counts, of several runs of one repetition of a cell the
    last. Notes give the number of runs left out.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell (named by file, line and column).
    """
    folder = Path(folder)
    runs = read_runs(folder)
    doubled = runs[runs.duplicated(["run_id", "attempt"], keep="last")]
    runs = runs.iloc[sorted(counting(runs["run_id"].tolist(), runs["attempt"].tolist()).values())]
    runs, notes = _one_configuration(runs)
    again = _claimed_twice(runs)
    repeated, runs = pd.concat([doubled, runs[again]]), runs[~again]
    if len(repeated):
        notes.append(f"rows that give a run once more, of which only the last counts: {len(repeated)} left out")
    path = folder / "epochs.csv"
    epochs = _read(path, EpochRow) if path.is_file() else pd.DataFrame(columns=columns(EpochRow))
    of_run = epochs[["run_id", "attempt"]].merge(
        runs[["run_id", "attempt", "status", "metric_name"]], on=["run_id", "attempt"], how="left"
    )
    _check_completed(path, epochs, EpochRow, of_run["status"] == "completed", of_run["metric_name"])
    epochs = epochs.merge(runs[["run_id", "attempt"]], on=["run_id", "attempt"])
    epochs = epochs.drop_duplicates(["run_id", "attempt", "epoch"], keep="last")
    runs, epochs = runs.reset_index(drop=True), epochs.reset_index(drop=True)
    return Results(folder, runs, epochs, _read_study(folder), notes, repeated)


def read_runs(folder: Path) -> pd.DataFrame:
    """Read all rows of `folder`/runs.csv, with `label` and `oversubscribed` as in Results.

    Raises:
        ResultsError: no records there, another schema version, or a damaged cell (named by file, line and column).
    """
    path = folder / "runs.csv"
    if not path.is_file():
        raise ResultsError(f"{folder} holds no runs.csv; expected the folder of a study, such as results/<study>")
    runs = _read(path, RunRow)
    if runs.empty:
        raise ResultsError(f"{path} holds no runs yet; `scalebench run` fills it")
    check_version(
        path, {"(none)" if pd.isna(version) else str(version) for version in runs["schema_version"]}, READABLE
    )
    runs["oversubscribed"] = runs["oversubscribed"].astype(bool) | (runs["paced_overrun"] > PACE_OVERRUN_LIMIT)
    runs["label"] = list(map(_label, runs["strategy"].tolist(), runs["strategy_options"].tolist()))
    return runs


def _claimed_twice(runs: pd.DataFrame) -> pd.Series[bool]:
    """Mark completed runs for whose repetition of a cell a later row exists under another run_id."""
    counted = (runs["status"] == "completed") & ~runs["warmup"].fillna(False).astype(bool)
    found = runs[counted].duplicated([*CELL, "repetition"], keep="last")
    return found.reindex(runs.index, fill_value=False)


def _one_configuration(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    last = runs.iloc[-1]
    notes: list[str] = []
    for column in CONDITION:
        other = (runs[column].notna() & (runs[column] != last[column])).fillna(False)
        other |= runs[column].isna() != pd.isna(last[column])
        if other.any():
            values = ", ".join(sorted(str(value) for value in runs.loc[other, column].unique()))
            notes.append(
                f"left out {counted(other.sum(), 'run')} with {column} = {values}: the latest runs have "
                f"{last[column]}; give each configuration a study name of its own"
            )
            runs = runs[~other]
    codes = runs["strategy_sha256"].astype(_TEXT).fillna("")
    other = codes != codes.groupby(runs["strategy"]).transform("last")
    if other.any():
        named = ", ".join(sorted(runs.loc[other, "strategy"].unique()))
        notes.append(f"left out {counted(other.sum(), 'run')} of {named} with another content of its file")
        runs = runs[~other]
    clusters = clusters_of(runs)
    other = clusters != clusters.groupby(runs["execution"]).transform("last")
    if other.any():
        named = ", ".join(sorted(clusters[other].unique()))
        notes.append(f"left out {counted(other.sum(), 'run')} of another cluster ({named})")
        runs = runs[~other]
    return runs, notes


def clusters_of(runs: pd.DataFrame) -> pd.Series[str]:
    """Identity of the cluster of each run: its name, and the checksum of a cluster file."""
    content = " (sha256 " + runs["cluster_sha256"].astype(_TEXT).str[:_OF_A_CHECKSUM] + ")"
    return runs["cluster"] + content.fillna("")


@lru_cache(maxsize=4096)
def _label(strategy: str, options: object) -> str:
    if not isinstance(options, str):  # an empty cell, from other writers
        return strategy
    try:
        chosen = json.loads(options)
    except ValueError:
        chosen = {"options": options}
    if not chosen or not isinstance(chosen, dict):
        return strategy
    return f"{strategy}({', '.join(f'{key}={value}' for key, value in sorted(chosen.items()))})"


def _read(path: Path, row_type: type[BaseModel]) -> pd.DataFrame:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    data = data[: data.rfind(b"\n") + 1]  # ignore an incomplete last line
    header = from_line(data[: data.find(b"\n") + 1])
    if not header:
        raise ResultsError(f"{path} is empty; expected a header line")
    lacking = columns_lacking(path, header, columns(row_type))
    kind_of = {name: kind for name, kind in kinds(row_type).items() if name not in lacking}
    try:
        try:
            table = _parse(data, {name: _DTYPES[kind] for name, kind in kind_of.items()})
        except (ValueError, TypeError, OverflowError, RuntimeWarning) as error:
            text = _parse(data, dict.fromkeys(header, _TEXT))
            raise _damaged(path, text, kind_of) or ResultsError(f"{path}: {error}") from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise ResultsError(f"{path}: {_too_many(data, header) or error}; repair or remove the line") from None
    if b"'" in data:  # may escape a formula
        for name in (name for name, kind in kind_of.items() if kind == "text"):
            escaped = {text: to_text(text) for text in table[name].dropna().unique() if text.startswith("'")}
            table[name] = table[name].replace(escaped) if escaped else table[name]
    if lacking:
        empty = {name: _DTYPES[kind] for name, kind in kinds(row_type).items() if name in lacking}
        table = table.reindex(columns=columns(row_type)).astype(empty)
    _check_values(path, table, row_type)
    return table[columns(row_type)]


def _parse(data: bytes, dtypes: dict[str, Any]) -> pd.DataFrame:
    missing = {name: ["", "nan"] if dtype == "float64" else [""] for name, dtype in dtypes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond the header's
        warnings.simplefilter("error", RuntimeWarning)  # a number too large for a whole one
        return pd.read_csv(
            io.BytesIO(data),
            dtype=dtypes,
            na_values=missing,
            keep_default_na=False,
            index_col=False,
            encoding="utf-8-sig",
            encoding_errors="replace",
        )


def _too_many(data: bytes, header: list[str]) -> str | None:
    for number, line in enumerate(data.splitlines(), start=1):
        if (count := len(from_line(line))) > len(header):
            return f"line {number} has {count} cells, expected {len(header)}"
    return None


def _check_values(path: Path, table: pd.DataFrame, row_type: type[BaseModel]) -> None:
    times, whole = time_columns(row_type), [name for name, kind in kinds(row_type).items() if kind == "integer"]
    for name, model_field in row_type.model_fields.items():
        bad = table[name].isna() if model_field.is_required() else pd.Series(False, index=table.index)
        expected = "a value"
        if typing.get_origin(model_field.annotation) is Literal:
            choices = typing.get_args(model_field.annotation)
            bad |= ~table[name].isin(choices)
            expected = f"one of {', '.join(choices)}"
        elif name in ("workers", "attempt", "epochs"):
            bad |= (table[name] < 1).fillna(False)
            expected = "a number from 1 up"
        if not bad.any() and name in whole:
            bad |= ((table[name] > largest_whole(name)) | (table[name] < -largest_whole(name))).fillna(False)
            expected = f"a whole number of at most {largest_whole(name)}"
        elif name in times:
            bad |= no_time(name, table[name])
            expected = time_expected(name)
        if bad.any():
            raise _bad_cell(path, int(bad.to_numpy().argmax()), name, table[name][bad].iloc[0], expected)
    if row_type is RunRow:
        simulated = table["execution"].isin(("virtual", "modelled"))
        bad = simulated != (table["engine"] == "virtual")
        if bad.any():
            row = int(bad.to_numpy().argmax())
            expected = "virtual" if simulated.iloc[row] else "a native engine"
            raise _bad_cell(path, row, "engine", table["engine"].iloc[row], f"{expected} for this execution")
        _check_moments(path, table["started_utc"])
        _check_completed(path, table, row_type, table["status"] == "completed", table["metric_name"])
        _check_parts(path, table)


def _check_moments(path: Path, moments: pd.Series[str]) -> None:
    """Refuse start times in other formats, such as those of a spreadsheet."""
    given = moments.notna().to_numpy(dtype=bool)
    read = pd.to_datetime(moments, utc=True, errors="coerce", format="ISO8601").notna().to_numpy(dtype=bool)
    dashed = (moments.str.slice(4, 5) == "-").to_numpy(dtype=bool, na_value=False)  # spreadsheets write days as 46348
    bad = given & ~(read & dashed)
    if bad.any():
        row = int(bad.argmax())
        raise _bad_cell(path, row, "started_utc", moments.iloc[row], "ISO 8601 (2026-11-20T12:00:00+00:00)")


def _check_parts(path: Path, table: pd.DataFrame) -> None:
    """Refuse completed runs with a part longer than the whole; `check` reports times of zero."""
    completed = (table["status"] == "completed").to_numpy(dtype=bool)
    for part, whole in WITHIN.items():
        parts, wholes = (table[name].to_numpy(dtype=float, na_value=np.nan) for name in (part, whole))
        bad = completed & (wholes > 0) & (parts > wholes * (1 + ROUNDING))
        if bad.any():
            row = int(bad.argmax())
            raise _bad_cell(path, row, part, table[part].iloc[row], f"at most {whole}, which is {wholes[row]:g}")


def _check_completed(
    path: Path, table: pd.DataFrame, row_type: type[BaseModel], completed: pd.Series[bool], metric_name: pd.Series[str]
) -> None:
    """Refuse impossible metrics and other numbers of completed runs; diverged runs may have any."""
    accuracy = (completed & (metric_name == "accuracy").fillna(False)).to_numpy(dtype=bool)
    finished = completed.to_numpy(dtype=bool)
    for name in other_columns(row_type):
        values = table[name].to_numpy(dtype=float)
        bad, expected = finished & (np.abs(values) > LARGEST), f"a number of at most {LARGEST:g}"
        if name in METRICS and not bad.any():
            bad, expected = accuracy & ((values < 0) | (values > 1)), "an accuracy from 0 to 1"
            if not bad.any():
                bad, expected = finished & (values > 1), "an R2 of at most 1"
        if bad.any():
            raise _bad_cell(path, int(bad.argmax()), name, values[bad][0], expected)


def _damaged(path: Path, text: pd.DataFrame, kind_of: dict[str, Any]) -> ResultsError | None:
    """Error for the first cell of the wrong kind, if there is one."""
    pattern = {"integer": r"[+-]?\d+", "flag": "(?i:true|false)"}
    expected = {"integer": "a whole number", "number": "a number", "flag": "true or false"}
    for name, kind in kind_of.items():
        if kind == "text":
            continue
        cells = text[name].dropna()
        if kind == "number":
            bad = cells[pd.to_numeric(cells, errors="coerce").isna()]
        else:
            bad = cells[~cells.str.fullmatch(pattern[kind])]
        if kind == "integer" and not len(bad):
            limit = largest_whole(name)
            bad = cells[[len(cell) > _DIGITS or abs(int(cell)) > limit for cell in cells]]
            expected["integer"] = f"a whole number of at most {limit}" if len(bad) else expected["integer"]
        if len(bad):
            return _bad_cell(path, int(bad.index[0]), name, bad.iloc[0], expected[kind])
    return None


def _bad_cell(path: Path, row: int, name: str, value: object, expected: str) -> ResultsError:
    found = "empty" if pd.isna(value) else repr(str(value))  # type: ignore[call-overload]
    return ResultsError(f"{path}, line {row + 2}: {name} is {found}, expected {expected}; repair or remove the line")


def _read_study(folder: Path) -> dict[str, Any]:
    path = folder / "study.yaml"
    if not path.is_file():
        return {}
    try:
        study = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    return study if isinstance(study, dict) else {}
