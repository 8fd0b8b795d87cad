"""Base model of everything written by users in files and on the command line."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class StrictModel(BaseModel):
    """Frozen model that refuses unknown keys, infinite numbers, and booleans (`yes`, `off`, ...) as numbers.

    pydantic reads `True` as 1: `epochs: yes` would train for one epoch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if _has_bool(value) and not _accepts_bool(cls.model_fields[info.field_name].annotation):
            raise ValueError("expected no yes or no (true, false, on, off) here")
        return value


def _has_bool(value: Any) -> bool:
    """Return True if `value` is a bool or a list or mapping that contains one."""
    if isinstance(value, list | tuple):
        return any(map(_has_bool, value))
    return _has_bool(list(value.values())) if isinstance(value, dict) else isinstance(value, bool)


def _accepts_bool(annotation: Any) -> bool:
    """Return True if a value of `annotation` may contain a bool; nested models validate their own values."""
    if annotation in (bool, Any) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return True
    return any(_accepts_bool(part) for part in get_args(annotation))
