"""Verification by a reviewer: the figures, verified from the records; times and metrics of a rerun; its duration."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from scalebench.analysis import Results
from scalebench.artifact.anonymising import Shipment
from scalebench.errors import ResultsError
from scalebench.figures import plot_folder
from scalebench.records.append_only import to_text
from scalebench.records.folder import durations_in
from scalebench.records.progress import progress_of
from scalebench.study.cell import group_of
from scalebench.study.spec import SIMULATED
from scalebench.system.file_access import read_text

SUMS = "SHA256SUMS"
REDRAWN = "redrawn"
TIMES = "times.csv"
RELATIVE, ABSOLUTE = (
    1e-9,
    1e-12,
)  # sums and logarithms differ in their last bits between processors
NOT_TIMED = "not timed"
_EQUAL = (
    "give the same times and metrics, to the last bit on the same processor and build of PyTorch, and up to rounding "
    "on another."
)
_OTHER_MACHINES = (
    "times depend on the machine: on the one described below they are expected within the intervals shown, on another "
    "the order of the strategies and the direction of the differences are what can be compared. Metrics vary with the "
    "order of sums, those of asynchronous strategies with the order in which workers arrive, which no seed fixes."
)


class Verdict(NamedTuple):
    """The comparison of one figure's data: the number of compared cells and the first difference (empty: equal)."""

    figure: str
    cells: int
    fault: str


def sha256(file: Path) -> str:
    """Return the SHA-256 of `file` in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def changed_files(folder: Path) -> list[str]:
    """Return the files in SHA256SUMS that are missing in `folder` or have another checksum."""
    sums = [line.partition("  ") for line in read_text(folder / SUMS).splitlines()]
    return [
        name
        for digest, _, name in sums
        if not (folder / name).is_file() or sha256(folder / name) != digest
    ]


def verify_artifact(folder: Path, *, jobs: int = 1) -> list[Verdict]:
    """Draw the figures of the artifact in `folder` again, into `folder`/redrawn, and compare their data with its own.

    Raises:
        ResultsError: not an artifact, a changed file, or records that cannot be drawn.
    """
    if not (folder / SUMS).is_file():
        raise ResultsError(f"{folder} holds no {SUMS}; expected an unpacked artifact")
    # First: a difference of figures must not be one of records that were touched.
    if changed := changed_files(folder):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ResultsError(
            f"{folder}: {changed[0]}{more} is not as it was packed; unpack the artifact again"
        )
    shipped = sorted((folder / "plots").glob("*/*.csv"))
    records = sorted(path.parent for path in (folder / "results").glob("*/runs.csv"))
    if not shipped or len(records) != 1:
        raise ResultsError(
            f"{folder}: expected figures in plots/ and one study in results/"
        )
    drawn = plot_folder(records[0], folder / REDRAWN, jobs=jobs)
    # The drawn data is the last file of a figure.
    again = {figure.name: figure.files[-1] for figure in drawn if figure.files}
    return [_compare(file.stem, file, again.get(file.stem)) for file in shipped]


def _compare(figure: str, shipped: Path, again: Path | None) -> Verdict:
    if again is None:
        return Verdict(figure, 0, "could not be drawn again")
    cells = 0
    with (
        shipped.open(newline="", encoding="utf-8") as old,
        again.open(newline="", encoding="utf-8") as new,
    ):
        for number, (left, right) in enumerate(
            zip_longest(csv.reader(old), csv.reader(new)), start=1
        ):
            if left is None or right is None or len(left) != len(right):
                return Verdict(
                    figure,
                    cells,
                    f"line {number} is there once only, or has another length",
                )
            for before, now in zip(left, right, strict=True):
                cells += 1
                # Texts first: most cells are equal, and numbers take longer.
                if to_text(before) != to_text(now) and not _equal(before, now):
                    return Verdict(
                        figure,
                        cells,
                        f"line {number}: {before or 'nothing'} is now {now or 'nothing'}",
                    )
    return Verdict(figure, cells, "")


def _equal(before: str, now: str) -> bool:
    try:
        return math.isclose(
            float(before), float(now), rel_tol=RELATIVE, abs_tol=ABSOLUTE
        )
    except ValueError:
        return False


def expected_again(executions: Iterable[str], shipment: Shipment) -> tuple[str, ...]:
    """Return what a rerun is expected to give: one text for each execution."""
    return tuple(_again(execution, shipment) for execution in executions)


def _again(execution: str, shipment: Shipment) -> str:
    if execution not in SIMULATED:
        return f"{execution.capitalize()} {_OTHER_MACHINES}"
    if shipment.has_calibration:
        return f"{execution.capitalize()} runs that are run again with the calibration in the artifact {_EQUAL}"
    if shipment.is_stated:
        return (
            "Step times and network of the virtual runs are stated, by the study and its cluster, and nothing of them "
            f"is measured: run again, on whatever machine, they {_EQUAL}"
        )
    return (
        "The calibration of the virtual runs is not among the records: run again, they have the times of the machine "
        "that runs them. Metrics of asynchronous strategies vary with these times, others are those of the records."
    )


class Minutes(NamedTuple):
    """Expected minutes of reproduce.sh and its reruns, rounded up; texts are numbers, or `not timed`."""

    setup: str
    setup_rerun: str  # with what --rerun installs in addition
    execution: int  # of the commands that ran the study
    virtual: int  # of virtual runs; 0: the study has none
    native: int  # of other runs
    analysis: str


def expected_minutes(results: Results, earlier: Path | None = None) -> Minutes:
    """Return the minutes for the study `results`, from its records and from times.csv in an `earlier` artifact of it.

    `run`, `plot` and packing time themselves (durations.json), reproduce.sh writes
    times.csv. A run takes the mean wall time from the start of one run to the start of
    the next of its execution and engine; with too few runs, its training and evaluation
    time.
    """
    seconds = {"virtual": 0.0, "native": 0.0}
    pace = progress_of(results.folder).seconds_per_run
    for (execution, engine), runs in results.runs.groupby(["execution", "engine"]):
        known = pace.get(group_of(str(execution), str(engine)))
        trained = float(runs["train_s"].sum() + runs["eval_s"].sum())
        seconds["virtual" if execution in SIMULATED else "native"] += (
            trained if known is None else known * len(runs)
        )
    took = durations_in(results.folder)
    steps = _step_seconds(earlier / TIMES) if earlier is not None else {}
    virtual = math.ceil(seconds["virtual"] / 60)
    native = math.ceil(seconds["native"] / 60)
    return Minutes(
        setup=_minutes(steps.get("install")),
        # A rerun begins with the set-up for drawing.
        setup_rerun=_minutes(steps["install"] + steps["install to run"])
        if "install to run" in steps
        else NOT_TIMED,
        # The commands took at least as long as their runs.
        execution=max(math.ceil(took.get("run", 0.0) / 60), virtual + native),
        virtual=virtual,
        native=native,
        analysis=_minutes(steps.get("draw", took.get("plot"))),
    )


def _step_seconds(path: Path) -> dict[str, float]:
    """Return the seconds of each step in times.csv, the last time it was taken; empty if missing or damaged."""
    try:
        rows = list(csv.DictReader(read_text(path).splitlines()))
        # A step that was made again has a later row, which counts.
        return {row["step"]: float(row["seconds"]) for row in rows}
    except (OSError, KeyError, TypeError, ValueError):
        return {}


def _minutes(seconds: float | None) -> str:
    return NOT_TIMED if seconds is None else str(math.ceil(seconds / 60))
