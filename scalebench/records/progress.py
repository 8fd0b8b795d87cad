"""How far a study is: what was planned against what runs.csv holds. Reads no epochs and imports nothing heavy."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

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
    latest, begun = _read(folder / "runs.csv")
    rows = list(latest.values())
    planned = _planned(folder)
    if planned is None:  # written by hand, or by another version: then it consists of what it holds
        planned = [[row.run_id, row.config_hash, row.group] for row in rows]
    ended, remaining = [], Counter[str]()
    for run_id, config_hash, group in planned:
        row = latest.get(run_id)
        if row is not None and row.config_hash == config_hash:
            ended.append(row)
        else:
            remaining[group] += 1
    failures = [Failure(row.run_id, row.status, to_text(row.error)) for row in ended if row.status != "completed"]
    return Progress(
        study=to_text(rows[-1].study) if rows else folder.name,
        planned=len(planned),
        done=len(ended) - len(failures),
        failures=failures,
        remaining=remaining,
        seconds_per_run={group: pace for group, times in begun.items() if (pace := _pace(times)) is not None},
    )


class _Row(NamedTuple):
    study: str
    run_id: str
    config_hash: str
    attempt: int
    status: str
    error: str
    group: str


def _planned(folder: Path) -> list[list[str]] | None:
    path = folder / FILE
    try:
        planned = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        planned, reason = None, f" ({' '.join(str(error).split())})"
    else:
        reason = ""
    if not isinstance(planned, list) or not all(_is_planned(entry) for entry in planned):
        raise ResultsError(f"cannot read {path}{reason}; delete it, `scalebench run` writes it again")
    return planned


def _is_planned(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and all(isinstance(text, str) for text in entry)


def _read(path: Path) -> tuple[dict[str, _Row], dict[str, list[str]]]:
    """The latest attempt at each run, and the moments at which attempts began, by group.

    A last line that is being written at this moment does not count.
    """
    latest: dict[str, _Row] = {}
    begun: dict[str, list[str]] = {}
    versions: set[str] = set()
    try:
        with path.open("rb") as file:
            header = from_line(file.readline())
            if not header:
                return {}, {}
            check_header(path, header, columns(RunRow))
            cells_of = _cutter(header)
            for number, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    break
                cells = cells_of(line)
                if cells is None:
                    count = len(from_line(line))
                    raise ResultsError(
                        f"{path}, line {number}: {count} cells, expected {len(header)}; repair or remove the line"
                    )
                version, study, run_id, digest, attempt, status, error, execution, engine, started = cells
                if not attempt.isdecimal():
                    raise ResultsError(f"{path}, line {number}: attempt is {attempt!r}, expected a number")
                versions.add(version)
                group, number_of = group_of(execution, engine), int(attempt)
                before = latest.get(run_id)
                if before is None or number_of >= before.attempt:
                    latest[run_id] = _Row(study, run_id, digest, number_of, status, error, group)
                begun.setdefault(group, []).append(started)
    except (FileNotFoundError, NotADirectoryError):
        raise ResultsError(f"{path.parent} holds no runs.csv; expected a study's folder, as results/<study>") from None
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    check_version(path, versions)
    return latest, begun


_FIRST = (
    *("schema_version", "study", "run_id", "config_hash", "attempt", "status", "error", "execution", "engine"),
)  # as they are written; among a thousand runs nobody waits for the cells between these and the last ones
_STARTED = "started_utc"
_QUOTED = re.compile(rb'"[^"]*"')


def _cutter(header: list[str]) -> Callable[[bytes], Sequence[str] | None]:
    """Cuts the cells `_FIRST` and `started_utc` out of a line; None where their number is not the header's."""
    width, places = len(header), [header.index(name) for name in (*_FIRST, _STARTED)]
    behind = width - places[-1]
    as_written = tuple(header[: len(_FIRST)]) == _FIRST

    def cut(line: bytes) -> Sequence[str] | None:
        if as_written and _QUOTED.sub(b"", line).count(b",") == width - 1:
            *first, rest = line.split(b",", len(_FIRST))
            middle, started, *_ = line.rsplit(b",", behind)
            if line.find(b'"', 0, -len(rest)) < 0 and line.find(b'"', len(middle)) < 0:
                return b",".join([*first, started]).decode("utf-8", errors="replace").split(",")
        cells = from_line(line)
        return [cells[place] for place in places] if len(cells) == width else None

    return cut


def _pace(begun: list[str]) -> float | None:
    """Wall seconds from the start of one run to that of the next; nights between two commands do not count."""
    times = []
    for started in begun:
        with suppress(ValueError):  # no moment was noted
            times.append(datetime.fromisoformat(started).timestamp())
    times.sort()
    gaps = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    if not gaps:
        return None
    usual = sorted(gaps)[len(gaps) // 2]
    worked = [gap for gap in gaps if gap <= _BREAK * usual + 60]
    runs = sum(moment < times[-1] for moment in times) - (len(gaps) - len(worked))
    return sum(worked) / runs if runs > 0 else None
