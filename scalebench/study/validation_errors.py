"""Messages for pydantic's validation errors, half a line for each key."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

_EXPECTED = {
    "bool": "true or false",
    "int": "an integer",
    "float": "a number",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "path": "a path",
}  # by the first word of pydantic's error type
_BOUND = re.compile(r"Input should be ((?:greater|less) than .*)")
_BELOW = {"gt": "greater than", "ge": "greater than or equal to"}
_ABOVE = {"lt": "less than", "le": "less than or equal to"}
_FEW = re.compile(r"\w+ should have at least (\d+) items? after validation, not \d+")
_SHORT = re.compile(r"String should have at least (\d+) characters")
_LONGEST = 60  # characters of a value in a message


class ValidationFault(NamedTuple):
    """One invalid key. `message` has the expected and the given value; empty for an unknown key."""

    key: tuple[str, ...]
    unknown: bool
    missing: bool
    message: str

    @property
    def path(self) -> str:
        """Key as written: `virtual.slow_links.3`."""
        return ".".join(self.key)


def find_faults(error: ValidationError, model: type[BaseModel] | None = None) -> list[ValidationFault]:
    """Return one fault for each invalid key, unknown keys first.

    The branches of a union share one message: `expected an integer or 'auto', got 'x'`. If `model` is given and limits
    a number at both ends, the message names both.
    """
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for fault in error.errors():
        by_key.setdefault(_key(fault), []).append(fault)
    found = [
        ValidationFault(
            key, _is(faults, "extra_forbidden"), _is(faults, "missing"), _message(faults, _field(model, key))
        )
        for key, faults in by_key.items()
    ]
    return sorted(found, key=lambda fault: not fault.unknown)


def fields_at(model: type[BaseModel], path: Sequence[str]) -> dict[str, FieldInfo]:
    """Return the fields of the model at `path` below `model`."""
    here = model
    for part in path:
        field = here.model_fields.get(part)
        inner = _models_in(field.annotation) if field else [here]
        if not inner:
            break
        here = inner[0]
    return dict(here.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, dict, tuple, Union, types.UnionType, Annotated):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []


def short(value: Any) -> str:
    """Return `value` as written, truncated to a limited length."""
    try:
        text = one_line(repr(value))
    except (ValueError, RecursionError):  # an integer too long to print, a structure too deep
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def one_line(text: str) -> str:
    """Return `text` with every run of white space replaced by one space."""
    return " ".join(text.split())


def _is(faults: Sequence[ErrorDetails], kind: str) -> bool:
    return faults[0]["type"] == kind


def _key(fault: ErrorDetails) -> tuple[str, ...]:
    """Return the key of a fault without the parts of pydantic's location that name a branch of a union."""
    loc = fault["loc"]
    last = len(loc) - (fault["type"] == "extra_forbidden")
    return tuple(str(part) for place, part in enumerate(loc) if place >= last or not _is_branch(part))


def _is_branch(part: Any) -> bool:
    """Return True if a part of pydantic's location names a branch of a union, such as `literal['auto']`."""
    return isinstance(part, str) and bool(re.search(r"\[.*\]$|^(int|str|float|bool|constrained-\w+)$", part))


def _field(model: type[BaseModel] | None, key: tuple[str, ...]) -> FieldInfo | None:
    return fields_at(model, key[:-1]).get(key[-1]) if model and key else None


def _message(faults: Sequence[ErrorDetails], field: FieldInfo | None) -> str:
    if own := next((fault for fault in faults if fault["type"] == "value_error"), None):
        text = one_line(own["msg"].removeprefix("Value error, "))
        return text[:1].lower() + text[1:]
    expected = " or ".join(dict.fromkeys(_expected(fault, field) for fault in faults))
    given = faults[0]["input"]
    return f"expected {expected}, got {'nothing' if given is None else short(given)}"


def _expected(fault: ErrorDetails, field: FieldInfo | None) -> str:
    message = one_line(fault["msg"])
    if few := _FEW.fullmatch(message):
        return f"at least {few[1]} item{'s' if few[1] != '1' else ''}"
    if length := _SHORT.fullmatch(message):
        return f"at least {length[1]} characters"
    if bound := _BOUND.fullmatch(message):
        return f"a number {_range(fault, field) or bound[1]}"
    kind = fault["type"].partition("_")[0]
    if kind in _EXPECTED and fault["type"] != "string_pattern_mismatch":
        return _EXPECTED[kind]
    return message.removeprefix("Input should be ")


def _range(fault: ErrorDetails, field: FieldInfo | None) -> str:
    """Return both limits of the number in `field` as text; empty unless both exist and `fault` exceeds one of them."""
    limits = {
        sign: getattr(limit, sign)
        for limit in (field.metadata if field else ())
        for sign in (*_BELOW, *_ABOVE)
        if getattr(limit, sign, None) is not None
    }
    exceeded = any(limits.get(sign) == value for sign, value in fault.get("ctx", {}).items())
    ends = [
        f"{words} {limits[sign]}".removesuffix(".0")
        for side in (_BELOW, _ABOVE)
        for sign, words in side.items()
        if sign in limits
    ]
    return " and ".join(ends) if exceeded and len(ends) == 2 else ""
