"""The study that somebody who names none means."""

from __future__ import annotations

from pathlib import Path

from scalebench.errors import ResultsError


def newest_study(folder: Path) -> Path:
    """The study in `folder` whose records changed last.

    Raises:
        ResultsError: there is none.
    """
    tables = sorted(folder.glob("*/runs.csv"), key=lambda table: table.stat().st_mtime)
    if not tables:
        raise ResultsError(f"no study in {folder}/; run one with `scalebench run`, or name its folder, RESULTS")
    return tables[-1].parent
