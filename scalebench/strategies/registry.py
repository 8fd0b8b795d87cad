"""Finds strategies: those of this package, of the entry points `scalebench.strategies` of others, and a user's own.

A user's own is `file.py:Class`; one class serves all engines there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from scalebench.errors import OWN_MODULE, StudyError
from scalebench.registry import ANYWHERE, Registry
from scalebench.strategies.base import Strategy
from scalebench.system.user_code import STRATEGY_FORM, load_own, strategy_file

_S = TypeVar("_S", bound=Strategy)
_STRATEGIES: Registry[Strategy] = Registry("strategy", StudyError, "scalebench.strategies", "scalebench.strategies")
_WRITTEN_AS_ONE = re.compile(r"(?P<name>[\w-]+)(?:[:(,]\s*|\s+)(?P<option>\w+)\s*[=:]\s*(?P<value>[^)]*)\)?")

names = _STRATEGIES.names


def find(name: str, engine: str = ANYWHERE) -> type[Strategy]:
    """Find the class registered as `name` for `engine`; raise StudyError if there is none."""
    if strategy_file(name) is not None:
        return _own_class(name)
    if written := _WRITTEN_AS_ONE.fullmatch(name):
        better = f"'{written['name']}: {{{written['option']}: {written['value'].strip()}}}'"
        raise StudyError(f"unknown strategy {name!r}; options are written as a mapping: {better}")
    return _STRATEGIES.find(name, engine)


def create(name: str, options: dict[str, Any], engine: str = ANYWHERE) -> Strategy:
    """Make strategy `name` with checked `options`; an error names the option and the expected value."""
    return _STRATEGIES.check(find(name, engine), options, name)


def is_deterministic(name: str) -> bool:
    """Return True if final weights do not depend on timing; else, or if unknown here, False."""
    try:
        return strategy_file(name) is None and find(name).deterministic
    except StudyError:
        return False


def preferred_engine(name: str) -> str:
    """Return the engine that a strategy prefers; empty if it is unknown here."""
    try:
        return "" if strategy_file(name) is not None else next(iter(find(name).engines), "")
    except StudyError:
        return ""


def register(engine: str = ANYWHERE) -> Callable[[type[_S]], type[_S]]:
    """Class decorator: this is strategy `cls.name` on `engine` (`horovod` has a real and a virtual class).

    A class that was named as file.py:Class is known by that alone.
    """
    return lambda cls: cls if cls.__module__.startswith(OWN_MODULE) else _STRATEGIES.add(cls, engine)


def _own_class(name: str) -> type[Strategy]:
    found = load_own("strategy", name, STRATEGY_FORM, "class", StudyError)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise StudyError(f"strategy {name!r}: expected a class derived from scalebench.strategies.base.Strategy")
    if found.train is Strategy.train and found.train_epoch is Strategy.train_epoch:
        raise StudyError(f"strategy {name!r}: the class defines neither train_epoch(self, worker, epoch) nor train")
    if not hasattr(found, "name"):
        found.name = name
    if unsaid := _STRATEGIES.missing(found):
        lines = " and ".join(f"{fact}: ClassVar[str] = ..." for fact in unsaid)
        raise StudyError(f"strategy {name!r}: the class lacks {lines}")
    return found
