"""A study's folder on disk, and its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scalebench.analysis import Results, load
from scalebench.records.schema import RunRow
from scalebench.records.store import Store
from tests.records_factory import study_rows


@pytest.fixture
def study(tmp_path) -> Callable[..., Results]:
    """`study(**options)` writes the synthetic study and reads it back; `study(rows=[...])` these runs."""

    def make(rows: list[RunRow] | None = None, **options: Any) -> Results:
        folder: Path = tmp_path / f"study-{len(list(tmp_path.iterdir()))}"
        with Store(folder, fsync=False) as store:
            for run, epochs in (
                [(row, []) for row in rows]
                if rows is not None
                else study_rows(**options)
            ):
                store.append(run, epochs)
        return load(folder)

    return make
