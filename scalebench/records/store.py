"""Writer of a study's folder of records: runs.csv, epochs.csv, elastic.csv, provenance/."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from scalebench.errors import ResultsError, reading, writing
from scalebench.records.append_only import AppendOnlyTable
from scalebench.records.attempts import Attempts
from scalebench.records.folder import ELASTIC, EPOCHS, RUNS
from scalebench.records.provenance import keep
from scalebench.records.schema import ElasticRow, EpochRow, RunRow, columns
from scalebench.study.choices import RESULTS_OF_A_TRIAL
from scalebench.system.file_access import write_atomic


class Store:
    """Append-only store of runs in `folder`. A run with a row in runs.csv is complete, also after a crash.

    The epoch rows of a run are written first and its row in runs.csv commits them.
    Opening a folder after a crash moves incomplete lines, and epoch rows without a run
    row, to `runs.csv.partial` and `epochs.csv.partial`. One process writes a folder at
    a time.

    By (run_id, config_hash), `completed` has train_s of every completed run, and
    `tried` also of those that diverged or timed out; neither has runs of
    `without_epochs`, whose epochs were cut off or deleted later. `failed` are the
    run_ids whose latest attempt ended without completion, and `numbered` the (run_id,
    run_order) of the rows found at opening, without warm-up runs and trials.

    Raises:
        ResultsError: the folder cannot be written, or its tables have another schema version.
    """

    def __init__(self, folder: Path | str, *, fsync: bool = True) -> None:
        self.folder = Path(folder)
        self._runs = AppendOnlyTable(self.folder / RUNS, RunRow, fsync=fsync)
        try:
            self.completed: dict[tuple[str, str], float | None] = {}
            self.tried: dict[tuple[str, str], float | None] = {}
            self.failed: set[str] = set()
            self.numbered: list[tuple[str, int]] = []
            self._attempts: dict[str, int] = {}
            attempts = self._read_runs()
            self._epochs = AppendOnlyTable(self.folder / EPOCHS, EpochRow, fsync=fsync)
            # before epochs are counted: those of an attempt that no row committed are
            # of no run
            self._set_aside_uncommitted()
            self.without_epochs = self._take_incomplete(attempts)
        except BaseException:
            self._runs.close()
            raise

    def write_deleted(self) -> list[Path]:
        """Write tables that were deleted since they were opened, as by a purge of old files, again; return them."""
        deleted = [table for table in (self._epochs, self._runs) if table.is_deleted()]
        for table in deleted:
            table.write_again()
        return [table.path for table in deleted]

    def append(self, run: RunRow, epochs: Sequence[EpochRow] = ()) -> None:
        """Write a finished attempt: its epoch rows, then the run row."""
        # A mistake of the caller, which would mix the epochs of two runs.
        foreign = [
            row
            for row in epochs
            if (row.run_id, row.attempt) != (run.run_id, run.attempt)
        ]
        if foreign:
            raise ValueError(
                f"epoch rows of {foreign[0].run_id!r} given with run {run.run_id!r}"
            )
        # The run row comes last: it commits the epochs.
        before = self._epochs.append(epochs)
        try:
            self._runs.append([run])
        except ResultsError:
            self._epochs.take_back(before)
            raise
        self._remember(
            run.run_id, run.config_hash, run.attempt, run.status, run.train_s
        )

    @property
    def set_aside(self) -> list[Path]:
        """Files to which opening moved incomplete rows of an interrupted command."""
        return [
            path
            for path in (self._runs.set_aside, self._epochs.set_aside)
            if path is not None
        ]

    def next_attempt(self, run_id: str) -> int:
        """Return 1 for a new run, else one more than its latest attempt."""
        return self._attempts.get(run_id, 0) + 1

    def keep_provenance(self, facts: Mapping[str, Any]) -> str:
        """Write a description of the environment as provenance/<hash>.json; return the hash."""
        return keep(self.folder, facts)

    def close(self) -> None:
        self._runs.close()
        self._epochs.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read_runs(self) -> Attempts:
        attempts = Attempts(self._runs.path)
        for place in range(len(attempts)):
            # a study goes on by these times, where a damaged one would spoil the
            # stopping rule
            row = attempts.row(place, checked=("train_s",))
            train_s = float(row["train_s"]) if row["train_s"] else None
            self._remember(
                row["run_id"],
                row["config_hash"],
                attempts.attempt[place],
                row["status"],
                train_s,
            )
            if (
                row["run_order"].isdecimal()
                and row["warmup"].lower() != "true"
                and not row["trial"]
            ):
                self.numbered.append((row["run_id"], int(row["run_order"])))
        return attempts

    def _remember(
        self,
        run_id: str,
        config_hash: str,
        attempt: int,
        status: str,
        train_s: float | None,
    ) -> None:
        # rows that were merged from shards are in no order of attempts
        if attempt >= self._attempts.get(run_id, 0):
            self._attempts[run_id] = attempt
            self.failed.discard(run_id)
            if status != "completed":
                self.failed.add(run_id)
        if status == "completed":
            self.completed[run_id, config_hash] = train_s
        # to try a learning rate at which training diverged again would change nothing
        if status in RESULTS_OF_A_TRIAL:
            self.tried[run_id, config_hash] = train_s

    def _take_incomplete(self, attempts: Attempts) -> list[str]:
        """Take completed runs with fewer rows in epochs.csv than epochs for runs not made; return their names."""
        places = attempts.without_epochs(self._epochs.path)
        for place in places:
            key = attempts.run_id[place], attempts.config_hash[place]
            del self.completed[key], self.tried[key]
        return [attempts.run_id[place] for place in places]

    def _set_aside_uncommitted(self) -> None:
        start: int | None = None
        for offset, row in self._epochs.lines_backwards():
            # From the end backwards up to the first row that a run has committed.
            attempt = row.get("attempt", "")
            if attempt.isdecimal() and int(attempt) <= self._attempts.get(
                row.get("run_id", ""), 0
            ):
                break
            start = offset
        if start is not None:
            self._epochs.set_aside_tail(start)


class ElasticTable:
    """Append-only table of elastic runs in `folder`; one process writes a folder at a time.

    `completed` are run_id and config_hash of the completed ones.

    Raises:
        ResultsError: the folder cannot be written, or the table has other columns or a damaged cell.
    """

    def __init__(self, folder: Path) -> None:
        from scalebench.records.reading import read_table  # pandas

        self._table = AppendOnlyTable(folder / ELASTIC, ElasticRow)
        try:
            rows = read_table(folder / ELASTIC, ElasticRow)
        except ResultsError:
            self._table.close()
            raise
        completed = rows[rows["status"] == "completed"]
        self.completed = set(
            zip(completed["run_id"], completed["config_hash"], strict=True)
        )
        self._attempts = {
            str(run_id): int(latest)
            for run_id, latest in rows.groupby("run_id")["attempt"].max().items()
        }

    def append(self, row: ElasticRow) -> None:
        """Write the row of a run that ended."""
        self._table.append([row])
        self._attempts[row.run_id] = row.attempt

    def next_attempt(self, run_id: str) -> int:
        """Return 1 for a new run, else one more than its latest attempt."""
        return self._attempts.get(run_id, 0) + 1

    def __enter__(self) -> ElasticTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._table.close()


def drop_simulated(folder: Path) -> None:
    """Remove the rows of virtual and modelled runs, and of their epochs, from the tables in `folder`; keep trials.

    Raises:
        ResultsError: the tables cannot be read or written.
    """
    dropped = {
        run_id
        for run_id, row in _rows(folder / RUNS)
        if row["engine"] == "virtual" and not row["trial"]
    }
    # the run rows last: they commit the others
    for name, row_type in (
        (EPOCHS, EpochRow),
        (RUNS, RunRow),
    ):
        text = io.StringIO()
        writer = csv.DictWriter(text, columns(row_type), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            row for run_id, row in _rows(folder / name) if run_id not in dropped
        )
        with writing(folder / name, ""):
            write_atomic(folder / name, text.getvalue())


def _rows(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Return (run_id, cells) of each row of `path`."""
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        return [(row["run_id"], row) for row in csv.DictReader(file)]
