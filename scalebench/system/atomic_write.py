"""Writes small files whole: whoever reads one, or comes after a kill, finds the new text or the old one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text`, on the disk before this returns.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    with whole_file(path) as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write text to, which takes the place of `path` at the end, on the disk before this returns.

    A link stays one, what it leads to is replaced; a device or a pipe is written to, and never replaced by a file.

    Raises:
        OSError: it cannot be written; the old file is as it was.
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
    """Wait until the names in `folder` are on the disk: a new file is lost with its name, however well it was synced.

    Where a file system cannot sync folders (some network ones) it keeps names by itself.
    """
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
