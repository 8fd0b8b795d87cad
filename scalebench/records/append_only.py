"""One append-only CSV file that survives a kill, a full disk and a torn last line."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from scalebench.errors import ResultsError
from scalebench.formatting import in_cell
from scalebench.records.schema import SCHEMA_VERSION, columns
from scalebench.system.file_access import open_own, sync_folder


class AppendOnlyTable:
    """The file `path` of rows of one type, opened for appending.

    Opening writes the header of a new file. In an existing file the header is checked,
    and bytes after the last line break (a row cut off when the process died) are moved
    to `<path>.partial`.

    Raises:
        ResultsError: the file cannot be opened or written, or has other columns.
    """

    def __init__(
        self, path: Path, row_type: type[BaseModel], *, fsync: bool = True
    ) -> None:
        self.path = path
        self._row_type = row_type
        self._fsync = fsync
        # file with the incomplete end of an interrupted command
        self.set_aside: Path | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: what `write` took is with the system, also if this process is
            # killed
            self._file = open_own(path, "a+b", buffering=0)
        except OSError as error:
            raise _cannot("open", path, error) from None
        try:
            self.header = self._open_header()
        except BaseException:
            self._file.close()
            raise

    def is_deleted(self) -> bool:
        """Return True if the open file has no name any more.

        Raises:
            ResultsError: another file has its name.
        """
        # The open file lives on without its name, as after a purge of old files.
        opened = os.fstat(self._file.fileno())
        try:
            named = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            raise _cannot("write", self.path, error) from None
        if not os.path.samestat(opened, named):
            raise ResultsError(
                f"{self.path} was replaced by another file during the study; keep one of both, run again"
            )
        return False

    def write_again(self) -> None:
        """Write a file that was deleted, of which this process holds the content, under its name again."""
        try:
            content = self._read_from(0)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open_own(self.path, "a+b", buffering=0)
        except OSError as error:
            raise _cannot("write", self.path, error) from None
        self._file.close()
        self._file = file
        self._write(content)
        sync_folder(self.path.parent)

    def append(self, rows: Sequence[BaseModel]) -> int:
        """Write all of `rows` to the disk, or none of them and raise an error.

        Returns the previous length of the file, for `take_back`.
        """
        # in the order of the file, which a spreadsheet may have changed
        cells = ([getattr(row, name) for name in self.header] for row in rows)
        return self._write(to_lines(cells))

    def take_back(self, length: int) -> None:
        """Undo the last `append`, by its return value."""
        self._file.truncate(length)

    def set_aside_tail(self, start: int) -> None:
        """Move the bytes from offset `start` to `<path>.partial`."""
        try:
            # First the copy, then the cut: a crash in between loses no row.
            tail = self._read_from(start)
            with open_own(
                self.path.with_name(self.path.name + ".partial"), "ab"
            ) as partial:
                partial.write(tail if tail.endswith(b"\n") else tail + b"\n")
                partial.flush()
                os.fsync(partial.fileno())
            sync_folder(self.path.parent)
            self._file.truncate(start)
            self.set_aside = self.path.with_name(self.path.name + ".partial")
        except OSError as error:
            raise _cannot(
                "set aside the half-written end of", self.path, error
            ) from None

    def lines_backwards(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield (byte offset, row) from the last row to the first."""
        data = self._read_from(0)
        offset = len(data)
        # Without the header.
        for line in reversed(data.splitlines(keepends=True)[1:]):
            offset -= len(line)
            yield offset, dict(zip(self.header, from_line(line), strict=False))

    def close(self) -> None:
        self._file.close()

    def _open_header(self) -> list[str]:
        expected = columns(self._row_type)
        data = self._read_from(0)
        end = data.rfind(b"\n") + 1
        # a row without its line break was cut off as its process died
        if end < len(data):
            self.set_aside_tail(end)
        if end == 0:
            self._write(to_lines([expected]))
            if self._fsync:
                sync_folder(self.path.parent)
                sync_folder(self.path.parent.parent)  # the folder itself may be new
            return expected
        header = from_line(data[: data.find(b"\n") + 1])
        check_header(self.path, header, expected)
        return header

    def _read_from(self, start: int) -> bytes:
        self._file.seek(start)
        return self._file.readall() or b""

    def _write(self, data: bytes) -> int:
        before = os.fstat(self._file.fileno()).st_size
        try:
            # A raw file may write less than it is given.
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)  # succeeds on a full disk, as it frees space
            raise _cannot("write", self.path, error) from None
        return before


