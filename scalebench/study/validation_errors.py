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
_BRANCH = re.compile(r".*\[.*\]|int|str|float|bool|constrained-\w+")  # of a union, in pydantic's location
_LENGTH = re.compile(r"\w+ should have (at least \d+ \w+).*")
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


def find_faults(error: ValidationError) -> list[ValidationFault]:
    """Return one fault for each invalid key, unknown keys first.

    The branches of a union share one message: `expected an integer or 'auto', got 'x'`.
    """
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for fault in error.errors():
        by_key.setdefault(_key(fault), []).append(fault)
    found = [
        ValidationFault(key, faults[0]["type"] == "extra_forbidden", faults[0]["type"] == "missing", _message(faults))
        for key, faults in by_key.items()
    ]
    return sorted(found, key=lambda fault: not fault.unknown)


def _key(fault: ErrorDetails) -> tuple[str, ...]:
    """Return the key of a fault without the parts of pydantic's location that name a branch of a union."""
    loc = fault["loc"]
    written = len(loc) - (fault["type"] == "extra_forbidden")  # from here on a part is a key, whatever it looks like
    return tuple(str(part) for place, part in enumerate(loc) if place >= written or not _BRANCH.fullmatch(str(part)))


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


def _message(faults: Sequence[ErrorDetails]) -> str:
    if own := next((fault for fault in faults if fault["type"] == "value_error"), None):
        text = one_line(own["msg"].removeprefix("Value error, "))
        return text[:1].lower() + text[1:]
    expected = " or ".join(dict.fromkeys(map(_expected, faults)))
    given = faults[0]["input"]
    return f"expected {expected}, got {'nothing' if given is None else short(given)}"


def _expected(fault: ErrorDetails) -> str:
    message, kind = one_line(fault["msg"]), fault["type"].partition("_")[0]
    if length := _LENGTH.fullmatch(message):
        return length[1]
    if kind in _EXPECTED and fault["type"] != "string_pattern_mismatch":
        return _EXPECTED[kind]
    message = message.removeprefix("Input should be ")
    return f"a number {message}" if message.startswith(("greater than", "less than")) else message
