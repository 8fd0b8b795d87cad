"""Progress of a study: planned runs against the rows of runs.csv and epochs.csv. Imports nothing heavy."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from scalebench.errors import ResultsError, writing
from scalebench.formatting import counted
from scalebench.records.append_only import to_text
from scalebench.records.attempts import Attempts
from scalebench.records.folder import EPOCHS, PLANNED, RUNS
from scalebench.study.cell import group_of
from scalebench.study.choices import RESULTS_OF_A_TRIAL
from scalebench.system.file_access import read_text, write_atomic

if TYPE_CHECKING:
    from scalebench.study.spec import Run

_PLANNED = {"run_id": str, "config_hash": str, "group": str, "epochs": int}
_SHOWN = 5  # names of runs in a note
_NEWEST = 2000  # attempts from which the pace is estimated
# a gap between starts above this multiple of the median plus a minute is a pause
_BREAK = 10.0


@dataclass(frozen=True)
class Planned:
    """A planned run; runs of one group have similar wall times."""

    run_id: str
    config_hash: str
    group: str  # of `study.cell.group_of`
    epochs: int = 0  # 0: unknown

    @classmethod
    def of(cls, run: Run) -> Planned:
        group = group_of(run.execution, run.engine)
        return cls(run.run_id, run.config_hash, group, run.epochs)


def lost_epochs(run_ids: Collection[str]) -> str:
    """Return the beginning of a note on completed runs whose epochs were lost."""
    named = list(run_ids)[:_SHOWN]
    if len(run_ids) > _SHOWN:
        named.append("...")
    return (
        f"{EPOCHS} lacks epochs of {counted(len(run_ids), 'completed run')} ({', '.join(named)}), as something else "
        "deleted or cut the file"
    )


@dataclass(frozen=True)
class Failure:
    """A run whose latest attempt was not completed, with the reason."""

    run_id: str
    status: str
    error: str


@dataclass
class Progress:
    """Progress of a study; `seconds_per_run` is the mean wall time by group with finished runs."""

    study: str
    planned: int
    done: int
    failures: list[Failure]
    remaining: Counter[str]  # unfinished runs by group, those of `without_epochs` too
    seconds_per_run: dict[str, float]
    # further runs until the stopping rule ends the study, upper bound
    most_to_come: int = 0
    repeated: int = 0  # rows that repeat an attempt; the last one counts
    # rows of runs on other data than the last one's, which are in no table or figure
    other_data: int = 0
    # groups of completed runs that lost epochs, by run_id
    without_epochs: dict[str, str] = field(default_factory=dict)

    @property
    def never_made(self) -> Counter[str]:
        """Runs without a result of their own, by group."""
        return self.remaining - Counter(self.without_epochs.values())

    @property
    def left_s(self) -> float | None:
        """Expected seconds until all runs have finished; None without an estimate."""
        pace = self.seconds_per_run
        known = [
            count * pace[group]
            for group, count in self.remaining.items()
            if group in pace
        ]
        return sum(known) if known or not self.remaining else None

    @property
    def without_estimate(self) -> Counter[str]:
        """Remaining runs of groups without a finished run."""
        return Counter(
            {
                group: n
                for group, n in self.remaining.items()
                if group not in self.seconds_per_run
            }
        )


def keep_planned(
    folder: Path,
    runs: Iterable[Planned],
    most_to_come: int = 0,
    *,
    begun_in: Path | None = None,
) -> None:
    """Write the planned runs of the study in `folder`, and the upper bound of runs that a stopping rule may add.

    `begun_in` is the folder to which relative paths of the study refer. It is written
    relative to `folder` if it contains `folder`, so that both can be moved, else as in
    study.yaml, without user names.

    Raises:
        ResultsError: the file cannot be written.
    """
    content: dict[str, object] = {"most_to_come": most_to_come}
    if begun_in is not None:
        content["begun_in"] = _seen_from(folder, begun_in)
    # by column: names of keys for each of a hundred thousand runs would be most of the
    # file
    columns = zip(*(astuple(run) for run in runs), strict=True)
    content |= dict(zip(_PLANNED, columns, strict=False))
    with writing(folder / PLANNED, "choose another --output folder"):
        write_atomic(folder / PLANNED, json.dumps(content) + "\n")


def begun_in(folder: Path) -> Path | None:
    """Return the folder to which relative paths of the study in `folder` refer; None if unknown or missing."""
    # slow to import and not needed by `status`
    from scalebench.study.load import from_home

    try:
        recorded = json.loads(read_text(folder / PLANNED))["begun_in"]
        place = (folder.resolve() / from_home(recorded)).resolve()
        return place if place.is_dir() else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _seen_from(folder: Path, place: Path) -> str:
    from scalebench.study.load import to_home

    try:
        return (
            "/".join(".." for _ in folder.resolve().relative_to(place.resolve()).parts)
            or "."
        )
    except ValueError:
        return str(to_home(f"{place.resolve()}/."))


def progress_of(folder: Path) -> Progress:
    """Return the progress of the study in `folder`.

    Raises:
        ResultsError: there is no study, its tables have another schema version, or a row is damaged.
    """
    attempts = Attempts(folder / RUNS)
    # Of many thousands of attempts the newest tell the pace, and only these are parsed.
    latest, newest = attempts.latest(), attempts.newest(_NEWEST)
    planned, most_to_come = _planned(folder)
    if planned is None:  # written by hand: the study consists of its rows
        planned = [
            (run_id, attempts.config_hash[place], _group(attempts.row(place)), 0)
            for run_id, place in latest.items()
        ]
    # Of planned runs the number of epochs is known without parsing their rows.
    known = {run_id: epochs for run_id, _, _, epochs in planned}
    lost = set(attempts.without_epochs(folder / EPOCHS, known))
    ended = []
    remaining = Counter[str]()
    without_epochs = {}
    for run_id, config_hash, group, _ in planned:
        place = latest.get(run_id)
        if (
            place is not None
            # a row of the same name with other settings is of an earlier plan
            and attempts.config_hash[place] == config_hash
            and place not in lost
        ):
            ended.append(place)
        elif place in lost:
            without_epochs[run_id] = group
            remaining[group] += 1
        else:
            remaining[group] += 1
    rows = [
        attempts.row(place) for place in ended if attempts.status[place] != "completed"
    ]
    failures = [
        Failure(row["run_id"], row["status"], to_text(row["error"]))
        for row in rows
        if not row["trial"]
        or row["status"] not in RESULTS_OF_A_TRIAL  # that trial is not tried again
    ]
    return Progress(
        study=to_text(newest[-1]["study"]) if newest else folder.name,
        planned=len(planned),
        done=len(ended) - len(failures),
        failures=failures,
        remaining=remaining,
        most_to_come=most_to_come,
        repeated=attempts.repeated(),
        other_data=_on_other_data(attempts, newest),
        without_epochs=without_epochs,
        seconds_per_run=_paces(
            newest, attempts.path.stat().st_mtime if newest else 0.0
        ),
    )


def _on_other_data(attempts: Attempts, newest: Iterable[dict[str, str]]) -> int:
    """Return how many runs were trained on other data than the last one; under weak scaling data grow with workers."""
    known = [row for row in newest if row["dataset_sha256"] and not row["trial"]]
    if not known or known[-1]["scaling"] == "weak":
        return 0
    return len(attempts.other_data(known[-1]["dataset_sha256"]))


def _planned(folder: Path) -> tuple[list[tuple[str, str, str, int]] | None, int]:
    """Return each planned run as in `Planned`, None without a plan, and the number of runs to come."""
    path = folder / PLANNED
    try:
        content = json.loads(read_text(path))
        columns = [content.get(name, []) for name in _PLANNED]
        if len(columns[-1]) < len(columns[0]):  # written before epochs were
            columns[-1] = [0] * len(columns[0])
        for column, kind in zip(columns, _PLANNED.values(), strict=True):
            # exactly these types: a bool is an int, too
            if not set(map(type, column)) <= {kind}:
                raise ValueError("expected texts and numbers of epochs")
        return list(zip(*columns, strict=True)), int(content["most_to_come"])
    except FileNotFoundError:
        return None, 0
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        reason = " ".join(str(error).split())
    raise ResultsError(
        f"cannot read {path} ({reason}); delete it, `scalebench run` writes it again"
    )


def _group(row: dict[str, str]) -> str:
    return group_of(row["execution"], row["engine"])


def _paces(rows: Iterable[dict[str, str]], ended: float) -> dict[str, float]:
    """Return mean wall seconds by group, from the start of a run to the next start, without pauses between commands.

    Real runs of all engines are interleaved one at a time, so the next start may belong
    to another group. Real and virtual runs are separated, as a calibration may lie
    between them. The last run `ended` when its row was written: a copied file is too
    young for that.
    """
    begun = []
    for row in rows:
        with suppress(ValueError):  # no start was recorded
            moment = datetime.fromisoformat(row["started_utc"]).timestamp()
            begun.append((moment, row["engine"] == "virtual", _group(row)))
    begun.sort(key=lambda start: start[0])
    gaps: dict[str, list[float]] = {}
    for _, side in groupby(begun, key=lambda start: start[1]):
        starts = list(side)
        last = starts[-1][0]
        # a file that was copied, or touched, later says nothing of its last run
        longest = _BREAK * (last - starts[0][0]) / len(starts) + 60
        if starts[-1] is begun[-1] and 0 < ended - last <= longest:
            starts.append((ended, *starts[-1][1:]))
        for (moment, _, group), (following, _, _) in pairwise(starts):
            if moment < starts[-1][0]:
                gaps.setdefault(group, []).append(following - moment)
    paces = {group: _mean_without_breaks(times) for group, times in gaps.items()}
    return {group: pace for group, pace in paces.items() if pace}


def _mean_without_breaks(gaps: list[float]) -> float | None:
    # jobs started together have no gap
    positive = sorted(gap for gap in gaps if gap > 0)
    if not positive:
        return None
    usual = positive[len(positive) // 2]
    worked = [gap for gap in gaps if gap <= _BREAK * usual + 60]
    return sum(worked) / len(worked)
