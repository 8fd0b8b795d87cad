"""How long commands took on a study, kept beside its records: `durations.json`, seconds by command.

What was never timed has no entry. The file decides nothing: it is read where somebody is told how long to wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalebench.system.atomic_write import write_whole

FILE = "durations.json"
_MOST_BYTES = 10_000


@contextmanager
def timed(folder: Path, command: str, *, added: bool = False) -> Iterator[None]:
    """Keep how long the block took, unless it fails; `added` to what it took before, as of a study that goes on.

    A folder that cannot be written (somebody else's records) is left as it is.
    """
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    if not folder.is_dir():
        return
    known = durations_in(folder)
    seconds += known.get(command, 0.0) if added else 0.0
    with suppress(OSError):
        write_whole(folder / FILE, json.dumps(known | {command: round(seconds, 3)}, indent=1, sort_keys=True) + "\n")


def durations_in(folder: Path) -> dict[str, float]:
    """Seconds by command; nothing where the file is missing or damaged."""
    path = folder / FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    known = told.items() if isinstance(told, dict) else ()
    return {name: float(s) for name, s in known if isinstance(s, int | float) and 0 <= s < float("inf")}
