"""The `tune` key of a study: search space, number of trials, and the metric by which a trial is chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from scalebench.errors import nearest
from scalebench.study.parsing import Share
from scalebench.study.validation import StrictModel

TUNABLE = ("lr", "lr_decay", "lr_decay_every", "lr_warmup_epochs")  # keys of a study; the others are options
RESULTS_OF_A_TRIAL = ("completed", "diverged", "timeout")  # statuses after which a trial is not repeated
_DIGITS = 3  # significant digits of values drawn from a range


class Tune(StrictModel):
    """Equal tuning of every strategy at every worker count.

    All get the same `trials` points of one quasi-random sequence over the search space `over`. A trial is a virtual run
    on `1 - validation` of the training samples, judged on the rest of them.
    """

    over: dict[str, list[Any]] = Field(
        min_length=1,
        description="by key (lr, optimizer.OPTION, STRATEGY.OPTION): a range [low, high], or a list of values",
    )
    trials: int = Field(16, ge=1, description="points of the search space, the same for every strategy")
    metric: Literal["time_to_target", "final_metric"] = "time_to_target"
    validation: Annotated[Share, Field(gt=0, lt=1)] = Field(
        0.2, description="share of the training samples that judges trials"
    )

    @field_validator("over")
    @classmethod
    def _can_be_searched(cls, over: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in over.items():
            if fault := _fault(values):
                raise ValueError(f"{key}: {fault}, got {values!r}")
        return over

    def points(self, uniform: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Return the values of each trial, by key, from numbers u in [0, 1), (trials, keys).

        A range gives low (high / low)^u to 3 digits, whole numbers if both ends are written as whole numbers; a list of
        m values the one at floor(m u).
        """
        return [
            {key: _value(values, u) for (key, values), u in zip(self.over.items(), row, strict=True)} for row in uniform
        ]


def is_range(values: Sequence[Any]) -> bool:
    """Return True for [low, high], two numbers."""
    return len(values) == 2 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def unknown_key(key: str, strategies: Collection[str]) -> str:
    """Return the error for a key of `over` that neither the training nor one of `strategies` has; empty if valid."""
    name, dot, option = key.partition(".")
    known = [*TUNABLE, "optimizer.OPTION", *(f"{strategy}.OPTION" for strategy in dict.fromkeys(strategies))]
    if (not dot and key in TUNABLE) or (option and name in ("optimizer", *strategies)):
        return ""
    return f"tune.over: unknown key {key!r}; {nearest(key, known)}"


def _fault(values: list[Any]) -> str:
    if not is_range(values):
        distinct = len({repr(value) for value in values})
        return "" if distinct == len(values) > 1 else "expected a range [low, high] or several distinct values"
    low, high = values
    if low >= high:
        return "expected a range [low, high] with low < high"
    if low <= 0:
        return "a range is searched by its logarithm and begins above 0 (a list of three values or more is a choice)"
    return "" if math.isfinite(high) else "expected a finite range"


def _value(values: list[Any], u: float) -> Any:
    if not is_range(values):
        return values[int(u * len(values))]
    low, high = values
    value = low * (high / low) ** u
    if isinstance(low, int) and isinstance(high, int):
        return round(value)
    return min(max(float(f"{value:.{_DIGITS}g}"), low), high)
