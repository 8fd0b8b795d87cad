"""Limits of the values in the columns of runs.csv, epochs.csv and elastic.csv: what is damage, and what was expected.

Values beyond them are damage, which would spoil statistics.

    times (columns in s)           -1e9 to 1e9 s; times of runs, epochs and targets not between 0 and 1e-9 s
    metrics of a completed run     accuracy from 0 to 1; R2 at most 1
    other numbers of such a run    magnitude at most 1e150, so that the square is finite
    parts of a completed run       compute, communication, waiting, data, remainder, time to target: at most train_s;
                                   epochs to target: at most all epochs
    lists of workers (worker_...)  JSON lists with a number, a node, cores (0-3,8) or words for each worker, or null
    whole numbers                  magnitude at most 2^53, exact as floating-point numbers; seeds: 64 bits

A time that is not positive enters no statistic, and `check` names its run. A missing
value is NaN or an empty cell.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel

from scalebench.records.schema import Doc, ElasticRow, EpochRow, RunRow, kinds

# beyond these a time is a slip of a unit or a damaged cell; 1e9 s are 32 years
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
# squares of numbers stay finite, whole numbers exact as floats
LARGEST, _LARGEST_WHOLE, _LARGEST_SEED = 1e150, 2**53, 2**63 - 1
METRICS = (
    "chance_metric",
    "final_metric",
    "final_train_metric",
    "best_metric",
    "test_metric",
)
# Part -> whole. Parts are means over workers of consecutive times, train_s is that of
# the slowest worker.
WITHIN = {
    **dict.fromkeys(
        (
            "time_to_target_s",
            "compute_s",
            "comm_s",
            "wait_s",
            "bubble_s",
            "data_s",
            "other_s",
        ),
        "train_s",
    ),
    "epochs_to_target": "epochs",
}
ROUNDING = 1e-6  # relative excess of a part over its whole that rounding may cause
# of whole runs: parts of them may be arbitrarily small
_WHOLE_TIMES = ("train_s", "time_to_target_s", "elapsed_s", "epoch_s_max")
_KINDS = kinds(ElasticRow) | kinds(EpochRow) | kinds(RunRow)
WORKER_LISTS = tuple(
    name
    for name in RunRow.model_fields
    if name.startswith("worker_") and name != "worker_weights"
)
_TEXTS = {
    "worker_nodes": re.compile(r"\S+"),
    "worker_cores": re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*"),
    "worker_gpu_slowdowns": re.compile(r"[a-z-]+(\+[a-z-]+)*"),
}
_DIGITS = 1000  # Python refuses to convert integers of more than 4,300


def _time_columns(row_type: type[BaseModel]) -> list[str]:
    """Return the columns of seconds; lists of them are text."""
    numbers = [name for name, kind in kinds(row_type).items() if kind == "number"]
    units = {
        name: doc.unit
        for name in numbers
        for doc in row_type.model_fields[name].metadata
        if isinstance(doc, Doc)
    }
    return [name for name, unit in units.items() if unit == "s"]


_TIMES = frozenset(
    _time_columns(RunRow) + _time_columns(EpochRow) + _time_columns(ElasticRow)
)


def other_columns(row_type: type[BaseModel]) -> list[str]:
    """Return the columns of numbers that are neither integers nor seconds."""
    return [
        name
        for name, kind in kinds(row_type).items()
        if kind == "number" and name not in _TIMES
    ]


def out_of_range(name: str, value: Any) -> Any:
    """Return True, or a column of truth values, where the integer or time `value` is outside the range of `name`."""
    if _KINDS[name] == "integer":
        largest = _LARGEST_SEED if name == "seed" else _LARGEST_WHOLE
        return (value > largest) | (value < -largest)
    outside = (value > _LONGEST_S) | (value < -_LONGEST_S)
    return (
        outside | ((value > 0) & (value < _SHORTEST_S))
        if name in _WHOLE_TIMES
        else outside
    )


def is_worker_list(name: str, text: str, workers: int) -> bool:
    """Return True if `text` is a list for the column `name`, one of WORKER_LISTS, of a run of `workers` workers."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(values, list) or len(values) != workers:
        return False
    known = [value for value in values if value is not None]
    if pattern := _TEXTS.get(name):
        return all(
            isinstance(value, str) and pattern.fullmatch(value) is not None
            for value in known
        )
    # NaN is not below
    return all(
        isinstance(value, int | float) and abs(value) <= LARGEST for value in known
    )


def range_of(name: str) -> str | None:
    """Return the range of an integer or time column as text; None for other columns."""
    if _KINDS[name] == "integer":
        return f"a whole number of at most {_LARGEST_SEED if name == 'seed' else _LARGEST_WHOLE}"
    if name not in _TIMES:
        return None
    return (
        f"{_SHORTEST_S:g} to {_LONGEST_S:g} s"
        if name in _WHOLE_TIMES
        else f"at most {_LONGEST_S:g} s"
    )


def expected_instead(name: str, cell: str) -> str | None:
    """Return the value that the column `name` expects instead of the text `cell`; None if `cell` is valid."""
    kind = _KINDS[name]
    if kind == "text":
        return None
    if kind == "flag":
        return None if cell.lower() in ("true", "false") else "true or false"
    try:
        number = float(cell)
    except ValueError:
        number = None
    if number is None or "_" in cell:  # Python accepts 1_000
        return "a whole number" if kind == "integer" else "a number"
    if kind == "integer":
        digits = cell.lstrip("+-")
        if digits.isdecimal() and len(digits) <= _DIGITS:
            number = int(cell)
        elif not digits.isdecimal() and not number.is_integer():
            return "a whole number"
    return (
        range_of(name)
        if (kind == "integer" or name in _TIMES) and out_of_range(name, number)
        else None
    )
