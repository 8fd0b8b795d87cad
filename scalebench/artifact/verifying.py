"""Checks an unpacked artifact: its files are those that were packed, and its records give its figures."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from scalebench.artifact.packing import SUMS, changed_files
from scalebench.errors import ResultsError
from scalebench.figures import plot_folder
from scalebench.records.cells import to_text

REDRAWN = "redrawn"
RELATIVE, ABSOLUTE = 1e-9, 1e-12  # sums and logarithms differ in their last bits between processors


@dataclass(frozen=True)
class Verdict:
    """One figure: how many cells of its data were compared, and the first that differs (empty: none)."""

    figure: str
    cells: int
    fault: str


def verify_artifact(folder: Path, *, jobs: int = 1) -> list[Verdict]:
    """Draw the figures of the artifact in `folder` again, into `folder`/redrawn, and compare their data with its own.

    Raises:
        ResultsError: not an artifact, a file that was changed, or records that cannot be drawn.
    """
    if not (folder / SUMS).is_file():
        raise ResultsError(f"{folder} holds no {SUMS}; expected an unpacked artifact")
    if changed := changed_files(folder):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ResultsError(f"{folder}: {changed[0]}{more} is not as it was packed; unpack the artifact again")
    shipped = sorted((folder / "plots").glob("*/*.csv"))
    records = sorted(path.parent for path in (folder / "results").glob("*/runs.csv"))
    if not shipped or len(records) != 1:
        raise ResultsError(f"{folder}: expected figures in plots/ and one study in results/")
    drawn = plot_folder(records[0], folder / REDRAWN, jobs=jobs)
    again = {figure.name: figure.files[-1] for figure in drawn if figure.files}
    return [_compare(file.stem, file, again.get(file.stem)) for file in shipped]


def _compare(figure: str, shipped: Path, again: Path | None) -> Verdict:
    if again is None:
        return Verdict(figure, 0, "could not be drawn again")
    cells = 0
    with shipped.open(newline="", encoding="utf-8") as old, again.open(newline="", encoding="utf-8") as new:
        for number, (left, right) in enumerate(zip_longest(csv.reader(old), csv.reader(new)), start=1):
            if left is None or right is None or len(left) != len(right):
                return Verdict(figure, cells, f"line {number} is there once only, or has another length")
            for before, now in zip(left, right, strict=True):
                cells += 1
                if to_text(before) != to_text(now) and not _equal(before, now):
                    return Verdict(figure, cells, f"line {number}: {before or 'nothing'} is now {now or 'nothing'}")
    return Verdict(figure, cells, "")


def _equal(before: str, now: str) -> bool:
    try:
        return math.isclose(float(before), float(now), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except ValueError:
        return False
