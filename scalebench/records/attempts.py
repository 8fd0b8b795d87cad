"""Fast reader of runs.csv that parses a row only on request: 100,000 attempts in some tenths of a second.

One pass over the file splits off the first cells of each line, block by block in the same memory. A file with columns
in another order or with quotes in the first cells, as written by a spreadsheet, is parsed completely, which is slower.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from scalebench.errors import ResultsError
from scalebench.records.limits import expected_instead
from scalebench.records.schema import RunRow, columns, kinds
from scalebench.records.table import bad_cell, check_header, check_version, from_line

_FIRST = ("schema_version", "study", "run_id", "config_hash", "attempt", "status")
_NUMBERS = tuple(name for name, kind in kinds(RunRow).items() if kind != "text")
_BLOCK = 1 << 18  # bytes: small enough to stay in a cache
_BEGINNING = 200  # characters of a line that usually hold _FIRST
_LINE = 1 << 10  # bytes of a usual line, upper estimate
_DIGITS = 16  # of an attempt's number, so that a floating-point number holds it


def latest_places(run_ids: Sequence[str], attempts: Iterable[int]) -> dict[str, int]:
    """Return the index of the row that counts for each run_id: the last row of its latest attempt."""
    places = dict(zip(run_ids, range(len(run_ids)), strict=True))
    if len(places) == len(run_ids):
        return places
    best: dict[str, tuple[int, int]] = {}
    for place, (run_id, attempt) in enumerate(zip(run_ids, attempts, strict=True)):
        if run_id not in best or attempt >= best[run_id][0]:
            best[run_id] = attempt, place
    return {run_id: place for run_id, (_, place) in best.items()}


class Attempts:
    """The rows of a runs.csv in file order, numbered from 0. An incomplete last line is ignored.

    Raises:
        ResultsError: the file is missing, has another schema version, or a cell that is read is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names = columns(RunRow)
        try:
            with path.open("rb") as file:
                header = from_line(line := file.readline())
                self._begin = len(line)
                lines, cells, self._end = _first_cells(file, self._begin)
        except (FileNotFoundError, NotADirectoryError):
            raise ResultsError(
                f"{path.parent} holds no runs.csv; expected a study's folder, as results/<study>"
            ) from None
        except OSError as error:
            raise ResultsError(f"cannot read {path}: {error.strerror}") from None
        if header:
            check_header(path, header, self._names)
        firsts = _transposed(cells)
        ordered = header in ([], self._names)
        if not ordered or len(cells) != lines or any('"' in "".join(column) for column in firsts):
            firsts = _transposed(self._parse_all(header))
        versions, _, self.run_id, self.config_hash, attempts, self.status = firsts
        check_version(path, set(versions))
        if not all(map(_is_attempt, set(attempts))):
            place = next(place for place, attempt in enumerate(attempts) if not _is_attempt(attempt))
            raise bad_cell(path, place, "attempt", self.row(place)["attempt"], "a number from 1 up")
        self.attempt = list(map(int, attempts))

    def __len__(self) -> int:
        return len(self.run_id)

    def row(self, place: int, checked: Collection[str] = ()) -> dict[str, str]:
        """Return all cells of the row at `place` as text.

        Raises:
            ResultsError: the row has more or fewer cells than the header, or one of the `checked` cells is damaged.
        """
        row = self._cells(place, self._lines[place])
        for name in checked:
            if row[name] and (expected := expected_instead(name, row[name])):
                raise bad_cell(self.path, place, name, row[name], expected)
        return row

    def newest(self, count: int) -> list[dict[str, str]]:
        """Return the last `count` rows, with every number in them checked."""
        lines = self._last_lines(count)
        first = len(self) - len(lines)
        rows = [self._cells(place, line) for place, line in enumerate(lines, start=first)]
        for name in _NUMBERS:
            for cell in {row[name] for row in rows} - {""}:
                if expected := expected_instead(name, cell):
                    place = first + next(index for index, row in enumerate(rows) if row[name] == cell)
                    raise bad_cell(self.path, place, name, cell, expected)
        return rows

    def latest(self) -> dict[str, int]:
        """Return the place of the row that counts for each run_id."""
        return latest_places(self.run_id, self.attempt)

    def repeated(self) -> int:
        """Return the number of rows that repeat an attempt; only its last row counts."""
        if len(set(self.run_id)) == len(self):
            return 0
        return len(self) - len(set(zip(self.run_id, self.attempt, strict=True)))

    def _cells(self, place: int, line: bytes, names: Sequence[str] | None = None) -> dict[str, str]:
        cells, names = from_line(line), names or self._names
        if len(cells) != len(names):
            raise ResultsError(
                f"{self.path}, line {place + 2}: {len(cells)} cells, expected {len(names)}; repair or remove the line"
            )
        return dict(zip(names, cells, strict=True))

    @cached_property
    def _lines(self) -> list[bytes]:
        return self._bytes(self._begin).split(b"\n")[:-1]

    def _last_lines(self, count: int) -> list[bytes]:
        size = count * _LINE
        while "_lines" not in self.__dict__ and size < self._end - self._begin:
            lines = self._bytes(self._end - size).split(b"\n")[1:-1]  # the first may be incomplete
            if len(lines) >= count:
                return lines[-count:]
            size *= 2
        return self._lines[-count:]

    def _bytes(self, first: int) -> bytes:
        """Return the bytes from offset `first` to the end of the last complete line."""
        with self.path.open("rb") as file:
            file.seek(first)
            return file.read(self._end - first)

    def _parse_all(self, header: list[str]) -> list[list[str]]:
        """Bring all lines into the order of the schema; return their first cells."""
        rows = [self._cells(place, line, header) for place, line in enumerate(self._lines)]
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([row[name] for name in self._names] for row in rows)
        self._lines = buffer.getvalue().encode().split(b"\n")[:-1]
        return [[row[name] for name in _FIRST] for row in rows]


def _transposed(cells: list[list[str]]) -> list[list[str]]:
    return list(map(list, zip(*cells, strict=True))) or [[] for _ in _FIRST]


def _is_attempt(cell: str) -> bool:
    return cell.isascii() and cell.isdecimal() and len(cell) < _DIGITS and int(cell) > 0


def _first_cells(file: BinaryIO, begin: int) -> tuple[int, list[list[str]], int]:
    """Scan `file` from its position, offset `begin`, to its end.

    Returns the number of complete lines, the first cells (_FIRST) of those with more cells than these, and the offset
    at which the last complete line ends.
    """
    lines, found, rest, end, count = 0, list[list[str]](), b"", begin, len(_FIRST)
    while block := file.read(_BLOCK):
        end += len(block)
        text, line_break, rest = (rest + block).rpartition(b"\n")
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
