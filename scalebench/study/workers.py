"""Worker counts as people write them: `1..64`, `1..64:8`, `1,2,6`."""

from __future__ import annotations

import re
from typing import Any

_EXPECTED = "expected counts such as 1..64 (powers of two), 1..64:8 (1,8,16,...) or 1,2,6"
_LIMIT = 1_000_000
_MOST_DIGITS = 18  # read of a number, which is far beyond the limit already


def parse_workers(value: Any) -> list[int]:
    """The sorted, distinct worker counts that `value` says.

    `a..b` is a, then each power of two above a, up to b; `a..b:s` is a, then each multiple of s above a, up to b.

    Raises:
        ValueError: the text is none of the forms, a count is below 1, or a range runs backwards.
    """
    parts = value if isinstance(value, list) else str(value).split(",")
    counts: set[int] = set()
    for part in parts:
        counts.update(_expand(str(part).strip()))
    if not counts:
        raise ValueError(f"no worker counts; {_EXPECTED}")
    return sorted(counts)


def _expand(text: str) -> list[int]:
    match = re.fullmatch(r"([0-9]+)(?:\.\.([0-9]+)(?::([0-9]+))?)?", text)
    if not match:
        raise ValueError(f"cannot read the worker counts {text[:60]!r}; {_EXPECTED}")
    first, last, step = (int(group[:_MOST_DIGITS]) if group else None for group in match.groups())
    assert first is not None
    last = first if last is None else last
    if first < 1 or step == 0 or max(first, last) > _LIMIT:
        raise ValueError(f"worker counts lie between 1 and {_LIMIT:,}, got {text[:60]!r}; {_EXPECTED}")
    if last < first:
        raise ValueError(f"the range {text!r} runs backwards; write {last}..{first}")
    if step:
        return [first, *range((first // step + 1) * step, last + 1, step)]
    powers = (1 << bit for bit in range(last.bit_length()))
    return [first, *(power for power in powers if first < power <= last)]
