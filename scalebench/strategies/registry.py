"""Strategies by name: registration, construction, and description of their rules and options for readers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from scalebench.comm.base import Capability
from scalebench.errors import OWN_MODULE, StudyError
from scalebench.registry import ANYWHERE, Registry
from scalebench.strategies.base import Strategy
from scalebench.strategies.traits import Varied
from scalebench.system.user_code import STRATEGY_FORM, load_own, strategy_file

_S = TypeVar("_S", bound=Strategy)
_STRATEGIES: Registry[Strategy] = Registry(
    "strategy", StudyError, "scalebench.strategies", "scalebench.strategies"
)
# As people write it: name:option=value, name(option=value), name option=value.
_WRITTEN_AS_ONE = re.compile(
    r"(?P<name>[\w-]+)(?:[:(,]\s*|\s+)(?P<option>\w+)\s*[=:]\s*(?P<value>[^)]*)\)?"
)

names = _STRATEGIES.names
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def find(name: str, engine: str = ANYWHERE) -> type[Strategy]:
    """Find the class registered as `name` for `engine`; raise StudyError if there is none."""
    if strategy_file(name) is not None:
        return _own_class(name)
    if written := _WRITTEN_AS_ONE.fullmatch(name):
        better = (
            f"'{written['name']}: {{{written['option']}: {written['value'].strip()}}}'"
        )
        raise StudyError(
            f"unknown strategy {name!r}; options are written as a mapping: {better}"
        )
    return _STRATEGIES.find(name, engine)


def create(name: str, options: dict[str, Any], engine: str = ANYWHERE) -> Strategy:
    """Make strategy `name` with checked `options`; an error names the option and the expected value."""
    return _STRATEGIES.check(find(name, engine), options, name)


def is_deterministic(name: str) -> bool:
    """Return True if final weights do not depend on timing; else, or if unknown here, False."""
    try:
        # A file of the user's is not loaded to read results: it may be gone, or
        # changed.
        return strategy_file(name) is None and find(name).deterministic
    except StudyError:
        return False


def preferred_engine(name: str) -> str:
    """Return the engine that a strategy prefers; empty if it is unknown here."""
    try:
        return (
            ""
            if strategy_file(name) is not None
            else next(iter(find(name).engines), "")
        )
    except StudyError:
        return ""


def needs_on(strategy: Strategy, engine: str) -> frozenset[Capability]:
    """Return the capabilities that `strategy` with its options needs of `engine`, where it may have another class."""
    # the class of a file has a name by which it is not registered
    is_own = type(strategy).__module__.startswith(OWN_MODULE)
    cls = type(strategy) if is_own else find(strategy.name, engine)
    return strategy.needs if cls is type(strategy) else cls.requires


def runs_as_simulated(name: str, engine: str) -> bool:
    """Return True if real runs on `engine` have the program of virtual ones, and not a library's own."""
    return find(name, engine) is find(name, "virtual")


def is_of_a_library(strategy: Strategy) -> bool:
    """Return True for what one library alone does, by an engine of the same name."""
    return strategy.engines == (strategy.name,)


def that_vary(quantity: Varied) -> list[str]:
    """Return the strategies of which an option sets `quantity`."""
    return [name for name in names() if quantity in create(name, {}).traits.options]


def least_of(strategy: Strategy, option: str) -> int:
    """Return the least whole number that an option takes, or 1 if it states none."""
    metadata = type(strategy).model_fields[option].metadata
    return next((bound.ge for bound in metadata if hasattr(bound, "ge")), 1)


def register(engine: str = ANYWHERE) -> Callable[[type[_S]], type[_S]]:
    """Class decorator: this is strategy `cls.name` on `engine` (`horovod` has a real and a virtual class).

    A class that was named as file.py:Class is known by that alone.
    """
    return lambda cls: (
        cls if cls.__module__.startswith(OWN_MODULE) else _STRATEGIES.add(cls, engine)
    )


def _own_class(name: str) -> type[Strategy]:
    found = load_own("strategy", name, STRATEGY_FORM, "class", StudyError)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise StudyError(
            f"strategy {name!r}: expected a class derived from scalebench.strategies.base.Strategy"
        )
    if found.train is Strategy.train and found.train_epoch is Strategy.train_epoch:
        raise StudyError(
            f"strategy {name!r}: the class defines neither train_epoch(self, worker, epoch) nor train"
        )
    # Its file and class are name enough.
    if not hasattr(found, "name"):
        found.name = name
    if unsaid := _STRATEGIES.missing(found):
        lines = " and ".join(f'{fact} = "..."' for fact in unsaid)
        raise StudyError(f"strategy {name!r}: the class lacks {lines}")
    return found


class Option(NamedTuple):
    """One option, as text; `allowed` is its range or its choices, empty if any value of the type will do."""

    name: str
    type: str
    default: str
    allowed: str
    description: str


def rule_of(cls: type[Strategy]) -> list[str]:
    """The docstrings that state the rule: of the class that names the strategy, then of its bases in the same file."""
    family = [
        each
        for each in cls.__mro__
        if issubclass(each, Strategy) and each is not Strategy
    ]
    # a real form says how it is run
    named = next((each for each in family if "name" in vars(each)), family[0])
    base = [
        each
        for each in family
        if each.__module__ == named.__module__ and each is not named
    ]
    return [inspect.cleandoc(each.__doc__) for each in (named, *base) if each.__doc__]


def options_of(cls: type[Strategy]) -> list[Option]:
    """All options: those of the strategy itself, then those of its bases."""
    # pydantic lists the fields of bases first.
    names = [
        name
        for each in cls.__mro__
        for name in vars(each).get("__annotations__", ())
        if name in cls.model_fields
    ]
    found = []
    for name in dict.fromkeys(names):
        field = cls.model_fields[name]
        default = (
            str(field.default).lower()
            if isinstance(field.default, bool | None)
            else str(field.default)
        )
        found.append(
            Option(
                name,
                _type(field.annotation),
                default,
                _allowed(field),
                field.description or "",
            )
        )
    return found


def _type(annotation: Any) -> str:
    """`int`, `choice` of a Literal, `int or none`."""
    origin = get_origin(annotation)
    if origin is Literal:
        return "choice"
    if origin in (Union, UnionType):
        return " or ".join(
            "none" if part is NoneType else _type(part) for part in get_args(annotation)
        )
    if origin is dict:
        return "mapping"
    return getattr(annotation, "__name__", str(annotation))


def _allowed(field: FieldInfo) -> str:
    # A Literal may be one of several types, as that of an option that can be none.
    choices = [
        part
        for part in (field.annotation, *get_args(field.annotation))
        if get_origin(part) is Literal
    ]
    if choices:
        return " | ".join(str(value) for value in get_args(choices[0]))
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]
    return ", ".join(bounds)
