"""A study on disk with failures, missing values, an unreached target, and texts that need escaping."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalebench.analysis import Results, load
from scalebench.records.store import Store
from tests.records_factory import keep_study, study_rows


@pytest.fixture
def results(tmp_path) -> Results:
    folder: Path = tmp_path / "results" / "synthetic"
    with Store(folder, fsync=False) as store:
        keep_study(
            store.folder,
            {"name": "synthetic", "description": 'a "quoted" <b>name</b>, £ and \\'},
        )
        for run, epochs in study_rows(
            workers=(1, 4), native_workers=(1,), repetitions=3
        ):
            changes = {
                "started_utc": "2026-11-21T08:56:38.142+00:00",
                "target_metric": 0.99,
                "git_dirty": False,
            }
            if run.strategy == "epoch_average":
                changes |= {"time_to_target_s": 0.1 + 0.2, "epochs_to_target": 3}
            if run.strategy == "ddp":
                changes |= {"target_metric": None}
            store.append(run.model_copy(update=changes), epochs)
        failed = study_rows(
            strategies=("allreduce",), workers=(8,), native_workers=(), repetitions=1
        )[0][0]
        error = "rank 1 died: ünïcode\t=SUM(A1)"
        store.append(
            failed.model_copy(
                update={"status": "failed", "error": error, "train_s": None}
            )
        )
    return load(folder)
