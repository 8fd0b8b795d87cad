"""Merging of finished shards into the one record of their study."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from scalebench.batch.shards import SHARDS, Shard, folder_of
from scalebench.batch.submission import (
    Submission,
    read_submission,
)
from scalebench.errors import ResultsError, reading, writing
from scalebench.formatting import counted
from scalebench.records.attempts import Attempts
from scalebench.records.folder import CALIBRATION, EPOCHS, PROVENANCE, RUNS, STUDY
from scalebench.records.lock import folder_lock
from scalebench.records.schema import EpochRow, RunRow, columns
from scalebench.records.study_file import changes
from scalebench.study.load import load_study
from scalebench.study.spec import Study
from scalebench.system.file_access import open_own, write_atomic

_WEIGHTS = "weights"
_SHOWN = 3  # missing runs of a shard in a message
Cells = dict[str, str]


@dataclass
class Collected:
    """What a collection did: rows that were added, and runs that are still missing, by shard."""

    rows: int = 0
    runs: int = 0  # completed, of all shards
    planned: int = 0
    missing: list[tuple[Shard, list[str]]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the missing runs in words, a line for each shard."""
        found = []
        for shard, names in self.missing:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            found.append(
                f"{shard}: {counted(len(names), 'run')} left: {', '.join(names[:_SHOWN])}{more}"
            )
        return found


def collect(folder: Path, others: Sequence[Path] = ()) -> Collected:
    """Merge the shards in `folder`, and those in the copies `others` of it, into its tables; each row once.

    Rows keep their text. A run that two shards made counts once, by the first that
    completed it.

    Raises:
        ResultsError: a shard is of another study, or the tables cannot be read or written.
    """
    submission = read_submission(folder)
    study = load_study(folder / STUDY, {}, [])
    found = [
        (shard, place)
        for shard in submission.shards
        for place in _places(folder, others, shard)
        if _is_of_this_study(place, study, shard)
    ]
    if not found:
        raise ResultsError(
            f"{folder} has no records of a shard yet; scalebench status {folder} says what they wait for"
        )
    # before anything is merged: ratios between two calibrations would be of two
    # machines
    _require_one_calibration(found)
    # the last job collects by itself, perhaps while a user does: the second waits, and
    # finds nothing to add
    with folder_lock(folder, waits_for=lambda _: None):
        collected = _merge(folder, [place for _, place in found])
        for _, place in found:
            _copy_files(place, folder)
    done = _completed(folder)
    collected.planned = sum(len(shard.run_ids) for shard in submission.shards)
    for shard in submission.shards:
        missing = [run_id for run_id in shard.run_ids if run_id not in done]
        collected.runs += len(shard.run_ids) - len(missing)
        if missing:
            collected.missing.append((shard, missing))
    return collected


def _places(folder: Path, others: Sequence[Path], shard: Shard) -> list[Path]:
    """Return the folders of a shard's records, in the study's own folder and in its copies.

    Raises:
        ResultsError: a copy is none.
    """
    # before a row is read: a mistyped folder would look like one without records
    for other in others:
        if not (other / SHARDS).is_dir():
            raise ResultsError(
                f"{other} has no folder {SHARDS}; expected a copy of {folder} from another cluster"
            )
    places = [folder_of(folder, shard.number)]
    places += [other / SHARDS / str(shard.number) / folder.name for other in others]
    return [place for place in places if (place / RUNS).is_file()]


def _is_of_this_study(place: Path, study: Study, shard: Shard) -> bool:
    """Return True, or refuse records of another study: more runs, or another version of scalebench, are none.

    Raises:
        ResultsError: says what differs.
    """
    step = f"remove {place.parent}, or collect it with the study to which it belongs"
    if not (place / STUDY).is_file():
        raise ResultsError(
            f"{place} does not say which study it is of ({STUDY}); {step}"
        )
    if changed := changes(place, study):
        raise ResultsError(
            f"shard {shard.number} in {place.parent} is of another study than {STUDY} ({'; '.join(changed)}); {step}"
        )
    return True


