"""Reading of files up to a size: an endless or huge file is an error, not the end of the memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
SMALL = 64 * MIB  # of a file written by hand or by one calibration
LARGE = 4096 * MIB  # of a table with a row per run or epoch
_PIECE = 16 * MIB


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
