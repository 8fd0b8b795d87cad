"""Names of the files in a study's folder of records, and the folder a command reads."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scalebench.errors import ResultsError, writing
from scalebench.system.file_access import write_atomic

RUNS, EPOCHS = "runs.csv", "epochs.csv"
# runs that went on without ranks that died: in no figure, law or ratio
ELASTIC = "elastic.csv"
STUDY = "study.yaml"
CALIBRATION = "calibration.json"
PLANNED = "planned.json"
DURATIONS = "durations.json"
PROVENANCE = "provenance"  # a folder with one JSON file per environment
# folder of scripts and of what jobs print, and the file in it
JOBS, SUBMISSION = (
    "jobs",
    "submission.json",
)


def newest_study(folder: Path) -> Path:
    """Return the most recently changed study in `folder`.

    Raises:
        ResultsError: `folder` holds no study.
    """
    # rows are appended: the table changed last is the study last worked on
    tables = sorted(folder.glob(f"*/{RUNS}"), key=lambda table: table.stat().st_mtime)
    if not tables:
        raise ResultsError(
            f"no study in {folder}/; run one with `scalebench run`, or name its folder, RESULTS"
        )
    return tables[-1].parent


def study_in(folder: Path) -> Path:
    """Return `folder` if it is the folder of a study, else the newest study in it, else `folder` again."""
    # a study that has no rows yet has its study.yaml
    is_study = (folder / RUNS).exists() or (folder / STUDY).exists()
    if is_study or not any(folder.glob(f"*/{RUNS}")):
        return folder
    return newest_study(folder)


def is_submitted(folder: Path) -> bool:
    """Return True if the study in `folder` was submitted as batch jobs."""
    return (folder / JOBS / SUBMISSION).is_file()


def filled_by(folder: Path) -> str:
    """Return the command that brings runs into the tables of the study in `folder`."""
    return f"scalebench collect {folder}" if is_submitted(folder) else "scalebench run"


def require_writable(folder: Path) -> None:
    """Raise ResultsError if `folder` cannot be written, or made where it is missing."""
    # The nearest folder that exists decides whether the others can be made.
    there = next(
        place for place in (folder, *folder.absolute().parents) if place.exists()
    )
    with writing(folder):
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


# of durations.json, which comes with a study, perhaps from someone else
_MOST_BYTES = 10_000


@contextmanager
def timed(folder: Path, command: str, *, added: bool = False) -> Iterator[None]:
    """Record the duration of the block unless it fails; `added` to the previous one when a study is resumed.

    A folder that cannot be written is left unchanged.
    """
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    if not folder.is_dir():
        return
    # Read at the end: another command may have written meanwhile.
    known = durations_in(folder)
    seconds += known.get(command, 0.0) if added else 0.0
    with suppress(OSError):
        write_atomic(
            folder / DURATIONS,
            json.dumps(known | {command: round(seconds, 3)}, indent=1, sort_keys=True)
            + "\n",
        )


def durations_in(folder: Path) -> dict[str, float]:
    """Return seconds by command; empty if the file is missing or damaged."""
    path = folder / DURATIONS
    try:
        content = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.stat().st_size <= _MOST_BYTES
            else {}
        )
    except (OSError, ValueError, RecursionError):
        return {}
    known = content.items() if isinstance(content, dict) else ()
    found = {}
    for name, seconds in known:
        if isinstance(seconds, int | float) and 0 <= seconds < float("inf"):
            found[name] = float(seconds)
    return found