def check_header(
    path: Path,
    header: Sequence[str],
    expected: Sequence[str],
    optional: Collection[str] = (),
) -> list[str]:
    """Return the columns of `expected` that a header lacks, all of them `optional`; their order is free.

    Raises:
        ResultsError: names the missing and unknown columns and the schema version.
    """
    lacking = [name for name in expected if name not in header]
    missing = [name for name in lacking if name not in optional]
    unknown = [name for name in header if name not in expected]
    # a repeated column would be read as two values of one
    if not missing and not unknown and len(header) + len(lacking) == len(expected):
        return lacking
    # as spreadsheets of some languages save it
    if ";" in "".join(header) or "\t" in "".join(header):
        raise ResultsError(
            f"{path}: cells are not separated by commas; save it as comma-separated CSV"
        )
    # The first few: a file of another program differs in all.
    differences = [f"lacks {', '.join(missing[:3])}"] if missing else []
    differences += (
        [f"has the unknown {', '.join(repr(name) for name in unknown[:3])}"]
        if unknown
        else []
    )
    differences = differences or ["repeats a column"]
    raise ResultsError(
        f"{path}: its header {' and '.join(differences)}: not schema version {SCHEMA_VERSION}, which this scalebench "
        "writes; use the scalebench that wrote it, or another --output folder"
    )


def check_version(path: Path, versions: set[str]) -> None:
    """Refuse rows of another schema version.

    Raises:
        ResultsError: names both versions.
    """
    others = sorted(versions - {str(SCHEMA_VERSION)})
    if others:
        raise ResultsError(
            f"{path}: written with schema version {', '.join(others)}, this scalebench reads and writes version "
            f"{SCHEMA_VERSION}; use the scalebench that wrote it, or another --output folder"
        )


def bad_cell(
    path: Path, place: int, name: str, value: object, expected: str
) -> ResultsError:
    """Return the error for a damaged cell of row `place`, numbered from 0; `value` None is an empty cell."""
    found = "empty" if value is None else repr(str(value))
    return ResultsError(
        f"{path}, line {place + 2}: {name} is {found}, expected {expected}; repair or remove the line"
    )


def _cannot(what: str, path: Path, error: OSError) -> ResultsError:
    reason = error.strerror or str(error)
    return ResultsError(
        f"cannot {what} {path}: {reason}; make room or permit it, and the same command goes on, or choose another "
        "folder with --output"
    )


# apostrophes are added before those that are there, so that one is taken off
_ESCAPED = re.compile(r"'+[=+\-@]")


def to_cell(value: object) -> str:
    """Return None as empty text, booleans as true/false, numbers in their shortest exact form, text on one line.

    Text that starts like a formula (`=`, `+`, `-`, `@`) is preceded by an apostrophe.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        # the shortest text that reads as the same number
        return repr(value)
    return in_cell(str(value))


def to_text(cell: str) -> str:
    """Return the text that `to_cell` converted to `cell`."""
    return cell[1:] if _ESCAPED.match(cell) else cell


def to_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Return CSV lines, one per row; no cell contains a line break."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([to_cell(value) for value in row] for row in rows)
    return buffer.getvalue().encode()


def from_line(line: bytes) -> list[str]:
    """Return the cells of one line, empty if it cannot be parsed; damaged bytes become replacement characters."""
    # a spreadsheet begins its files with a byte order mark
    text = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return []
