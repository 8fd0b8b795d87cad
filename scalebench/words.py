"""Numbers as one says them: `3 runs`; how long something will take, before it is known: `40 s`, `47 min`, `3.2 h`."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")


def natural(text: str) -> tuple[tuple[str, float], ...]:
    """A key for sorting in which numbers count as numbers: `steps=4` before `steps=16`."""
    parts = _NUMBER.split(text)
    return tuple(zip(parts[::2], [*map(float, parts[1::2]), 0.0], strict=True))


def counted(number: int, noun: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def roughly(seconds: float) -> str:
    """Two digits in the unit that suits them, at least `1 s`; for what was measured see `analysis.formatting`."""
    if seconds < 90:
        return f"{max(1, seconds):.0f} s"
    minutes = seconds / 60
    if minutes < 90:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 10 else f"{hours:.0f} h" if hours < 48 else f"{hours / 24:.0f} days"
