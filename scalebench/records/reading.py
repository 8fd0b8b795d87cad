"""Reader of runs.csv and epochs.csv as pandas tables, in which every cell is validated."""

from __future__ import annotations

import io
import json
import typing
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BaseModel

from scalebench.errors import ResultsError, reading
from scalebench.records import append_only, limits, schema
from scalebench.system.file_access import LARGE, read_lines

# faster than pyarrow's on tables of this size
TEXT = pd.StringDtype("python", na_value=np.nan)
_LIST = "a JSON list with a value for each worker"
_DTYPES: dict[str, Any] = {
    "integer": "Int64",
    "number": "float64",
    "flag": "boolean",
    "text": TEXT,
}


def read_table(path: Path, row_type: type[BaseModel]) -> pd.DataFrame:
    """Return all rows of `path`. An incomplete last line is ignored; optional columns that are not there are empty.

    Raises:
        ResultsError: the file cannot be read, has other columns or another schema version, or a cell is damaged (named
            by file, line and column).
    """
    first, header = b"", list[str]()
    parts: list[pd.DataFrame] = []
    with reading(path):
        for lines in read_lines(path, LARGE):
            if not first:
                first, lines = (
                    lines[: lines.find(b"\n") + 1],
                    lines[lines.find(b"\n") + 1 :],
                )
                header = append_only.from_line(first)
                if not header:
                    break
                append_only.check_header(
                    path,
                    header,
                    schema.columns(row_type),
                    schema.optional_columns(row_type),
                )
            # in pieces: the text of a million rows and their table together would be
            # twice the memory
            parts.append(
                _rows(path, first + lines, header, row_type, sum(map(len, parts)))
            )
    if not header:
        raise ResultsError(f"{path} is empty; expected a header line")
    table = parts[0] if len(parts) == 1 else pd.concat(parts)
    # A table of a million rows is then in memory once.
    del parts
    if row_type is schema.RunRow:
        _check_runs(path, table)
    return table


def _check_runs(path: Path, table: pd.DataFrame) -> None:
    """Check cells of runs.csv against one another.

    Raises:
        ResultsError: names the first damaged cell.
    """
    append_only.check_version(path, set(map(str, table["schema_version"].unique())))
    # ratios never mix executions and engines, which a wrong pair would
    simulated = table["execution"].isin(("virtual", "modelled"))
    is_virtual = table["engine"] == "virtual"
    no_objects = {
        text for text in table["tuned"].dropna().unique() if not _is_object(text)
    }
    for name, bad, expected in (
        ("engine", simulated & ~is_virtual, "virtual for this execution"),
        ("engine", is_virtual & ~simulated, "a native engine for this execution"),
        (
            "started_utc",
            _are_no_times(table["started_utc"]),
            "ISO 8601 (2026-11-20T12:00:00+00:00)",
        ),
        ("tuned", table["tuned"].isin(no_objects), "a JSON object"),
        *((name, _are_no_lists(table, name), _LIST) for name in limits.WORKER_LISTS),
    ):
        _refuse(path, table, name, bad, expected)
    finished = (table["status"] == "completed").to_numpy(dtype=bool)
    accuracy = (table["metric_name"] == "accuracy").to_numpy(dtype=bool, na_value=False)
    check_completed(path, table, schema.RunRow, finished, accuracy)
    _check_parts(path, table)


def columns_not_recorded(path: Path, row_type: type[BaseModel]) -> list[str]:
    """Return the columns of `row_type` that the header of `path` lacks, as that of an earlier version does."""
    with reading(path), path.open("rb") as file:
        header = append_only.from_line(file.readline())
    # An empty file, or one whose header is being written, is of no version.
    return [name for name in schema.columns(row_type) if header and name not in header]


def _rows(
    path: Path,
    data: bytes,
    header: Sequence[str],
    row_type: type[BaseModel],
    before: int,
) -> pd.DataFrame:
    """Parse and check lines of a table that follow `before` rows, by which the result is numbered on."""
    kind_of = schema.kinds(row_type)
    try:
        try:
            # By kind, which is fast; a damaged table is read again as text, to name the
            # cell.
            table = _parse(
                data, {name: _DTYPES[kind] for name, kind in kind_of.items()}
            )
        except (ValueError, TypeError, OverflowError, RuntimeWarning) as error:
            text = _parse(data, dict.fromkeys(header, TEXT))
            raise _damaged(path, text, before) or ResultsError(
                f"{path}: {error}"
            ) from None
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        reason = _too_many_cells(data, header, before) or error
        raise ResultsError(f"{path}: {reason}; repair or remove the line") from None
    table.index = pd.RangeIndex(before, before + len(table))
    if b"'" in data:  # possibly an apostrophe that keeps a text from being a formula
        for name in (name for name, kind in kind_of.items() if kind == "text"):
            escaped = {
                text: append_only.to_text(text)
                for text in table[name].dropna().unique()
                if text.startswith("'")
            }
            table[name] = table[name].replace(escaped) if escaped else table[name]
    # columns that are younger than the file
    for name in (name for name in schema.columns(row_type) if name not in header):
        table[name] = pd.Series(None, table.index, dtype=_DTYPES[kind_of[name]])
    _check_cells(path, table, row_type)
    return (
        table
        if list(header) == schema.columns(row_type)
        else table[schema.columns(row_type)]
    )


