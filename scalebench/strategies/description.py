"""What a strategy says of itself: its rule in words and formula, its options with their types, defaults and ranges."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from scalebench.errors import StudyError
from scalebench.strategies.base import Strategy
from scalebench.strategies.traffic import SYMBOLS, readable, symbols_of
from scalebench.study.spec import Training

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Option(NamedTuple):
    """One option, as text; `allowed` is its range or its choices, empty if any value of the type will do."""

    name: str
    type: str
    default: str
    allowed: str
    description: str


def rule_of(cls: type[Strategy]) -> list[str]:
    """The docstrings that state the rule: of the class that names the strategy, then of bases that tell a part."""
    family = [each for each in cls.__mro__ if issubclass(each, Strategy) and each is not Strategy]
    while "name" not in vars(family[0]) and len(family) > 1:
        family.pop(0)  # a real or a virtual form: says how it is carried out
    telling = family[:1] + [each for each in family[1:] if vars(each).get("in_rules", False)]
    return [inspect.cleandoc(each.__doc__) for each in telling if each.__doc__ and each.__doc__ != Strategy.__doc__]


def options_of(cls: type[Strategy]) -> list[Option]:
    """Every option: first those of the strategy itself, then what it shares with its family."""
    names = [name for each in cls.__mro__ for name in vars(each).get("__annotations__", ()) if name in cls.model_fields]
    fields = [(name, cls.model_fields[name]) for name in dict.fromkeys(names)]
    return [
        Option(name, _type(field.annotation), _default(field), _allowed(field), field.description or "")
        for name, field in fields
    ]


class Sending(NamedTuple):
    """What a worker sends in an epoch, as formulas to be read, and the engines on which that is so."""

    syncs: str
    bytes: str
    engines: tuple[str, ...]


def sendings_of(forms: Mapping[str, Strategy]) -> list[Sending]:
    """What the forms of one strategy send, by engine; engines that send alike stand together."""
    found: dict[tuple[str, str], list[str]] = {}
    for engine, form in forms.items():
        texts = {"syncs": form.syncs_formula, "bytes": form.bytes_formula}
        syncs, sent = (f"{'at most ' if what in form.at_most else ''}{readable(texts[what])}" for what in texts)
        found.setdefault((syncs, sent), []).append(engine)
    return [Sending(*texts, tuple(engines)) for texts, engines in found.items()]


def lets_rows_move(strategy: Strategy) -> bool:
    """Whether rows may change workers between epochs: not at one worker, nor where data never leave a client."""
    try:
        strategy.check_training(Training(shuffle="global"))
    except StudyError:
        return False
    return not strategy.single_worker


def symbols_used(*forms: Strategy, moved: str = "") -> dict[str, str]:
    """What the symbols in the formulas of a strategy's forms, and in `moved`, mean; options left out."""
    known = {symbol: text for form in forms for symbol, text in {**SYMBOLS, **form.counts}.items()}
    used = [symbol for form in forms for symbol in symbols_of(f"{form.syncs_formula} + {form.bytes_formula}")]
    return {symbol: known[symbol] for symbol in dict.fromkeys([*used, *symbols_of(moved)]) if symbol in known}


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


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
