"""What does not fit, in the words of whoever wrote it: pydantic's findings, one for each key, as half a line each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
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
}  # by the first word of pydantic's type of fault
_BOUND = re.compile(r"Input should be ((?:greater|less) than .*)")
_FEW = re.compile(r"\w+ should have at least (\d+) items? after validation, not \d+")
_SHORT = re.compile(r"String should have at least (\d+) characters")
_LONGEST = 60  # of a value that is shown


class Fault(NamedTuple):
    """One key that does not fit. `message` says what was expected and what came instead; empty for an unknown key."""

    key: tuple[str, ...]
    unknown: bool
    missing: bool
    message: str

    @property
    def path(self) -> str:
        """The key as it is written: `virtual.slow_links.3`."""
        return ".".join(self.key)


def faults_of(error: ValidationError) -> list[Fault]:
    """Every key that does not fit, an unknown one before others: a missing one is often the same slip.

    What each branch of a union expected stands in one message: `expected an integer or 'auto', got 'x'`.
    """
    by_key: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for fault in error.errors():
        by_key.setdefault(_key(fault), []).append(fault)
    found = [
        Fault(key, _is(faults, "extra_forbidden"), _is(faults, "missing"), _message(faults))
        for key, faults in by_key.items()
    ]
    return sorted(found, key=lambda fault: not fault.unknown)


def short(value: Any) -> str:
    """`value` as it would be written, cut where it is long."""
    try:
        text = one_line(repr(value))
    except (ValueError, RecursionError):  # an integer too long to print, a structure too deep
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def one_line(text: str) -> str:
    """`text` with every run of white space as one space."""
    return " ".join(text.split())


def _is(faults: Sequence[ErrorDetails], kind: str) -> bool:
    return faults[0]["type"] == kind


def _key(fault: ErrorDetails) -> tuple[str, ...]:
    """Where it is, without the parts that name a branch of a union; the last part of an unknown key is always meant."""
    loc = fault["loc"]
    last = len(loc) - (fault["type"] == "extra_forbidden")
    return tuple(str(part) for place, part in enumerate(loc) if place >= last or not _is_branch(part))


def _is_branch(part: Any) -> bool:
    """Whether a part of pydantic's location names a union's branch, such as `literal['auto']`, and no key."""
    return isinstance(part, str) and bool(re.search(r"\[.*\]$|^(int|str|float|bool|constrained-\w+)$", part))


def _message(faults: Sequence[ErrorDetails]) -> str:
    if own := next((fault for fault in faults if fault["type"] == "value_error"), None):
        text = one_line(own["msg"].removeprefix("Value error, "))
        return text[:1].lower() + text[1:]
    wanted = " or ".join(dict.fromkeys(map(_wanted, faults)))
    return f"expected {wanted}, got {short(faults[0]['input'])}"


def _wanted(fault: ErrorDetails) -> str:
    message = one_line(fault["msg"])
    if few := _FEW.fullmatch(message):
        return f"at least {few[1]} item{'s' if few[1] != '1' else ''}"
    if length := _SHORT.fullmatch(message):
        return f"at least {length[1]} characters"
    if bound := _BOUND.fullmatch(message):
        return f"a number {bound[1]}"
    kind = fault["type"].partition("_")[0]
    if kind in _EXPECTED and fault["type"] != "string_pattern_mismatch":
        return _EXPECTED[kind]
    return message.removeprefix("Input should be ")