def _require_one_calibration(found: Iterable[tuple[Shard, Path]]) -> None:
    """Refuse virtual runs of one study that were charged by two calibrations."""
    known: dict[int, tuple[Path, bytes]] = {}
    for shard, place in found:
        # shards of real runs have none
        path = place / CALIBRATION
        if not path.is_file():
            continue
        with reading(path):
            content = path.read_bytes()
        first, of_first = known.setdefault(shard.number, (path, content))
        if content != of_first:
            raise ResultsError(
                f"shard {shard.number} has two calibrations, {first} and {path}: its virtual runs cannot be compared; "
                "leave one of the two out"
            )


def _merge(folder: Path, places: Sequence[Path]) -> Collected:
    """Add the rows that the tables in `folder` lack; the runs last, as they commit the epochs."""
    # as text: a number keeps the digits with which it was written
    runs, epochs = _table(folder / RUNS), _table(folder / EPOCHS)
    completed = {row["run_id"] for row in runs if row["status"] == "completed"}
    known = {_identity(row) for row in runs}
    attempts: dict[str, int] = {}
    for row in runs:
        attempts[row["run_id"]] = max(
            attempts.get(row["run_id"], 0), int(row["attempt"])
        )
    collected = Collected()
    for place in places:
        of_run: dict[tuple[str, str], list[Cells]] = {}
        for row in _table(place / EPOCHS):
            of_run.setdefault((row["run_id"], row["attempt"]), []).append(row)
        for row in _table(place / RUNS):
            name, attempt = row["run_id"], row["attempt"]
            # collected before, or made twice, as by copies on two clusters
            if _identity(row) in known or name in completed:
                continue
            known.add(_identity(row))
            # two shards may each have a first attempt at a run
            number = attempts[name] = max(attempts.get(name, 0) + 1, int(attempt))
            runs.append(row | {"attempt": str(number)})
            epochs += [
                epoch | {"attempt": str(number)}
                for epoch in of_run.get((name, attempt), [])
            ]
            collected.rows += 1
            if row["status"] == "completed":
                completed.add(name)
    # the run rows last: they commit the epochs
    for name, row_type, rows in ((EPOCHS, EpochRow, epochs), (RUNS, RunRow, runs)):
        _write(folder / name, row_type, rows)
    return collected


def _identity(row: Cells) -> tuple[str, str]:
    """An attempt at a run: the moment at which it began tells it from one that another cluster made."""
    return row["run_id"], row["started_utc"]


def _table(path: Path) -> list[Cells]:
    """Return the rows of a table, without a last line that was cut off; none where there is no table."""
    if not path.is_file():
        return []
    if path.name == RUNS:
        Attempts(path)  # refuses another schema version
    with reading(path):
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    # a job that was killed, or still runs, may leave half a line
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def _write(path: Path, row_type: type[BaseModel], rows: Iterable[Cells]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(row_type), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with writing(path, ""):
        write_atomic(path, text.getvalue())


def _copy_files(place: Path, folder: Path) -> None:
    """Copy calibration, provenance and weights of a shard; names say content or run, so none replaces another."""
    files = [
        place / CALIBRATION,
        *sorted((place / PROVENANCE).glob("*.json")),
        *sorted((place / _WEIGHTS).glob("*")),
    ]
    for path in files:
        target = folder / path.relative_to(place)
        if path.is_file() and not target.exists():
            with writing(target, ""):
                target.parent.mkdir(parents=True, exist_ok=True)
                # weights can be gigabytes
                with path.open("rb") as source, open_own(target, "wb") as copy:
                    shutil.copyfileobj(source, copy)


def _completed(folder: Path) -> set[str]:
    attempts = Attempts(folder / RUNS)
    return {
        name
        for name, status in zip(attempts.run_id, attempts.status, strict=True)
        if status == "completed"
    }


def completed_runs(folder: Path, submission: Submission) -> dict[int, set[str]]:
    """Return the completed runs of each shard, collected or not."""
    collected = _completed(folder) if (folder / RUNS).is_file() else set()
    found = {}
    for shard in submission.shards:
        place = folder_of(folder, shard.number)
        own = _completed(place) if (place / RUNS).is_file() else set()
        found[shard.number] = (own | collected) & set(shard.run_ids)
    return found
