"""Parsers of worker counts (`1..64`, `1..64:8`, `1,2,6`), shares (`5%`, `0.05`) and durations (`02:30:00`)."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

_COUNTS = "expected counts such as 1..64 (powers of two), 1..64:8 (1,8,16,...) or 1,2,6"
_DURATION = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_LIMIT, _MOST = 1_000_000, 1000  # the largest count, and how many there may be


def parse_workers(value: Any) -> list[int]:
    """Return the sorted, distinct worker counts of a text or list.

    `a..b` is a, then each power of two above a, up to b; `a..b:s` is a, then each multiple of s above a, up to b.

    Raises:
        ValueError: the text has another form, too many counts, one below 1, or a range that runs backwards.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    counts: set[int] = set()
    for part in parts:
        counts.update(_expand(str(part).strip()))
    if not 1 <= len(counts) <= _MOST:
        raise ValueError(f"expected 1 to {_MOST:,} worker counts, got {len(counts):,}; {_COUNTS}")
    return sorted(counts)


def _expand(text: str) -> list[int]:
    match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+)(?::([0-9]+))?)?", text)
    if not match:
        raise ValueError(f"cannot read the worker counts {text[:60]!r}; {_COUNTS}")
    first, last, step = (int(group) if group else None for group in match.groups())
    assert first is not None
    last = first if last is None else last
    if first < 1 or step == 0 or max(first, last) > _LIMIT:
        raise ValueError(f"worker counts lie between 1 and {_LIMIT:,}, got {text[:60]!r}; {_COUNTS}")
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
        raise ValueError(f"expected a share such as 5% or 0.05, got {share:g}; write {share:g}% for per cent")
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
        raise ValueError(f"expected a time such as 02:30:00 or 1-12:00:00, got {str(value)[:40]!r}")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    total = ((24 * days + hours) * 60 + minutes) * 60 + seconds
    if not total:
        raise ValueError(f"expected a time above zero, got {value!r}")
    return total


Share = Annotated[
    float,
    BeforeValidator(parse_share),
    WithJsonSchema({"description": "5% or 0.05", "anyOf": [{"type": "string"}, {"type": "number", "maximum": 1}]}),
]
