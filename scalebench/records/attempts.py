"""The attempts that runs.csv holds, read no further than needs be: a hundred thousand in some tenths of a second.

One pass over the bytes cuts off the first cells of each line; the others are read of single lines when they are asked
for. A file whose columns a spreadsheet has moved is put in order first, which takes its time.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from scalebench.errors import ResultsError
from scalebench.records.cells import from_line
from scalebench.records.schema import READABLE, RunRow, columns, kinds
from scalebench.records.table import check_version, columns_lacking

_FIRST = ("schema_version", "study", "run_id", "config_hash", "attempt", "status")
_READ = rb'([^,"\n]*),'
_LINE = re.compile(_READ + rb'[^,"\n]*,' + 4 * _READ + rb"[^\n]*\n")  # all of _FIRST but the study


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # which Python takes for a digit's neighbour


def _is_whole(cell: str) -> bool:
    return _is_number(cell) and (cell.isdecimal() or float(cell).is_integer())


def _is_flag(cell: str) -> bool:
    return cell.lower() in ("true", "false")


_EXPECTED = {
    "integer": (_is_whole, "a whole number"),
    "number": (_is_number, "a number"),
    "flag": (_is_flag, "true or false"),
}
_NUMBERS = {name: _EXPECTED[kind] for name, kind in kinds(RunRow).items() if kind in _EXPECTED}


def counting(run_ids: Iterable[str], attempts: Iterable[int]) -> dict[str, int]:
    """run_id -> place of the row that counts: its latest attempt, and of several rows of that attempt the last."""
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
        header, self._body = _read(path)
        self._names = columns(RunRow)
        if header and (lacking := columns_lacking(path, header, self._names)):
            self._names = [name for name in self._names if name not in lacking]
        if header not in ([], self._names):
            self._put_in_order(header)
        found = _LINE.findall(self._body)
        if len(found) != self._body.count(b"\n"):
            self._complain()
        versions, run_ids, hashes, attempts, statuses = zip(*found, strict=True) if found else 5 * [()]
        check_version(path, {version.decode(errors="replace") for version in set(versions)}, READABLE)
        self.run_id, self.config_hash, self.status = _texts(run_ids), _texts(hashes), _texts(statuses)
        self.attempt = list(map(int, attempts)) if all(map(bytes.isdigit, set(attempts))) else self._complain()

    def __len__(self) -> int:
        return len(self.run_id)

    def row(self, place: int) -> dict[str, str]:
        """All cells of the row at `place`, as text."""
        return self._cells(place, self._lines[place])

    def newest(self, count: int) -> list[dict[str, str]]:
        """The last `count` rows, every number in them looked at."""
        lines = self._body.rsplit(b"\n", count + 1)[-count - 1 : -1]
        first = len(self) - len(lines)
        rows = [self._cells(place, line) for place, line in enumerate(lines, start=first)]
        for name, (readable, expected) in _NUMBERS.items():
            for cell in {row.get(name, "") for row in rows} - {""}:
                if not readable(cell):
                    place = first + next(index for index, row in enumerate(rows) if row.get(name) == cell)
                    raise ResultsError(
                        f"{self.path}, line {place + 2}: {name} is {cell!r}, expected {expected}; "
                        "repair or remove the line"
                    )
        return rows

    def latest(self) -> dict[str, int]:
        """run_id -> place of the row that counts, by `counting`."""
        places = dict(zip(self.run_id, range(len(self)), strict=True))
        return places if len(places) == len(self) else counting(self.run_id, self.attempt)

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
        return self._body.split(b"\n")[:-1]

    def _put_in_order(self, header: list[str]) -> None:
        names, self._names = self._names, header
        rows = [self._cells(place, line) for place, line in enumerate(self._lines)]
        self._names, buffer = names, io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([row[name] for name in names] for row in rows)
        del self._lines
        self._body = buffer.getvalue().encode()

    def _complain(self) -> list[int]:
        """Name the first line whose first cells are not what they should be."""
        for place in range(len(self._lines)):
            attempt = self.row(place)["attempt"]
            if not (attempt.isascii() and attempt.isdecimal()):
                raise ResultsError(f"{self.path}, line {place + 2}: attempt is {attempt!r}, expected a number")
        raise ResultsError(f"{self.path}: its first cells are in quotes; save it without them")


def _read(path: Path) -> tuple[list[str], bytes]:
    """The header of `path`, empty if there is none, and its whole lines after it."""
    try:
        with path.open("rb") as file:
            header, body = from_line(file.readline()), file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise ResultsError(f"{path.parent} holds no runs.csv; expected a study's folder, as results/<study>") from None
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    return header, body if body.endswith(b"\n") else body[: body.rfind(b"\n") + 1]


def _texts(cells: Sequence[bytes]) -> list[str]:
    return b"\n".join(cells).decode("utf-8", errors="replace").split("\n") if cells else []
