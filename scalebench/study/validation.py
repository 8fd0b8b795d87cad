"""Safe reading of untrusted YAML and of counts, shares and durations; faults are told in one line each."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from scalebench.errors import UsageError, nearest

# limits of size and depth come before parsing: a study may come from someone else
_MAX_BYTES = 1_000_000
_MAX_DEPTH = 40  # of nesting
# by the first word of pydantic's error type
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
}
# of a union, in pydantic's location
_BRANCH = re.compile(r".*\[.*\]|int|str|float|bool|constrained-\w+")
_LENGTH = re.compile(r"\w+ should have (at least \d+ \w+).*")
_LONGEST = 60  # characters of a value in a message
_Model = TypeVar("_Model", bound=BaseModel)
# the C parser, much faster, where yaml was built with it
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_COUNTS = "expected counts such as 1..64 (powers of two), 1..64:8 (1,8,16,...) or 1,2,6"
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_LIMIT, _MOST = 1_000_000, 1000  # the largest count, and how many there may be


def read_as(
    path: Path, model: type[_Model], error: type[UsageError], what: str
) -> _Model:
    """Return the YAML file `path` as a `model`; `what` names its kind in messages.

    Raises:
        UsageError: (of class `error`) as `read_mapping`, or a key or value is wrong; one line that names file and key.
    """
    try:
        return model.model_validate(read_mapping(path, error, what))
    except ValidationError as fault:
        raise error(explain(fault, model, str(path))) from None


def read_mapping(path: Path, error: type[UsageError], what: str) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`; `what` names its kind in messages.

    Raises:
        UsageError: (of class `error`) not readable, not YAML, not a mapping; one line with file, line and column.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
        raise error(f"cannot read the {what} file {str(path)!r}: {reason}") from None
    if len(raw) > _MAX_BYTES:
        raise error(
            f"{path}: larger than {_MAX_BYTES:,} bytes; expected a {what} in YAML"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"{path}: not text in UTF-8; expected a {what} in YAML") from None
    document = parse(text, str(path), error)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise error(
            f"{path}: expected a mapping of keys to values, got {short(document)}"
        )
    for key in document:
        if not isinstance(key, str):
            raise error(f"{path}: expected keys that are words, got {key!r}")
    return document


def parse(text: str, where: str, error: type[UsageError]) -> Any:
    """Return the YAML document `text`: plain values only, no tags or aliases, unique keys.

    Raises:
        UsageError: (of class `error`) the text is not such a document; names `where`, line and column.
    """
    try:
        # Before any value is built: a few aliases may stand for a billion of them.
        _check_events(text, where, error)
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a subclass of the safe loader
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        TypeError,
    ) as cause:  # an impossible date, 5,000 digits
        mark = getattr(cause, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = (
            getattr(cause, "problem", None)
            or getattr(cause, "reason", None)
            or str(cause)
        )
        if mark is not None and _is_tab(text, mark.line, mark.column):
            problem = "a tab stands where spaces are expected"
        raise error(f"{where}{place}: not YAML: {one_line(problem)}") from None


def _is_tab(text: str, line: int, column: int) -> bool:
    """Return True if the character at a place of `text`, both counted from 0, is a tab."""
    lines = text.split("\n")
    return line < len(lines) and lines[line][column : column + 1] == "\t"


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Return a validation error in one line: file, key path, expected value, nearest known key.

    An unknown key is named before a missing one, as both are often one misspelt key;
    further unknown keys follow.
    """
    faults = find_faults(error)
    first = faults[0]
    if first.unknown:
        *path, key = first.key
        missing = [
            fault.key[-1]
            for fault in faults
            if fault.missing and list(fault.key[:-1]) == path
        ]
        close = nearest(key, fields_at(model, path), missing)
        others = ", ".join(repr(fault.path) for fault in faults[1:] if fault.unknown)
        return f"{where}: unknown key {first.path!r}; {close}{f' (also unknown: {others})' if others else ''}"
    if first.missing:
        meaning = fields_at(model, first.key[:-1])[first.key[-1]].description
        return f"{where}: key {first.path!r} is missing{f' ({meaning})' if meaning else ''}"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if not first.key:
        return f"{where}: {first.message}"
    flag = where.removeprefix("--").replace("-", "_")
    key = (
        ""
        if first.path in (flag, {"strategy": "strategies"}.get(flag))
        else f"key {first.path!r}: "
    )
    return f"{where}: {key}{first.message}{more}"


