"""The attempts that runs.csv holds, read no further than needs be: a hundred thousand in some tenths of a second.

One pass over the file cuts off the first cells of each line, piece by piece in the same memory; the others are read of
single lines when they are asked for. A file whose columns a spreadsheet has moved is put in order first, which takes
its time.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from scalebench.errors import ResultsError
from scalebench.records.cells import from_line
from scalebench.records.plausible import largest_whole, no_time, time_columns, time_expected
from scalebench.records.schema import READABLE, RunRow, columns, kinds
from scalebench.records.table import check_version, columns_lacking

_FIRST = ("schema_version", "study", "run_id", "config_hash", "attempt", "status")
_PIECE = 1 << 18  # bytes: small enough to stay in a cache
_BEGINNING = 200  # characters of a line that usually hold _FIRST
_LINE = 1 << 10  # bytes of a usual line, generously
_DIGITS = 16  # of an attempt's number: fewer than a floating-point number tells apart


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # which Python takes for a digit's neighbour


def _is_whole(cell: str) -> bool:
    return _is_number(cell) and (cell.isdecimal() or float(cell).is_integer())


def _is_attempt(cell: str) -> bool:
    return cell.isascii() and cell.isdecimal() and len(cell) < _DIGITS and int(cell) > 0


def _is_flag(cell: str) -> bool:
    return cell.lower() in ("true", "false")


_EXPECTED = {
    "integer": (_is_whole, "a whole number"),
    "number": (_is_number, "a number"),
    "flag": (_is_flag, "true or false"),
}
_KINDS = {name: kind for name, kind in kinds(RunRow).items() if kind in _EXPECTED}
_TIMES = frozenset(time_columns(RunRow))


def _fault(name: str, cell: str) -> str:
    """What the column `name` was expected to hold instead of `cell`, empty where nothing is wrong."""
    readable, expected = _EXPECTED[kind := _KINDS[name]]
    if not readable(cell):
        return expected
    if kind == "integer" and abs(float(cell)) > largest_whole(name):
        return f"a whole number of at most {largest_whole(name)}"
    if name in _TIMES and no_time(name, float(cell)):
        return time_expected(name)
    return ""


def counting(run_ids: Sequence[str], attempts: Iterable[int]) -> dict[str, int]:
    """run_id -> place of the row that counts: its latest attempt, and of several rows of that attempt the last."""
    places = dict(zip(run_ids, range(len(run_ids)), strict=True))
    if len(places) == len(run_ids):
        return places
    best: dict[str, tuple[int, int]] = {}
    for place, (run_id, attempt) in enumerate(zip(run_ids, attempts, strict=True)):
        if run_id not in best or attempt >= best[run_id][0]:
            best[run_id] = attempt, place
    return {run_id: place for run_id, (_, place) in best.items()}


class Attempts:
    """The rows of a runs.csv, in their order, from 0. A last line that is being written at this moment is none.

    Raises:
        ResultsError: it is not there, of another schema version, or damaged where it is read (named by its line).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ordered: bytes | None = None  # the lines, where the file has its columns in another order
        with self._file() as file:
            header = from_line(line := file.readline())
            self._begin = len(line)
            whole, cells, self._end = _first_cells(file, self._begin)
        self._names = columns(RunRow)
        if header and (lacking := columns_lacking(path, header, self._names)):
            self._names = [name for name in self._names if name not in lacking]
        if header not in ([], self._names):
            self._put_in_order(header)
            with self._file() as file:
                whole, cells, self._end = _first_cells(file, self._begin)
        firsts: list[list[str]] = list(map(list, zip(*cells, strict=True))) or [[] for _ in _FIRST]
        if len(cells) != whole or any('"' in "".join(column) for column in firsts):
            self._complain()
        versions, _, self.run_id, self.config_hash, attempts, self.status = firsts
        check_version(path, set(versions), READABLE)
        if not all(map(_is_attempt, set(attempts))):
            self._complain()
        self.attempt = list(map(int, attempts))

    def __len__(self) -> int:
        return len(self.run_id)

    def row(self, place: int) -> dict[str, str]:
        """All cells of the row at `place`, as text."""
        return self._cells(place, self._lines[place])

    def newest(self, count: int) -> list[dict[str, str]]:
        """The last `count` rows, every number in them looked at."""
        lines = self._last_lines(count)
        first = len(self) - len(lines)
        rows = [self._cells(place, line) for place, line in enumerate(lines, start=first)]
        for name in _KINDS:
            for cell in {row.get(name, "") for row in rows} - {""}:
                if expected := _fault(name, cell):
                    place = first + next(index for index, row in enumerate(rows) if row.get(name) == cell)
                    raise ResultsError(
                        f"{self.path}, line {place + 2}: {name} is {cell!r}, expected {expected}; "
                        "repair or remove the line"
                    )
        return rows

    def latest(self) -> dict[str, int]:
        """run_id -> place of the row that counts, by `counting`."""
        return counting(self.run_id, self.attempt)

    def doubled(self) -> int:
        """How many rows are an attempt at a run that another row is too: of such only the last counts."""
        if len(set(self.run_id)) == len(self):
            return 0
        return len(self) - len(set(zip(self.run_id, self.attempt, strict=True)))

    def _cells(self, place: int, line: bytes) -> dict[str, str]:
        cells = from_line(line)
        if len(cells) != len(self._names):
            raise ResultsError(
                f"{self.path}, line {place + 2}: {len(cells)} cells, expected {len(self._names)}; "
                "repair or remove the line"
            )
        return dict(zip(self._names, cells, strict=True))

    @cached_property
    def _lines(self) -> list[bytes]:
        return self._bytes(self._begin).split(b"\n")[:-1]

    def _last_lines(self, count: int) -> list[bytes]:
        size = count * _LINE
        while size < self._end - self._begin:
            lines = self._bytes(self._end - size).split(b"\n")[1:-1]  # the first may have begun before
            if len(lines) >= count:
                return lines[-count:]
            size *= 2
        return self._lines[-count:]

    def _bytes(self, first: int) -> bytes:
        """From place `first` to the end of the last whole line."""
        with self._file() as file:
            file.seek(first)
            return file.read(self._end - first)

    @contextmanager
    def _file(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("rb") if self._ordered is None else io.BytesIO(self._ordered) as file:
                yield file
        except (FileNotFoundError, NotADirectoryError):
            raise ResultsError(
                f"{self.path.parent} holds no runs.csv; expected a study's folder, as results/<study>"
            ) from None
        except OSError as error:
            raise ResultsError(f"cannot read {self.path}: {error.strerror}") from None

    def _put_in_order(self, header: list[str]) -> None:
        names, self._names = self._names, header
        rows = [self._cells(place, line) for place, line in enumerate(self._lines)]
        self._names, buffer = names, io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([row[name] for name in names] for row in rows)
        del self._lines
        self._ordered, self._begin = buffer.getvalue().encode(), 0

    def _complain(self) -> None:
        """Name the first line whose first cells are not what they should be."""
        for place in range(len(self._lines)):
            attempt = self.row(place)["attempt"]
            if not _is_attempt(attempt):
                raise ResultsError(
                    f"{self.path}, line {place + 2}: attempt is {attempt!r}, expected a number from 1 up; "
                    "repair or remove the line"
                )
        raise ResultsError(f"{self.path}: its first cells are in quotes; save it without them")


def _first_cells(file: BinaryIO, begin: int) -> tuple[int, list[list[str]], int]:
    """How many whole lines `file` has from here, which is place `begin`, the cells of _FIRST of those that have more
    cells than these, and where the lines end."""
    lines, found, rest, end, count = 0, list[list[str]](), b"", begin, len(_FIRST)
    while piece := file.read(_PIECE):
        end += len(piece)
        text, line_break, rest = (rest + piece).rpartition(b"\n")
        if line_break:
            whole = text.decode("utf-8", errors="replace").split("\n")
            lines += len(whole)
            found += [
                cells[:count]
                for line in whole
                if len(cells := line[:_BEGINNING].split(",", count)) > count
                or len(cells := line.split(",", count)) > count
            ]
    return lines, found, end - len(rest)
