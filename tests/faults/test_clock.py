"""The wall clock is set back by an hour while real processes train: durations are of a clock that only goes forward."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from scalebench.comm import engines
from scalebench.native.heartbeat import Phase, read_heartbeats
from scalebench.records.progress import progress_of

SOURCE = Path(__file__).parent / "programs" / "clock_back.c"
STUDY = """\
name: clocks
dataset: wine
model: {mlp: {hidden: [8]}}
epochs: 100
repetitions: 6
workers: 1
batch_per_worker: 8
strategies: [serial]
execution: native
engine: mpi
warmup_runs: 0
"""


@pytest.fixture
def set_back(tmp_path):
    """The environment of a command whose wall clock is an hour behind once the file `later` is there."""
    library = tmp_path / "clock_back.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"],
        check=True,
    )
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "CLOCK_BACK": str(tmp_path / "later"),
    }


def rows_in(folder):
    path = folder / "runs.csv"
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def trains(folder):
    """Whether a run is on its way, some batches after the start and before the end."""
    (heartbeats,) = folder.glob("logs/*/launch-1/heartbeats")
    beat = read_heartbeats(heartbeats)[0]
    return beat.phase == Phase.TRAINING and 20 < beat.batches < 600


def begun(row):
    return datetime.fromisoformat(row["started_utc"]).timestamp()


@pytest.mark.thorough
@pytest.mark.skipif(engines.available("mpi") is not None, reason="no MPI here")
def test_wall_clock_set_back_during_a_run_changes_no_duration_no_order_and_no_resume(
    tmp_path, set_back
):
    (tmp_path / "study.yaml").write_text(STUDY)
    command = [sys.executable, "-m", "scalebench", "run", "study.yaml", "--quiet"]
    folder = tmp_path / "results" / "clocks"
    options = {
        "cwd": tmp_path,
        "env": set_back,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    began = time.monotonic()
    first = subprocess.Popen(command, **options)
    try:
        while len(rows_in(folder)) < 2 or not trains(folder):
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.002)
        (tmp_path / "later").touch()
        before = len(rows_in(folder))
        while len(rows_in(folder)) < before + 2 and first.poll() is None:
            time.sleep(0.005)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        kept = (folder / "runs.csv").read_bytes()
        again = subprocess.run(command, **options, check=False)
    finally:
        first.kill()
    took = time.monotonic() - began
    assert again.returncode == 0, again.stderr
    assert (folder / "runs.csv").read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    rows = rows_in(folder)
    assert [int(row["run_order"]) for row in rows] == list(range(6))
    assert {(row["attempt"], row["status"]) for row in rows} == {("1", "completed")}
    assert begun(rows[-1]) - begun(rows[0]) < -3000, (
        "the clock of the ranks' launcher was set back"
    )
    times = [float(row["train_s"]) for row in rows]
    assert all(time > 0 for time in times)
    assert sum(times) < took
    for row in rows:
        parts = [
            float(row[name]) for name in ("compute_s", "comm_s", "data_s", "other_s")
        ]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(float(row["train_s"]))
    with (folder / "epochs.csv").open(newline="") as file:
        elapsed = [
            (row["run_id"], float(row["elapsed_s"])) for row in csv.DictReader(file)
        ]
    for row, seconds in zip(rows, times, strict=True):
        own = [moment for run_id, moment in elapsed if run_id == row["run_id"]]
        assert own == sorted(own)
        assert 0 < own[-1] <= seconds * 1.001
    progress = progress_of(folder)
    assert (progress.done, progress.left_s) == (6, 0)
    assert all(0 < pace < took for pace in progress.seconds_per_run.values())
