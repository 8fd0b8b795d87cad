"""Write results as one JSON file: strict (RFC 8259), exact, one row per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from scalebench.analysis import Results
from scalebench.errors import writing
from scalebench.export.tables import columns_of, tables
from scalebench.records.schema import SCHEMA_VERSION
from scalebench.system.atomic_write import atomic_file

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
