"""Which numbers a table of records can hold: what no run can have measured is damage, and would spoil the statistics.

    times (columns in s)           from -1e9 to 1e9 s; a run, an epoch or the way to a target not between 0 and 1e-9 s
    metrics of a completed run     accuracy from 0 to 1; R2 at most 1
    other numbers of such a run    of at most 1e150, whose square is a number still
    parts of a completed run       compute, communication, waiting, data, the rest, the way to a target: none
                                   above train_s; epochs to a target: of at most all epochs
    whole numbers                  of at most 2^53, as far as floating-point numbers tell them apart; seeds: 64 bits

A time that is not positive is in no statistic, and `check` names its run. What was not measured is NaN, and no damage.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from scalebench.records.schema import Column, kinds

SHORTEST_S, LONGEST_S = 1e-9, 1e9
LARGEST, LARGEST_WHOLE, LARGEST_SEED = 1e150, 2**53, 2**63 - 1
METRICS = ("chance_metric", "final_metric", "best_metric", "test_metric")
# What lies within what: parts are means over workers of laps that follow one another, train_s is the slowest worker's.
WITHIN = {
    **dict.fromkeys(("time_to_target_s", "compute_s", "comm_s", "wait_s", "data_s", "other_s"), "train_s"),
    "epochs_to_target": "epochs",
}
ROUNDING = 1e-6  # of the whole, that a part may be above it
_WHOLE_TIMES = ("train_s", "time_to_target_s", "elapsed_s", "epoch_s_max")


def time_columns(row_type: type[BaseModel]) -> list[str]:
    """The columns that hold seconds."""
    fields = row_type.model_fields.items()
    return [name for name, field in fields for fact in field.metadata if isinstance(fact, Column) and fact.unit == "s"]


def other_columns(row_type: type[BaseModel]) -> list[str]:
    """The columns of numbers that are neither whole nor seconds."""
    times = time_columns(row_type)
    return [name for name, kind in kinds(row_type).items() if kind == "number" and name not in times]


def no_time(name: str, value: Any) -> Any:
    """Whether `value`, a number or a column of them, is none that the column of seconds `name` can hold."""
    outside = (value > LONGEST_S) | (value < -LONGEST_S)
    return outside | ((value > 0) & (value < SHORTEST_S)) if name in _WHOLE_TIMES else outside


def time_expected(name: str) -> str:
    """What `no_time` looks for, in words."""
    return f"{SHORTEST_S:g} to {LONGEST_S:g} s" if name in _WHOLE_TIMES else f"at most {LONGEST_S:g} s"


def largest_whole(name: str) -> int:
    """The largest whole number that the column `name` holds."""
    return LARGEST_SEED if name == "seed" else LARGEST_WHOLE
