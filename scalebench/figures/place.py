"""The output folder of a study: `plots/<study>`, or `plots/<study>-2` ... beside other records of that name."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from itertools import count
from pathlib import Path

from scalebench.errors import ResultsError, writing
from scalebench.records.attempts import Attempts
from scalebench.records.folder import RUNS
from scalebench.records.table import to_text
from scalebench.study.spec import slug
from scalebench.system.atomic_write import open_own

_MARK = ".records"  # file with a hash of the path of the records


def place_for(records: Path, output: Path) -> Path:
    """Create and return `output`/<study> for the study in `records`, or <study>-2 ... if other records own that folder.

    A mark in the folder names its records; a folder without a mark is taken.

    Raises:
        ResultsError: there are no records, or the folder cannot be made.
    """
    attempts = Attempts(records / RUNS)
    if not len(attempts):
        raise ResultsError(f"{records / RUNS} holds no runs yet; `scalebench run` fills it")
    study = slug(to_text(attempts.row(len(attempts) - 1)["study"]))
    mark = hashlib.sha256(str(records.resolve()).encode()).hexdigest()[:12]
    for number in count(1):
        place = output / (study if number == 1 else f"{study}-{number}")
        if _mark_of(place) in ("", mark):
            break
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        with open_own(place / _MARK, "w") as file:
            file.write(mark + "\n")
    return place


def _mark_of(place: Path) -> str:
    with suppress(OSError):
        return (place / _MARK).read_text(encoding="ascii", errors="replace").strip()
    return ""
