"""Description of a strategy for readers: its rule, and its options with their types, defaults and ranges."""

from __future__ import annotations

import inspect
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from scalebench.strategies.base import Strategy

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Option(NamedTuple):
    """One option, as text; `allowed` is its range or its choices, empty if any value of the type will do."""

    name: str
    type: str
    default: str
    allowed: str
    description: str


def rule_of(cls: type[Strategy]) -> list[str]:
    """The docstrings that state the rule: of the class that names the strategy, then of its bases in the same file."""
    family = [each for each in cls.__mro__ if issubclass(each, Strategy) and each is not Strategy]
    named = next((each for each in family if "name" in vars(each)), family[0])  # a real form says how it is run
    base = [each for each in family if each.__module__ == named.__module__ and each is not named]
    return [inspect.cleandoc(each.__doc__) for each in (named, *base) if each.__doc__ and each not in (Strategy,)]


def options_of(cls: type[Strategy]) -> list[Option]:
    """All options: those of the strategy itself, then those of its bases."""
    names = [name for each in cls.__mro__ for name in vars(each).get("__annotations__", ()) if name in cls.model_fields]
    found = []
    for name in dict.fromkeys(names):
        field = cls.model_fields[name]
        default = str(field.default).lower() if isinstance(field.default, bool | None) else str(field.default)
        found.append(Option(name, _type(field.annotation), default, _allowed(field), field.description or ""))
    return found


def _type(annotation: Any) -> str:
    """`int`, `choice` of a Literal, `int or none`."""
    origin = get_origin(annotation)
    if origin is Literal:
        return "choice"
    if origin in (Union, UnionType):
        return " or ".join("none" if part is NoneType else _type(part) for part in get_args(annotation))
    if origin is dict:
        return "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _allowed(field: FieldInfo) -> str:
    choices = [part for part in (field.annotation, *get_args(field.annotation)) if get_origin(part) is Literal]
    if choices:
        return " | ".join(str(value) for value in get_args(choices[0]))
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]
    return ", ".join(bounds)
