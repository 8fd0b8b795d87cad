"""Fast reader of runs.csv that parses a row only on request: 100,000 attempts in some tenths of a second.

The first cells of each line are split off without a CSV parser. A file with columns in
another order or with quotes in the first cells, as written by a spreadsheet, is parsed
completely, which is slower.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from scalebench.errors import ResultsError, reading
from scalebench.records import append_only, schema
from scalebench.records.folder import RUNS
from scalebench.records.limits import expected_instead
from scalebench.system.file_access import LARGE, read_bytes

_FIRST = ("schema_version", "study", "run_id", "config_hash", "attempt", "status")
_NUMBERS = tuple(
    name for name, kind in schema.kinds(schema.RunRow).items() if kind != "text"
)
_EPOCH = re.compile(rb"^[^,\n]*,[^,\n]*,[^,\n]*(?=,)", re.MULTILINE)
_DIGITS = 16  # of an attempt's number, so that a floating-point number holds it


def latest_places(run_ids: Sequence[str], attempts: Iterable[int]) -> dict[str, int]:
    """Return the index of the row that counts for each run_id: the last row of its latest attempt."""
    best: dict[str, tuple[int, int]] = {}
    for place, (run_id, attempt) in enumerate(zip(run_ids, attempts, strict=True)):
        if run_id not in best or attempt >= best[run_id][0]:
            # of an attempt that was written twice the last row
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
            # without the last: a line that is being written has no end yet
            lines = read_bytes(path, LARGE).split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            raise ResultsError(
                f"{path.parent} holds no runs.csv; expected a study's folder, as results/<study>"
            ) from None
        except OSError as error:
            raise ResultsError(f"cannot read {path}: {error.strerror}") from None
        names = schema.columns(schema.RunRow)
        self._header = (append_only.from_line(lines[0]) if lines else []) or names
        self._lines = lines[1:]
        lacking = append_only.check_header(
            path, self._header, names, schema.optional_columns(schema.RunRow)
        )
        self._lacking = dict.fromkeys(lacking, "")  # columns that are younger
        cells = [
            # hundred thousand rows of a hundred cells: only the first cells are split
            # off
            line.decode(errors="replace").split(",", len(_FIRST))
            for line in self._lines
        ]
        if self._header != names or not _are_plain(cells):
            # Written by a spreadsheet: slower, as each line goes through the CSV
            # parser.
            cells = [
                [row[name] for name in _FIRST]
                for row in map(self.row, range(len(self._lines)))
            ]
        by_name = {
            name: [row[place] for row in cells] for place, name in enumerate(_FIRST)
        }
        self.run_id = by_name["run_id"]
        self.config_hash = by_name["config_hash"]
        self.status = by_name["status"]
        append_only.check_version(path, set(by_name["schema_version"]))
        attempts = by_name["attempt"]
        # few numbers are distinct, many rows have one
        bad = {cell for cell in set(attempts) if not _is_attempt(cell)}
        if bad:
            place = next(place for place, cell in enumerate(attempts) if cell in bad)
            raise append_only.bad_cell(
                path, place, "attempt", self.row(place)["attempt"], "a number from 1 up"
            )
        self.attempt = list(map(int, attempts))

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, place: int, checked: Collection[str] = ()) -> dict[str, str]:
        """Return all cells of the row at `place` as text.

        Raises:
            ResultsError: the row has more or fewer cells than the header, or one of the `checked` cells is damaged.
        """
        cells = append_only.from_line(self._lines[place])
        if len(cells) != len(self._header):
            raise ResultsError(
                f"{self.path}, line {place + 2}: {len(cells)} cells, expected {len(self._header)}; repair or remove "
                "the line"
            )
        row = dict(zip(self._header, cells, strict=True)) | self._lacking
        for name in checked:
            if row[name] and (expected := expected_instead(name, row[name])):
                raise append_only.bad_cell(self.path, place, name, row[name], expected)
        return row

    def newest(self, count: int) -> list[dict[str, str]]:
        """Return the last `count` rows, with every number in them checked."""
        first = max(0, len(self) - count)
        return [self.row(place, _NUMBERS) for place in range(first, len(self))]

    def latest(self) -> dict[str, int]:
        """Return the place of the row that counts for each run_id."""
        return latest_places(self.run_id, self.attempt)

    def other_data(self, digest: str) -> list[str]:
        """Return the checksum of the data of each run that has another one than `digest`; trials have their own."""
        # Few lines lack the digest, and only these are parsed.
        rows = [
            self.row(place)
            for place, line in enumerate(self._lines)
            if digest.encode() not in line
        ]
        return [
            row["dataset_sha256"]
            for row in rows
            if row["dataset_sha256"] and not row["trial"]
        ]

    def seconds(self, statuses: Collection[str]) -> dict[tuple[str, str], float | None]:
        """Return train_s of each run with one of these statuses, by run_id and config_hash.

        Raises:
            ResultsError: a damaged row.
        """
        found: dict[tuple[str, str], float | None] = {}
        for place, status in enumerate(self.status):
            if status in statuses:
                train_s = self.row(place, checked=("train_s",))["train_s"]
                found[self.run_id[place], self.config_hash[place]] = (
                    float(train_s) if train_s else None
                )
        return found

    def without_epochs(
        self, table: Path, known: Mapping[str, int] | None = None
    ) -> list[int]:
        """Return the places of the completed runs that have fewer rows in `table`, an epochs.csv, than epochs.

        Such a run was committed by its row in runs.csv; later its epochs were cut off,
        or the file was deleted. Of several completed attempts the last counts. `known`
        has epochs by run_id; of other runs the row is parsed.

        Raises:
            ResultsError: the table cannot be read, or has other columns.
        """
        last: dict[tuple[str, str], int] = {}
        for place, status in enumerate(self.status):
            if status == "completed":
                last[self.run_id[place], self.config_hash[place]] = place
        wanted = {
            place: self._epochs_of(place, known or {})
            for place in sorted(last.values())
        }
        header, data = _read_epochs(table)
        # most tables are as they were written, which this finds in one pass
        if header == schema.columns(schema.EpochRow) and self._in_order(data, wanted):
            return []
        found = _count_epochs(header, data)
        return [
            place
            for place, epochs in wanted.items()
            if found[self._attempt_at(place)] < epochs
        ]

    def _epochs_of(self, place: int, known: Mapping[str, int]) -> int:
        if epochs := known.get(self.run_id[place], 0):
            return epochs
        cell = self.row(place)["epochs"]
        return int(cell) if _is_number(cell) else 0

    def _attempt_at(self, place: int) -> bytes:
        """The first two cells of the epochs of the attempt at `place`."""
        return f"{self.run_id[place]},{self.attempt[place]},".encode()

    def _in_order(self, data: bytes, wanted: Mapping[int, int]) -> bool:
        """Return True if the epochs of all attempts in `wanted` follow one another as they were written.

        A fast look that finds most tables whole; False says nothing.
        """
        end = 0
        for place, epochs in wanted.items():
            if not epochs:
                continue
            attempt = b"\n" + self._attempt_at(place)
            # each search goes on where the last one ended
            begin, end = end, data.find(attempt + b"%d," % (epochs - 1), end)
            if end < 0 or data.count(attempt, begin, end + len(attempt)) != epochs:
                return False
        return True

    def repeated(self) -> int:
        """Return the number of rows that repeat an attempt; only its last row counts."""
        return len(self) - len(set(zip(self.run_id, self.attempt, strict=True)))


def require_completed_run(folder: Path) -> None:
    """Raise ResultsError if no run of the study in `folder` was completed, or there are no records."""
    path = folder / RUNS
    # No column but `status` holds that word alone: the first such line suffices, and
    # the whole table is parsed for a refusal only.
    with suppress(OSError), path.open("rb") as file:
        if any(b",completed," in line for line in file):
            return
    attempts = Attempts(path)
    if len(attempts) and "completed" not in attempts.status:
        raise ResultsError(
            f"{folder}: no run was completed; `scalebench status {folder}` says why"
        )


def _read_epochs(path: Path) -> tuple[list[str], bytes]:
    """Return the header and the bytes of an epochs.csv, without the header and an incomplete last line if it is new."""
    expected = schema.columns(schema.EpochRow)
    try:
        with reading(path):
            data = read_bytes(path, LARGE)
    except ResultsError:
        # no table: all epochs are missing, which is no error of reading
        if path.exists():
            raise
        return expected, b""
    header = append_only.from_line(data[: data.find(b"\n") + 1])
    if not header:  # it was being written
        return expected, b""
    append_only.check_header(
        path, header, expected, schema.optional_columns(schema.EpochRow)
    )
    return header, data[: data.rfind(b"\n") + 1]


def _count_epochs(header: Sequence[str], data: bytes) -> Counter[bytes]:
    """Return the number of different epochs of each attempt, by the first two cells of its rows."""
    if list(header[:3]) == ["run_id", "attempt", "epoch"] and b'"' not in data:
        return Counter(
            cells[: cells.rindex(b",") + 1] for cells in set(_EPOCH.findall(data))
        )
    places = [header.index(name) for name in ("run_id", "attempt", "epoch")]
    cells = set()  # an epoch that was written twice counts once
    for line in data.split(b"\n")[1:]:
        row = append_only.from_line(line)
        if len(row) == len(header):
            cells.add(tuple(row[place] for place in places))
    return Counter(f"{run_id},{attempt},".encode() for run_id, attempt, _ in cells)


def _are_plain(rows: Sequence[Sequence[str]]) -> bool:
    """Return True if every row has its first cells and another, and no quote in the first ones."""
    if any(len(row) <= len(_FIRST) for row in rows):
        return False
    firsts = islice(zip(*rows, strict=True), len(_FIRST))
    return not any('"' in "".join(column) for column in firsts)


def _is_attempt(cell: str) -> bool:
    return _is_number(cell) and int(cell) > 0


def _is_number(cell: str) -> bool:
    # `int` takes digits of other scripts and underscores, too
    return cell.isascii() and cell.isdecimal() and len(cell) < _DIGITS
