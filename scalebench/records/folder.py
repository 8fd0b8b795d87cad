"""Names of the files in a study's folder of records, and the folder a command reads."""

from __future__ import annotations

from pathlib import Path

from scalebench.errors import ResultsError

RUNS, EPOCHS = "runs.csv", "epochs.csv"
STUDY = "study.yaml"
CALIBRATION = "calibration.json"
PLANNED = "planned.json"
DURATIONS = "durations.json"
PROVENANCE = "provenance"  # a folder with one JSON file per environment


def newest_study(folder: Path) -> Path:
    """Return the most recently changed study in `folder`.

    Raises:
        ResultsError: `folder` holds no study.
    """
    tables = sorted(folder.glob(f"*/{RUNS}"), key=lambda table: table.stat().st_mtime)
    if not tables:
        raise ResultsError(f"no study in {folder}/; run one with `scalebench run`, or name its folder, RESULTS")
    return tables[-1].parent


def study_in(folder: Path) -> Path:
    """Return `folder` if it is the folder of a study, else the newest study in it, else `folder` again."""
    if any((folder / name).exists() for name in (RUNS, STUDY)) or not any(folder.glob(f"*/{RUNS}")):
        return folder
    return newest_study(folder)
