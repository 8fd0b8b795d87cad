"""Shares as people write them: `5%`, `5 %` or `0.05`."""

from __future__ import annotations

import math
import re
from typing import Any

_PERCENT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,9})?|\.\d{1,9})\s*%\s*")
_EXPECTED = "expected a share such as 5% or 0.05"


def parse_share(value: Any) -> float:
    """The number that `value` says, 0.05 for `5%`.

    Raises:
        ValueError: it is neither a percentage nor a number, or a number above 1 that may have meant per cent.
    """
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        return float(match[1]) / 100
    try:
        share = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        share = None
    if share is None or not math.isfinite(share):
        raise ValueError(f"{_EXPECTED}, got {str(value)[:40]!r}")
    if share > 1:
        raise ValueError(f"{_EXPECTED}, got {share:g}; write {share:g}% for per cent")
    return share
