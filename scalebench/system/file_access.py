"""Files, whatever a crash or another user makes of them.

Those that scalebench names itself are replaced as a whole, also in a crash, and never
written through a link. Any file is read up to a size: an endless or huge one is an
error, not the end of the memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

MIB = 1 << 20
SMALL = 64 * MIB  # of a file written by hand or by one calibration
LARGE = 4096 * MIB  # of a table with a row per run or epoch
_PIECE = 16 * MIB


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of `path`, a file of scalebench's own, by `text` and sync it to the disk.

    Raises:
        OSError: the file is a symbolic link, or cannot be written; the old one is unchanged.
    """
    if path.is_symlink():
        raise _is_link(path)
    with atomic_file(path) as file:
        file.write(text)


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Open a text file that replaces `path`, named by the user, at the end of the context and is synced to the disk.

    The target of a link is replaced, not the link; a device or pipe is written to and
    never replaced.

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
    if not fresh.is_symlink():  # a link is refused below
        fresh.unlink(missing_ok=True)  # left by a command that was killed
    with open_own(fresh, "x") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            # Synced before it gets the name: after a crash the file is the old or the
            # new one, and whole.
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def open_own(path: Path, mode: str, buffering: int = -1) -> Any:
    """Open a file that scalebench names itself, text as UTF-8.

    A symbolic link of that name, as in a folder that came from someone else, may lead
    to any file of this user.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering, encoding=encoding, opener=descriptor_of_own)


def descriptor_of_own(path: str | Path, flags: int) -> int:
    """Open `path` as `os.open` does, unless it is a symbolic link.

    Raises:
        OSError: the file is a symbolic link, or cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError:
        if Path(path).is_symlink():
            raise _is_link(path) from None
        raise


def _is_link(path: str | Path) -> OSError:
    return OSError(
        errno.ELOOP,
        f"{Path(path).name} is a symbolic link, which is not written through; remove it",
        path,
    )


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
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "scalebench"
        / kind
    )


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """Return the content of `path`, of at most so many bytes; of a device or pipe no more is read either.

    Raises:
        OSError: the file cannot be read, or (EFBIG) is larger.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _too_large(most)
    return content


def read_lines(path: Path, most: int = LARGE) -> Iterator[bytes]:
    """Yield the complete lines of `path` in pieces of some MiB, so that a large table is never in memory as a whole.

    Raises:
        OSError: as `read_bytes`.
    """
    read, begun = 0, list[bytes]()
    with path.open("rb") as file:
        while block := file.read(min(_PIECE, most + 1)):
            read += len(block)
            if read > most:
                raise _too_large(most)
            lines, newline, rest = block.rpartition(b"\n")
            if newline:
                yield b"".join([*begun, lines, newline])
                begun = []
            begun.append(rest)


def _too_large(most: int) -> OSError:
    return OSError(
        errno.EFBIG,
        f"it is larger than {most // MIB} MiB, the most that is read of such a file",
    )


def read_text(path: Path, most: int = SMALL, encoding: str = "utf-8") -> str:
    """Return the text in `path`, of at most so many bytes, with line ends as newlines.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is not text.
    """
    return (
        read_bytes(path, most)
        .decode(encoding)
        .replace("\r\n", "\n")
        .replace("\r", "\n")
    )
