"""The base of everything a person states in a file or on the command line."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class StrictModel(BaseModel):
    """Unknown keys are refused, so are infinite numbers, and yes and no (`true`, `off`, ...) are no numbers.

    Python's `True` is an integer, and pydantic reads it as 1: `epochs: yes` would train for one epoch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if _has_truth(value) and not _takes_truth(cls.model_fields[info.field_name].annotation):
            raise ValueError("expected no yes or no (true, false, on, off) here")
        return value


def _has_truth(value: Any) -> bool:
    """Whether `value` is, or a list or mapping of plain values that holds, True or False."""
    if isinstance(value, list | tuple):
        return any(map(_has_truth, value))
    return _has_truth(list(value.values())) if isinstance(value, dict) else isinstance(value, bool)


def _takes_truth(annotation: Any) -> bool:
    """Whether a value of `annotation` may hold a bool; what another model holds is that model's matter."""
    if annotation in (bool, Any) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return True
    return any(_takes_truth(part) for part in get_args(annotation))
