"""Fast reader of runs.csv that parses a row only on request: 100,000 attempts in some tenths of a second.

The first cells of each line are split off without a CSV parser. A file with columns in another order or with quotes in
the first cells, as written by a spreadsheet, is parsed completely, which is slower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from scalebench.errors import ResultsError
from scalebench.records.limits import expected_instead
from scalebench.records.schema import RunRow, columns, kinds
from scalebench.records.table import bad_cell, check_header, check_version, from_line
from scalebench.system.bounded_read import LARGE, read_bytes

_FIRST = ("schema_version", "study", "run_id", "config_hash", "attempt", "status")
_NUMBERS = tuple(name for name, kind in kinds(RunRow).items() if kind != "text")
_DIGITS = 16  # of an attempt's number, so that a floating-point number holds it


def latest_places(run_ids: Sequence[str], attempts: Iterable[int]) -> dict[str, int]:
    """Return the index of the row that counts for each run_id: the last row of its latest attempt."""
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
        try:
            lines = read_bytes(path, LARGE).split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            raise ResultsError(
                f"{path.parent} holds no runs.csv; expected a study's folder, as results/<study>"
            ) from None
        except OSError as error:
            raise ResultsError(f"cannot read {path}: {error.strerror}") from None
        names = columns(RunRow)
        self._header, self._lines = (from_line(lines[0]) if lines else []) or names, lines[1:]
        check_header(path, self._header, names)
        cells = [line.decode(errors="replace").split(",", len(_FIRST)) for line in self._lines]
        if self._header != names or any(len(row) <= len(_FIRST) or '"' in "".join(row[:-1]) for row in cells):
            cells = [[row[name] for name in _FIRST] for row in map(self.row, range(len(self._lines)))]
        self.run_id, self.config_hash, self.status = ([row[place] for row in cells] for place in (2, 3, 5))
        check_version(path, {row[0] for row in cells})
        attempts = [row[4] for row in cells]
        bad = {cell for cell in set(attempts) if not _is_attempt(cell)}
        if bad:
            place = next(place for place, cell in enumerate(attempts) if cell in bad)
            raise bad_cell(path, place, "attempt", self.row(place)["attempt"], "a number from 1 up")
        self.attempt = list(map(int, attempts))

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, place: int, checked: Collection[str] = ()) -> dict[str, str]:
        """Return all cells of the row at `place` as text.

        Raises:
            ResultsError: the row has more or fewer cells than the header, or one of the `checked` cells is damaged.
        """
        cells = from_line(self._lines[place])
        if len(cells) != len(self._header):
            raise ResultsError(
                f"{self.path}, line {place + 2}: {len(cells)} cells, expected {len(self._header)}; repair or remove "
                "the line"
            )
        row = dict(zip(self._header, cells, strict=True))
        for name in checked:
            if row[name] and (expected := expected_instead(name, row[name])):
                raise bad_cell(self.path, place, name, row[name], expected)
        return row

    def newest(self, count: int) -> list[dict[str, str]]:
        """Return the last `count` rows, with every number in them checked."""
        return [self.row(place, _NUMBERS) for place in range(max(0, len(self) - count), len(self))]

    def latest(self) -> dict[str, int]:
        """Return the place of the row that counts for each run_id."""
        return latest_places(self.run_id, self.attempt)

    def other_data(self, digest: str) -> list[str]:
        """Return the checksum of the data of each run that has another one than `digest`; trials have their own."""
        # Few lines lack the digest, and only these are parsed.
        rows = [self.row(place) for place, line in enumerate(self._lines) if digest.encode() not in line]
        return [row["dataset_sha256"] for row in rows if row["dataset_sha256"] and not row["trial"]]

    def seconds(self, statuses: Collection[str]) -> dict[tuple[str, str], float | None]:
        """Return train_s of each run with one of these statuses, by run_id and config_hash.

        Raises:
            ResultsError: a damaged row.
        """
        found: dict[tuple[str, str], float | None] = {}
        for place, status in enumerate(self.status):
            if status in statuses:
                train_s = self.row(place, checked=("train_s",))["train_s"]
                found[self.run_id[place], self.config_hash[place]] = float(train_s) if train_s else None
        return found

    def repeated(self) -> int:
        """Return the number of rows that repeat an attempt; only its last row counts."""
        return len(self) - len(set(zip(self.run_id, self.attempt, strict=True)))


def has_completed_run(path: Path) -> bool:
    """Return True if a line of a runs.csv may be that of a completed run: no column but `status` holds that word alone.

    Reads as far as the first one only. False if there is no such file.
    """
    with suppress(OSError), path.open("rb") as file:
        return any(b",completed," in line for line in file)
    return False


def _is_attempt(cell: str) -> bool:
    return cell.isascii() and cell.isdecimal() and len(cell) < _DIGITS and int(cell) > 0
