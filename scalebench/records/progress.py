"""How far a study is: what was planned against what runs.csv holds. Reads no epochs and imports nothing heavy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path

from scalebench.errors import ResultsError
from scalebench.records.attempts import Attempts
from scalebench.records.cells import to_text
from scalebench.system.atomic_write import write_whole

FILE = "planned.json"
_PLANNED = ("run_id", "config_hash", "group")
_NEWEST = 2000  # attempts, whose pace is taken for that of the rest
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
    most_to_come: int = 0  # further runs, if no interval becomes as narrow as the study asks
    doubled: int = 0  # rows that give an attempt at a run once more; of such the last counts

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


def keep_planned(folder: Path, runs: Iterable[Planned], most_to_come: int = 0, *, begun_in: Path | None = None) -> None:
    """Write what the study in `folder` consists of, and how many runs may follow, as their times will tell.

    `begun_in` is the folder from which relative paths of the study are seen. It is written relative to `folder` where
    that lies in it, so that both can be moved, else as a path of study.yaml, which names nobody.

    Raises:
        ResultsError: it cannot be written.
    """
    content: dict[str, object] = {"most_to_come": most_to_come}
    if begun_in is not None:
        content["begun_in"] = _seen_from(folder, begun_in)
    columns = zip(*((run.run_id, run.config_hash, run.group) for run in runs), strict=True)
    content |= dict(zip(_PLANNED, columns, strict=False))
    try:
        write_whole(folder / FILE, json.dumps(content) + "\n")
    except OSError as error:
        raise ResultsError(f"cannot write {folder / FILE}: {error.strerror}; choose another --output folder") from None


def begun_in(folder: Path) -> Path | None:
    """The folder from which relative paths of the study in `folder` are seen; None if that is unknown, or gone."""
    from scalebench.study.load import from_home  # slow to import, and `status` has no use for it

    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))["begun_in"]
        place = (folder.resolve() / from_home(said)).resolve()
        return place if place.is_dir() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _seen_from(folder: Path, place: Path) -> str:
    from scalebench.study.load import to_home

    try:
        return "/".join(".." for _ in folder.resolve().relative_to(place.resolve()).parts) or "."
    except ValueError:
        return str(to_home(f"{place.resolve()}/."))


def progress_of(folder: Path) -> Progress:
    """How far the study in `folder` is.

    Raises:
        ResultsError: there is no study, its tables are of another schema version, or a row is damaged.
    """
    attempts = Attempts(folder / "runs.csv")
    latest, newest = attempts.latest(), attempts.newest(_NEWEST)
    planned, most_to_come = _planned(folder)
    if planned is None:  # written by hand, or by another version: then it consists of what it holds
        planned = [
            (run_id, attempts.config_hash[place], _group(attempts.row(place))) for run_id, place in latest.items()
        ]
    ended, remaining = [], Counter[str]()
    for run_id, config_hash, group in planned:
        place = latest.get(run_id)
        if place is not None and attempts.config_hash[place] == config_hash:
            ended.append(place)
        else:
            remaining[group] += 1
    failures = [
        Failure(attempts.run_id[place], attempts.status[place], to_text(attempts.row(place)["error"]))
        for place in ended
        if attempts.status[place] != "completed"
    ]
    return Progress(
        study=to_text(newest[-1]["study"]) if newest else folder.name,
        planned=len(planned),
        done=len(ended) - len(failures),
        failures=failures,
        remaining=remaining,
        most_to_come=most_to_come,
        doubled=attempts.doubled(),
        seconds_per_run=_paces(newest),
    )


def _planned(folder: Path) -> tuple[list[tuple[str, str, str]] | None, int]:
    """(run_id, config_hash, group) of each planned run and how many may follow; None where no plan was written."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        columns = [content.get(name, []) for name in _PLANNED]
        if any(not set(map(type, column)) <= {str} for column in columns):
            raise ValueError("expected texts")
        return list(zip(*columns, strict=True)), int(content["most_to_come"])
    except FileNotFoundError:
        return None, 0
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
    raise ResultsError(f"cannot read {path} ({reason}); delete it, `scalebench run` writes it again")


def _group(row: dict[str, str]) -> str:
    return group_of(row["execution"], row["engine"])


def _paces(rows: Iterable[dict[str, str]]) -> dict[str, float]:
    """Wall seconds by group, from the start of a run to that of the next; nights between two commands do not count.

    Real runs of all engines are made in one order, one at a time: what follows a run may be of another group, and its
    start ends that run all the same. Between real and virtual runs lie other things, such as a calibration.
    """
    begun = []
    for row in rows:
        with suppress(ValueError):  # no moment was noted
            moment = datetime.fromisoformat(row["started_utc"]).timestamp()
            begun.append((moment, row["execution"] == "virtual", _group(row)))
    begun.sort(key=lambda start: start[0])
    gaps: dict[str, list[float]] = {}
    for _, side in groupby(begun, key=lambda start: start[1]):
        starts = list(side)
        for (moment, _, group), (following, _, _) in pairwise(starts):
            if moment < starts[-1][0]:
                gaps.setdefault(group, []).append(following - moment)
    return {group: pace for group, times in gaps.items() if (pace := _mean_without_breaks(times))}


def _mean_without_breaks(gaps: list[float]) -> float | None:
    positive = sorted(gap for gap in gaps if gap > 0)  # jobs that began at once have none
    if not positive:
        return None
    usual = positive[len(positive) // 2]
    worked = [gap for gap in gaps if gap <= _BREAK * usual + 60]
    return sum(worked) / len(worked)
