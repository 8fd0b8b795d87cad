"""Durations of commands on a study, kept beside its records in `durations.json` as seconds by command.

The file only serves estimates of waiting time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalebench.records.folder import DURATIONS
from scalebench.system.atomic_write import write_whole

_MOST_BYTES = 10_000


@contextmanager
def timed(folder: Path, command: str, *, added: bool = False) -> Iterator[None]:
    """Record the duration of the block unless it fails; `added` to the previous one when a study is resumed.

    A folder that cannot be written is left unchanged.
    """
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    if not folder.is_dir():
        return
    known = durations_in(folder)
    seconds += known.get(command, 0.0) if added else 0.0
    with suppress(OSError):
        write_whole(
            folder / DURATIONS, json.dumps(known | {command: round(seconds, 3)}, indent=1, sort_keys=True) + "\n"
        )


def durations_in(folder: Path) -> dict[str, float]:
    """Return seconds by command; empty if the file is missing or damaged."""
    path = folder / DURATIONS
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    known = content.items() if isinstance(content, dict) else ()
    return {name: float(s) for name, s in known if isinstance(s, int | float) and 0 <= s < float("inf")}
