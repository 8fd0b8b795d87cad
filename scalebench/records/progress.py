"""How far a study is: what was planned against what runs.csv holds. Reads no epochs and imports nothing heavy."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from scalebench.errors import ResultsError
from scalebench.records.cells import from_line, to_text
from scalebench.records.schema import RunRow, columns
from scalebench.records.table import check_header, check_version
from scalebench.whole_file import write_whole

FILE = "planned.json"
_BREAK = 10.0  # a pause between runs that is so much longer than usual, and a minute more, was no run


@dataclass(frozen=True)
class Planned:
    """A run that the study consists of; the group is what its wall time is guessed by."""

    run_id: str
    config_hash: str
    group: str  # of `group_of`


def group_of(execution: str, engine: str) -> str:
    """The runs that take about the same wall time."""
    return execution if execution == engine else f"{execution} {engine}"


@dataclass(frozen=True)
class Failure:
    """A run whose latest attempt was not completed, and why."""

    run_id: str
    status: str
    error: str


@dataclass
class Progress:
    """`seconds_per_run` is wall time by group, from the finished runs; a group without any is missing there."""

    study: str
    planned: int
    done: int
    failures: list[Failure]
    remaining: Counter[str]  # runs without an end, by group
    seconds_per_run: dict[str, float]

    @property
    def left_s(self) -> float | None:
        """Expected seconds until all runs have an end, at the pace of the finished ones; None if nothing tells."""
        pace = self.seconds_per_run
        known = [count * pace[group] for group, count in self.remaining.items() if group in pace]
        return sum(known) if known or not self.remaining else None

    @property
    def untold(self) -> Counter[str]:
        """The remaining runs whose time cannot be told yet."""
        return Counter({group: n for group, n in self.remaining.items() if group not in self.seconds_per_run})


def keep_planned(folder: Path, runs: Iterable[Planned]) -> None:
    """Write what the study in `folder` consists of.

    Raises:
        ResultsError: it cannot be written.
    """
    try:
        write_whole(folder / FILE, json.dumps([[run.run_id, run.config_hash, run.group] for run in runs]) + "\n")
    except OSError as error:
        raise ResultsError(f"cannot write {folder / FILE}: {error.strerror}; choose another --output folder") from None


def progress_of(folder: Path) -> Progress:
    """How far the study in `folder` is.

    Raises:
        ResultsError: there is no study, its tables are of another schema version, or a row is damaged.
    """
    rows = list(_latest(folder / "runs.csv").values())
    planned = _planned(folder)
    if planned is None:  # written by hand, or by another version: then it consists of what it holds
        planned = [Planned(row.run_id, row.config_hash, row.group) for row in rows]
    status = {(row.run_id, row.config_hash): row for row in rows}
    ended = [status[key] for run in planned if (key := (run.run_id, run.config_hash)) in status]
    failures = [Failure(row.run_id, row.status, row.error) for row in ended if row.status != "completed"]
    remaining = Counter(run.group for run in planned if (run.run_id, run.config_hash) not in status)
    return Progress(
        study=rows[-1].study if rows else folder.name,
        planned=len(planned),
        done=len(ended) - len(failures),
        failures=failures,
        remaining=remaining,
        seconds_per_run=_seconds_per_run(rows),
    )


@dataclass(frozen=True)
class _Row:
    study: str
    run_id: str
    config_hash: str
    attempt: int
    status: str
    error: str
    group: str
    started_utc: str


def _planned(folder: Path) -> list[Planned] | None:
    path = folder / FILE
    try:
        return [Planned(*map(str, entry)) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ResultsError(f"cannot read {path}: {error}; delete it, `scalebench run` writes it again") from None


def _latest(path: Path) -> dict[str, _Row]:
    """The latest attempt at each run; a last line that is being written at this moment does not count."""
    latest: dict[str, _Row] = {}
    versions: set[str] = set()
    try:
        with path.open("rb") as file:
            header = from_line(file.readline())
            if not header:
                return {}
            check_header(path, header, columns(RunRow))
            places = [header.index(name) for name in _COLUMNS]
            lines = (line.decode("utf-8", errors="replace") for line in file if line.endswith(b"\n"))
            for number, cells in enumerate(csv.reader(lines), start=2):
                row, version = _row(path, number, cells, len(header), places)
                versions.add(version)
                if row.run_id not in latest or row.attempt >= latest[row.run_id].attempt:
                    latest.pop(row.run_id, None)
                    latest[row.run_id] = row
    except FileNotFoundError:
        raise ResultsError(f"{path.parent} holds no runs.csv; expected a study's folder, as results/<study>") from None
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except csv.Error as error:
        raise ResultsError(f"{path}: {error}; repair or remove the line") from None
    check_version(path, versions)
    return latest


_COLUMNS = (
    *("study", "run_id", "config_hash", "status", "error", "started_utc"),
    *("schema_version", "attempt", "execution", "engine"),
)


def _row(path: Path, number: int, cells: Sequence[str], width: int, places: Sequence[int]) -> tuple[_Row, str]:
    if len(cells) != width:
        raise ResultsError(f"{path}, line {number}: {len(cells)} cells, expected {width}; repair or remove the line")
    study, run_id, digest, status, error, started, version, attempt, execution, engine = (cells[i] for i in places)
    if not attempt.isdecimal():
        raise ResultsError(f"{path}, line {number}: attempt is {attempt!r}, expected a number")
    group = group_of(execution, engine)
    return _Row(to_text(study), run_id, digest, int(attempt), status, to_text(error), group, started), version


def _seconds_per_run(rows: Sequence[_Row]) -> dict[str, float]:
    """Wall seconds from the start of one run to that of the next; nights between two commands do not count."""
    moments: dict[str, list[float]] = {}
    for row in rows:
        try:
            moments.setdefault(row.group, []).append(datetime.fromisoformat(row.started_utc).timestamp())
        except ValueError:
            continue
    found: dict[str, float] = {}
    for group, times in moments.items():
        times.sort()
        gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
        if not gaps:
            continue
        usual = sorted(gaps)[len(gaps) // 2]
        worked = [gap for gap in gaps if gap <= _BREAK * usual + 60]
        before_last = sum(moment < times[-1] for moment in times) - (len(gaps) - len(worked))
        if before_last > 0:
            found[group] = sum(worked) / before_last
    return found
