"""Records and the statistics of the analysis as tables, in one JSON file or in Parquet files.

JSON is strict (RFC 8259) and exact, one row per line; Parquet has meanings and units in its schema and needs pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from scalebench.analysis import Results, cells, ratios
from scalebench.errors import UsageError, writing
from scalebench.records.schema import SCHEMA_VERSION, Doc, EpochRow, RunRow
from scalebench.system.atomic_write import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa

_OWN = {"label": Doc("the strategy with its options as written")}


def tables(results: Results) -> dict[str, pd.DataFrame]:
    """Return `runs`, `epochs` (latest attempts), `cells` (one row per cell) and `ratios` (one per cell and baseline).

    Texts are of type str and flags nullable, so that the type of a column does not depend on its values. `cells` has a
    column `target_reached` (true, false, missing without a target) beside `time_to_target_s`, as not every format holds
    its infinity.
    """
    summary = cells(results)
    time = summary["time_to_target_s"].astype("float64")
    summary["target_reached"] = pd.Series(np.isfinite(time), dtype="boolean").mask(time.isna())
    found = {"runs": results.runs, "epochs": results.epochs, "cells": summary, "ratios": ratios(results)}
    return {name: _typed(table) for name, table in found.items()}


def columns_of(name: str) -> dict[str, Doc]:
    """Meaning and unit of the columns of `runs` or `epochs`; the other tables are described in docs/export.md."""
    row_types: dict[str, type[BaseModel]] = {"runs": RunRow, "epochs": EpochRow}
    fields = row_types[name].model_fields if name in row_types else {}
    docs = {key: item for key, field in fields.items() for item in field.metadata if isinstance(item, Doc)}
    return docs | _OWN if name == "runs" else docs


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """Give columns of Python objects the type of their values; an empty one counts as text."""
    objects = [name for name in table if pd.api.types.is_object_dtype(table[name].dtype)]
    return table.astype({name: _kind(table[name]) for name in objects})


def _kind(column: pd.Series) -> Any:
    held = set(map(type, column.dropna()))
    for dtype, types in (("boolean", {bool, np.bool_}), ("Int64", {int, np.int64}), ("float64", {float, np.float64})):
        if held and held <= types:
            return dtype
    return "str"


FORMAT_VERSION = 1
_ROWS_AT_ONCE = 10_000


def write_json(results: Results, file: Path) -> Path:
    """Write `results` to `file` atomically.

    An object with `format` ("scalebench-results"), `format_version`, `schema_version` of the rows, `study`
    (study.yaml), `notes`, `columns` (meaning and unit by table and column), then the tables `runs`, `epochs`, `cells`
    and `ratios`, each a list of objects, one per row. Numbers round-trip exactly; missing and non-finite values
    are null.

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
            table: {name: {"meaning": column.meaning, "unit": column.unit or None} for name, column in columns.items()}
            for table, columns in meanings.items()
            if columns
        },
    }
    yield "{\n"
    for key, value in head.items():
        yield f"{json.dumps(key)}: {_dumps(value)},\n"
    for number, (name, table) in enumerate(found.items()):
        yield f"{',' if number else ''}{json.dumps(name)}: ["
        yield from _rows(table)
        yield "]\n"
    yield "}\n"


def _rows(table: pd.DataFrame) -> Iterator[str]:
    separator = "\n"
    for start in range(0, len(table), _ROWS_AT_ONCE):
        part = table.iloc[start : start + _ROWS_AT_ONCE]
        for row in _plain(part).to_dict("records"):
            yield separator + _dumps(row)
            separator = ",\n"


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Convert to Python numbers and texts, with None for missing and non-finite values."""
    plain = table.replace([np.inf, -np.inf], np.nan).astype(object)
    return plain.where(plain.notna(), None)


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, default=str)


ADD_PARQUET = "pip install 'scalebench[parquet]'"


def write_parquet(results: Results, folder: Path) -> list[Path]:
    """Write `folder`/runs.parquet, epochs.parquet, cells.parquet and ratios.parquet; each is replaced whole.

    A column's field metadata has its `unit` and `meaning`; the schema's metadata has `scalebench`, a JSON object with
    `schema_version` and `study`. Missing values are null; numbers are exact.

    Raises:
        UsageError: pyarrow is not installed.
        ResultsError: `folder` cannot be written.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f"Parquet files need pyarrow; add it with: {ADD_PARQUET}") from None
    facts = json.dumps({"schema_version": SCHEMA_VERSION, "study": results.study}, default=str)
    files = []
    for name, table in tables(results).items():
        file = folder / f"{name}.parquet"
        with writing(file, "name another place"), atomic_file(file) as stream:
            pq.write_table(_arrow(name, table, facts), stream.buffer, compression="zstd")
        files.append(file)
    return files


def _arrow(name: str, table: pd.DataFrame, facts: str) -> pa.Table:
    import pyarrow as pa

    made = pa.Table.from_pandas(table, preserve_index=False)
    schema = made.schema
    for key, column in columns_of(name).items():
        at = schema.get_field_index(key)
        schema = schema.set(at, schema.field(at).with_metadata({"meaning": column.meaning, "unit": column.unit}))
    return made.cast(schema.with_metadata({**(schema.metadata or {}), b"scalebench": facts.encode()}))
