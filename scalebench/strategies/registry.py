"""Finds strategies by name: every module of this package, and the entry points `scalebench.strategies` of others."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import ValidationError

import scalebench.strategies as package
from scalebench.errors import StudyError, nearest
from scalebench.strategies.base import Strategy

_S = TypeVar("_S", bound=type[Strategy])
_CLASSES: dict[tuple[str, str], type[Strategy]] = {}
ANY = "*"


def register(engine: str = ANY) -> Callable[[_S], _S]:
    """Class decorator: this is strategy `cls.name` on `engine` (`horovod` has a real and a virtual class)."""

    def add(cls: _S) -> _S:
        key = (cls.name, engine)
        if key in _CLASSES:
            raise ValueError(f"strategy {cls.name!r} on engine {engine!r} is registered twice")
        _CLASSES[key] = cls
        return cls

    return add


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for point in entry_points(group="scalebench.strategies"):
        point.load()


def names() -> list[str]:
    """Every known strategy."""
    _load()
    return sorted({name for name, _ in _CLASSES})


def find(name: str, engine: str = ANY) -> type[Strategy]:
    """The class that is `name` on `engine`, else the one for any engine."""
    _load()
    if name not in names():
        raise StudyError(f"unknown strategy {name!r}; {nearest(name, names())}")
    return _CLASSES.get((name, engine)) or _CLASSES.get((name, ANY)) or _first(name)


def create(name: str, options: dict[str, Any], engine: str = ANY) -> Strategy:
    """A strategy with its options checked; the message names the option and what was expected."""
    try:
        return find(name, engine)(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        fields = find(name, engine).model_fields
        hint = f"; {nearest(where, fields)}" if where not in fields and fields else ""
        raise StudyError(f"strategy {name}: option {where!r}: {first['msg']}{hint}") from None


def _first(name: str) -> type[Strategy]:
    """A class of that name, a native one if there is one: what stands in for it virtually is no answer elsewhere."""
    engines = sorted((engine for known, engine in _CLASSES if known == name), key=lambda engine: engine == "virtual")
    return _CLASSES[name, engines[0]]
