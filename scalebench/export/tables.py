"""The exported tables: records, and the statistics of the analysis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from scalebench.analysis import Results, cells, ratios
from scalebench.records.schema import Doc, EpochRow, RunRow

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