def check_completed(
    path: Path,
    table: pd.DataFrame,
    row_type: type[BaseModel],
    finished: NDArray[np.bool_],
    accuracy: NDArray[np.bool_],
) -> None:
    """Check metrics and other numbers of rows of completed runs; a training that diverged may have left any.

    `finished` marks these rows, `accuracy` those whose metric is an accuracy.

    Raises:
        ResultsError: names the first damaged cell.
    """
    accuracy = accuracy & finished
    for name in limits.other_columns(row_type):
        values = table[name].to_numpy(dtype=float)
        _refuse(
            path,
            table,
            name,
            finished & (np.abs(values) > limits.LARGEST),
            f"a number of at most {limits.LARGEST:g}",
        )
        if name in limits.METRICS:
            _refuse(
                path,
                table,
                name,
                accuracy & ((values < 0) | (values > 1)),
                "an accuracy from 0 to 1",
            )
            _refuse(path, table, name, finished & (values > 1), "an R2 of at most 1")


def _parse(data: bytes, dtypes: dict[str, Any]) -> pd.DataFrame:
    missing = {
        name: ["", "nan"] if dtype == "float64" else [""]
        for name, dtype in dtypes.items()
    }
    with warnings.catch_warnings():
        # more cells than the header
        warnings.simplefilter("error", pd.errors.ParserWarning)
        # number too large for an integer
        warnings.simplefilter("error", RuntimeWarning)
        return pd.read_csv(
            io.BytesIO(data),
            dtype=dtypes,
            na_values=missing,
            # pandas would read a study called NA as a missing value
            keep_default_na=False,
            # else a row with one cell too many makes the first column an index
            index_col=False,
            encoding="utf-8-sig",
            encoding_errors="replace",
        )


def _too_many_cells(data: bytes, header: Sequence[str], before: int) -> str | None:
    for number, line in enumerate(data.splitlines(), start=before + 1):
        if (count := len(append_only.from_line(line))) > len(header):
            return f"line {number} has {count} cells, expected {len(header)}"
    return None


def _damaged(path: Path, text: pd.DataFrame, before: int) -> ResultsError | None:
    """Return the error for the first column with a cell that cannot be converted."""
    for name in text:
        for place, cell in text[name].dropna().items():
            if expected := limits.expected_instead(str(name), cell):
                return append_only.bad_cell(
                    path, before + int(str(place)), str(name), cell, expected
                )
    return None


def _refuse(
    path: Path, table: pd.DataFrame, name: str, bad: Any, expected: str
) -> None:
    """Raise ResultsError for the first cell of the column `name` where `bad` is true."""
    if bad.any():
        place = int(np.asarray(bad, dtype=bool).argmax())
        value = table[name].iloc[place]
        raise append_only.bad_cell(
            path,
            int(table.index[place]),
            name,
            None if pd.isna(value) else value,
            expected,
        )


def _check_cells(path: Path, table: pd.DataFrame, row_type: type[BaseModel]) -> None:
    for name, field in row_type.model_fields.items():
        if typing.get_origin(field.annotation) is Literal:
            choices = typing.get_args(field.annotation)
            _refuse(
                path,
                table,
                name,
                ~table[name].isin(choices),
                f"one of {', '.join(choices)}",
            )
        elif name in ("workers", "attempt", "epochs"):
            below_one = (table[name] < 1).fillna(False)
            _refuse(
                path, table, name, table[name].isna() | below_one, "a number from 1 up"
            )
        elif field.is_required():
            _refuse(path, table, name, table[name].isna(), "a value")
        if (expected := limits.range_of(name)) is not None:
            _refuse(
                path,
                table,
                name,
                limits.out_of_range(name, table[name]).fillna(False),
                expected,
            )


def _are_no_times(moments: pd.Series[str]) -> NDArray[np.bool_]:
    """Return where dates were reformatted, as by a spreadsheet, so that their runs would silently have no start."""
    given = moments.notna().to_numpy(dtype=bool)
    read = (
        pd.to_datetime(moments, utc=True, errors="coerce", format="ISO8601")
        .notna()
        .to_numpy(dtype=bool)
    )
    # 46348 is a spreadsheet's day
    dashed = (moments.str.slice(4, 5) == "-").to_numpy(dtype=bool, na_value=False)
    return given & ~(read & dashed)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _are_no_lists(table: pd.DataFrame, name: str) -> NDArray[np.bool_]:
    """Mark cells of a column of WORKER_LISTS that are neither empty nor such a list."""
    texts = table[name].to_numpy(dtype=object)
    workers = table["workers"].to_numpy(dtype=np.int64)
    wrong = np.zeros(len(table), dtype=bool)
    for place in np.flatnonzero(table[name].notna()):
        wrong[place] = not limits.is_worker_list(
            name, texts[place], int(workers[place])
        )
    return wrong


def _check_parts(path: Path, table: pd.DataFrame) -> None:
    """Refuse parts of a completed run that exceed the whole; `check` reports wholes of zero."""
    completed = (table["status"] == "completed").to_numpy(dtype=bool)
    for part, whole in limits.WITHIN.items():
        parts, wholes = (
            table[name].to_numpy(dtype=float, na_value=np.nan) for name in (part, whole)
        )
        bad = completed & (wholes > 0) & (parts > wholes * (1 + limits.ROUNDING))
        if bad.any():
            _refuse(
                path,
                table,
                part,
                bad,
                f"at most {whole}, which is {wholes[int(bad.argmax())]:g}",
            )
