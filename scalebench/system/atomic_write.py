"""Atomic replacement of small files: readers find the old text or the new one, also after a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of `path` by `text` and sync it to the disk.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    with atomic_file(path) as file:
        file.write(text)


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path` at the end of the context and is synced to the disk.

    The target of a link is replaced, not the link; a device or pipe is written to and never replaced.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("w", encoding="utf-8") as device:
            yield device
        return
    path = Path(os.path.realpath(path))
    fresh = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with fresh.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_folder(path.parent)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to the disk, without which a new synced file may be lost.

    File systems that cannot sync folders (some network ones) store names by themselves.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def cache_folder(kind: str) -> Path:
    """Return `$XDG_CACHE_HOME/scalebench/<kind>`, by default below `~/.cache`, without creating it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "scalebench" / kind
