"""Reads a CSV of records into a table, and refuses damaged cells by file, line and column."""

from __future__ import annotations

import io
import typing
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel

from scalebench.errors import ResultsError
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
from scalebench.records.schema import RunRow, columns, kinds
from scalebench.records.table import columns_lacking

_DIGITS = 1000  # longest integer that is parsed; Python refuses more than 4,300
TEXT = pd.StringDtype("python", na_value=np.nan)  # pyarrow is slower on tables of this size
_DTYPES: dict[str, Any] = {"integer": "Int64", "number": "float64", "flag": "boolean", "text": TEXT}


def read_table(path: Path, row_type: type[BaseModel]) -> pd.DataFrame:
    """Read the rows of `row_type` in `path`; columns of later versions are empty.

    Raises:
        ResultsError: the file cannot be read, or has a damaged cell (named by line and column).
    """
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
            text = _parse(data, dict.fromkeys(header, TEXT))
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
        check_completed(path, table, row_type, table["status"] == "completed", table["metric_name"])
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


def check_completed(
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
