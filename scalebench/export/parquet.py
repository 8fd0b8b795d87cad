"""Write results as Parquet files, one per table, with meanings and units in the schema. Needs pyarrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.errors import UsageError, writing
from scalebench.export.tables import columns_of, tables
from scalebench.records.schema import SCHEMA_VERSION
from scalebench.system.atomic_write import atomic_file

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from scalebench.analysis import Results

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
