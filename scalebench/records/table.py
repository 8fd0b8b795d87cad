"""One append-only CSV file that survives a kill, a full disk and a torn last line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from scalebench.errors import ResultsError
from scalebench.records.cells import from_line, to_lines
from scalebench.records.schema import ADDED, READABLE, SCHEMA_VERSION, columns
from scalebench.system.atomic_write import sync_folder

_CHUNK = 1 << 16


class Table:
    """The rows of one row type in `path`, opened for appending.

    Opening writes the header of a new file. In an existing one the header is checked, and what follows the last line
    break (a row that was being written when the process died) is moved to `<path>.partial`.

    Raises:
        ResultsError: the file cannot be opened or written, or has the columns of another schema version.
    """

    def __init__(self, path: Path, row_type: type[BaseModel], *, fsync: bool = True) -> None:
        self.path = path
        self._row_type = row_type
        self._fsync = fsync
        self.set_aside: Path | None = None  # where the half-written end of an interrupted command went
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise _cannot("open", path, error) from None
        try:
            self.header = self._open_header()
        except BaseException:
            self._file.close()
            raise

    def append(self, rows: Sequence[BaseModel]) -> int:
        """Write `rows` and wait until they are on the disk: all of them, or an error says that none is.

        Returns the length of the file before, for `take_back`.
        """
        cells = ([getattr(row, name) for name in self.header] for row in rows)
        return self._write(to_lines(cells))

    def take_back(self, length: int) -> None:
        """Undo the last `append`, which returned `length`."""
        self._file.truncate(length)

    def rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        """(line number, row as text), first to last.

        Raises:
            ResultsError: a line has more or fewer cells than the header.
        """
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                cells = from_line(line)
                if len(cells) != len(self.header):
                    raise ResultsError(
                        f"{self.path}, line {number}: {len(cells)} cells, expected {len(self.header)}; "
                        f"repair or remove the line"
                    )
                yield number, dict(zip(self.header, cells, strict=True))

    def set_aside_tail(self, start: int) -> None:
        """Move everything from byte `start` to `<path>.partial`."""
        try:
            tail = self._read_from(start)
            with self.path.with_name(self.path.name + ".partial").open("ab") as partial:
                partial.write(tail if tail.endswith(b"\n") else tail + b"\n")
                partial.flush()
                os.fsync(partial.fileno())
            sync_folder(self.path.parent)
            self._file.truncate(start)
            self.set_aside = self.path.with_name(self.path.name + ".partial")
        except OSError as error:
            raise _cannot("set aside the half-written end of", self.path, error) from None

    def lines_backwards(self) -> Iterator[tuple[int, dict[str, str]]]:
        """(byte offset, row) from the last row to the first, reading only as much of the file as is asked for."""
        end = self._file.seek(0, os.SEEK_END)
        known, carry = end, b""
        while known > 0:
            start = max(0, known - _CHUNK)
            self._file.seek(start)
            block = self._file.read(known - start) + carry
            lines = block.splitlines(keepends=True)
            first, carry = (1, lines[0]) if start > 0 else (0, b"")
            offset = start + len(block)
            for line in reversed(lines[first:]):
                offset -= len(line)
                if offset > 0:  # the line at 0 is the header
                    yield offset, dict(zip(self.header, from_line(line), strict=False))
            known = start

    def close(self) -> None:
        self._file.close()

    def _open_header(self) -> list[str]:
        wanted = columns(self._row_type)
        with self.path.open("rb") as file:
            first = file.readline()
        end = self._complete_length()
        if end < self._file.seek(0, os.SEEK_END):
            self.set_aside_tail(end)
        if end == 0:
            self._write(to_lines([wanted]))
            if self._fsync:
                sync_folder(self.path.parent)
                sync_folder(self.path.parent.parent)  # which may have just got this folder
            return wanted
        header = from_line(first)
        check_header(self.path, header, wanted)
        return header

    def _complete_length(self) -> int:
        """Bytes up to and with the last line break."""
        position = self._file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _CHUNK)
            self._file.seek(start)
            newline = self._file.read(position - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            position = start
        return 0

    def _read_from(self, start: int) -> bytes:
        self._file.seek(start)
        return self._file.readall() or b""

    def _write(self, data: bytes) -> int:
        before = os.fstat(self._file.fileno()).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)  # frees space, so it works on a full disk: no torn row stays behind
            raise _cannot("write", self.path, error) from None
        return before


def check_header(path: Path, header: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse columns that this schema version does not write; their order does not matter.

    Raises:
        ResultsError: names the missing and unknown columns and the schema version.
    """
    missing = [name for name in wanted if name not in header]
    unknown = [name for name in header if name not in wanted]
    if not missing and not unknown and len(header) == len(wanted):
        return
    if ";" in "".join(header) or "\t" in "".join(header):
        raise ResultsError(f"{path}: cells are not separated by commas; save it as comma-separated CSV")
    if _added_since(header, wanted):
        raise ResultsError(
            f"{path}: written with an older schema version than {SCHEMA_VERSION}: it can be read, but not added to; "
            f"go on with the scalebench that wrote it, or begin anew with --new"
        )
    faults = [f"lacks {', '.join(missing[:3])}"] if missing else []
    faults += [f"has the unknown {', '.join(repr(name) for name in unknown[:3])}"] if unknown else []
    faults = faults or ["repeats a column"]
    raise ResultsError(
        f"{path}: its header {' and '.join(faults)}: {_version_in(path, header)}not schema version {SCHEMA_VERSION}, "
        f"which this scalebench writes; use the scalebench that wrote it, or another --output folder"
    )


def columns_lacking(path: Path, header: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Which of the `wanted` columns a table that is read lacks as it is older; refuses others as `check_header`."""
    if not (added := _added_since(header, wanted)):
        check_header(path, header, wanted)
    return added


def check_version(path: Path, versions: set[str], accepted: Sequence[int] = (SCHEMA_VERSION,)) -> None:
    """Refuse rows of another schema version than those `accepted`.

    Raises:
        ResultsError: names both versions.
    """
    others = sorted(versions - set(map(str, accepted)))
    if others:
        raise ResultsError(
            f"{path}: written with schema version {', '.join(others)}, this scalebench writes version "
            f"{SCHEMA_VERSION} and reads {READABLE[0]} to {READABLE[-1]}; use the scalebench that wrote it, or another "
            "--output folder"
        )


def _added_since(header: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """What `wanted` has and a table of an older, readable version with this header has not; empty if it is none."""
    added: list[str] = []
    for version in sorted(ADDED, reverse=True):
        added += [name for name in ADDED[version] if name in wanted]
        if added and sorted(header) == sorted(set(wanted) - set(added)):
            return added
    return []


def _version_in(path: Path, header: Sequence[str]) -> str:
    """`schema version 7, `, as the first row says; empty where none does."""
    try:
        with path.open("rb") as file:
            file.readline()
            cells = dict(zip(header, from_line(file.readline()), strict=False))
    except OSError:
        return ""
    version = cells.get("schema_version", "")
    return f"schema version {version}, " if version.isdecimal() and version != str(SCHEMA_VERSION) else ""


def _cannot(what: str, path: Path, error: OSError) -> ResultsError:
    reason = error.strerror or str(error)
    return ResultsError(
        f"cannot {what} {path}: {reason}; make room or permit it, and the same command goes on, or choose another "
        "folder with --output"
    )