class _StrictLoader(_Loader):  # type: ignore[misc]
    """Safe loader that also reads 1e-6 as a number and refuses repeated keys."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        # yaml takes the last of two equal keys in silence
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain value", key_node.start_mark
                )
            if key in seen:
                problem = f"the key {key!r} stands twice"
                raise yaml.constructor.ConstructorError(
                    None, None, problem, key_node.start_mark
                )
            seen.add(key)
        return dict(super().construct_mapping(node, deep=deep))


# YAML 1.1 requires a dot, as in 1.0e-6, and reads 1e-6 as text.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _check_events(text: str, where: str, error: type[UsageError]) -> None:
    """Refuse tags, anchors, aliases and deep nesting before any value is built."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        mark = f"{where}, line {event.start_mark.line + 1}, column {event.start_mark.column + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise error(
                f"{mark}: anchors and aliases are not supported; write the value out"
            )
        if getattr(event, "tag", None):
            raise error(
                f"{mark}: the tag {event.tag!r} is not allowed; write a plain value"
            )
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
            if depth > _MAX_DEPTH:
                raise error(f"{mark}: nested deeper than {_MAX_DEPTH} levels")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1


class StrictModel(BaseModel):
    """Frozen model that refuses unknown keys, infinite numbers, and booleans (`yes`, `off`, ...) as numbers.

    pydantic reads `True` as 1: `epochs: yes` would train for one epoch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if _has_bool(value) and not _accepts_bool(
            cls.model_fields[info.field_name].annotation
        ):
            raise ValueError("expected no yes or no (true, false, on, off) here")
        return value


def _has_bool(value: Any) -> bool:
    """Return True if `value` is a bool or a list or mapping that contains one."""
    if isinstance(value, list | tuple):
        return any(map(_has_bool, value))
    return (
        _has_bool(list(value.values()))
        if isinstance(value, dict)
        else isinstance(value, bool)
    )


def _accepts_bool(annotation: Any) -> bool:
    """Return True if a value of `annotation` may contain a bool; nested models validate their own values."""
    if annotation in (bool, Any) or (
        isinstance(annotation, type) and issubclass(annotation, BaseModel)
    ):
        return True
    return any(_accepts_bool(part) for part in get_args(annotation))


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
        ValidationFault(
            key,
            faults[0]["type"] == "extra_forbidden",
            faults[0]["type"] == "missing",
            _message(faults),
        )
        for key, faults in by_key.items()
    ]
    return sorted(found, key=lambda fault: not fault.unknown)


def _key(fault: ErrorDetails) -> tuple[str, ...]:
    """Return the key of a fault without the parts of pydantic's location that name a branch of a union."""
    loc = fault["loc"]
    # from here on a part is a key, whatever it looks like
    written = len(loc) - (fault["type"] == "extra_forbidden")
    return tuple(
        str(part)
        for place, part in enumerate(loc)
        if place >= written or not _BRANCH.fullmatch(str(part))
    )


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
    except (
        ValueError,
        RecursionError,
    ):  # an integer too long to print, a structure too deep
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
    return (
        f"a number {message}"
        if message.startswith(("greater than", "less than"))
        else message
    )


def parse_workers(value: Any) -> list[int]:
    """Return the sorted, distinct worker counts of a text or list.

    `a..b` is a, then each power of two above a, up to b; `a..b:s` is a, then each
    multiple of s above a, up to b.

    Raises:
        ValueError: the text has another form, too many counts, one below 1, or a range that runs backwards.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    counts: set[int] = set()
    for part in parts:
        counts.update(_expand(str(part).strip()))
    if not 1 <= len(counts) <= _MOST:
        raise ValueError(
            f"expected 1 to {_MOST:,} worker counts, got {len(counts):,}; {_COUNTS}"
        )
    return sorted(counts)


def _expand(text: str) -> list[int]:
    match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+)(?::([0-9]+))?)?", text)
    if not match:
        raise ValueError(f"cannot read the worker counts {text[:60]!r}; {_COUNTS}")
    first, last, step = (int(group) if group else None for group in match.groups())
    assert first is not None
    last = first if last is None else last
    if first < 1 or step == 0 or max(first, last) > _LIMIT:
        raise ValueError(
            f"worker counts lie between 1 and {_LIMIT:,}, got {text[:60]!r}; {_COUNTS}"
        )
    if last < first:
        raise ValueError(f"the range {text!r} runs backwards; write {last}..{first}")
    if step:
        return [first, *range((first // step + 1) * step, last + 1, step)]
    powers = (1 << bit for bit in range(last.bit_length()))
    return [first, *(power for power in powers if first < power <= last)]


def parse_share(value: Any) -> float:
    """Return the share of a number or percentage: 0.05 for `5%`.

    Raises:
        ValueError: the value is neither a percentage nor a number, or is a number above 1.
    """
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf:
        raise ValueError(f"expected a share such as 5% or 0.05, got {text[:40]!r}")
    if text.endswith("%"):
        return share / 100
    if share > 1:
        raise ValueError(
            f"expected a share such as 5% or 0.05, got {share:g}; write {share:g}% for per cent"
        )
    return share


def parse_duration(value: Any) -> int:
    """Return the seconds of `02:30:00`, `1-12:00:00` or a number of seconds.

    YAML itself reads 12:30:00 as a number to the base of 60, which are these seconds.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    parts = _DURATION.fullmatch(str(value).strip())
    if not parts:
        raise ValueError(
            f"expected a time such as 02:30:00 or 1-12:00:00, got {str(value)[:40]!r}"
        )
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    total = ((24 * days + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"expected a time above zero, got {value!r}")
    return total


Share = Annotated[
    float,
    BeforeValidator(parse_share),
    WithJsonSchema(
        {
            "description": "5% or 0.05",
            "anyOf": [{"type": "string"}, {"type": "number", "maximum": 1}],
        }
    ),
]
