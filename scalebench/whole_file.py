"""Writes small files whole: whoever reads one, or comes after a kill, finds the new text or the old one."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text`, on the disk before this returns.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    fresh = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
