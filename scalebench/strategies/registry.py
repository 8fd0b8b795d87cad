"""Finds strategies by name and engine, in this package and the entry points `scalebench.strategies` of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scalebench.errors import StudyError
from scalebench.registry import ANYWHERE, Registry
from scalebench.strategies.base import Strategy

_S = TypeVar("_S", bound=Strategy)
_STRATEGIES: Registry[Strategy] = Registry("strategy", StudyError, "scalebench.strategies", "scalebench.strategies")

names = _STRATEGIES.names
find = _STRATEGIES.find
create = _STRATEGIES.create


def is_deterministic(name: str) -> bool:
    """Whether final weights do not depend on who is faster; of a strategy that is not installed nothing is promised."""
    try:
        return find(name).deterministic
    except StudyError:
        return False


def register(engine: str = ANYWHERE) -> Callable[[type[_S]], type[_S]]:
    """Class decorator: this is strategy `cls.name` on `engine` (`horovod` has a real and a virtual class)."""
    return lambda cls: _STRATEGIES.add(cls, engine)
