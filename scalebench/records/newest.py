"""Find the most recently changed study."""

from __future__ import annotations

from pathlib import Path

from scalebench.errors import ResultsError

_FILES = ("runs.csv", "study.yaml")


def newest_study(folder: Path) -> Path:
    """Return the study in `folder` whose records changed last.

    Raises:
        ResultsError: there is none.
    """
    tables = sorted(folder.glob("*/runs.csv"), key=lambda table: table.stat().st_mtime)
    if not tables:
        raise ResultsError(f"no study in {folder}/; run one with `scalebench run`, or name its folder, RESULTS")
    return tables[-1].parent


def study_in(folder: Path) -> Path:
    """Return `folder` if it is that of a study, else the newest study in it, else `folder` again."""
    if any((folder / name).exists() for name in _FILES) or not any(folder.glob("*/runs.csv")):
        return folder
    return newest_study(folder)
