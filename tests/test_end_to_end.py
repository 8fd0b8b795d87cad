"""End-to-end runs: command line, real mpirun, Horovod and DDP, then the figures.

Native and virtual runs of one (strategy, workers, seed) must end with the same weights:
1e-6 relative in float64.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import needs_mpi

pytestmark = needs_mpi

DETERMINISTIC = ["serial", "allreduce", "horovod", "ddp", "epoch_average"]
RUNS = 1 + 2 * 5  # serial, and five strategies with one and two workers


def scalebench(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scalebench", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """A small study, virtual and on real processes: 142 wines in batches of 8, so with uneven batches."""
    folder = tmp_path_factory.mktemp("study")
    study = folder / "study.yaml"
    study.write_text(
        "name: small\ndataset: wine\nmodel: {mlp: {hidden: [8]}}\nepochs: 3\nrepetitions: 1\nworkers: 1,2\n"
        "batch_per_worker: 8\nlr: 0.05\ndtype: float64\nsave_weights: true\n"
        "strategies: [serial, allreduce, horovod, ddp, epoch_average, epoch_async]\n"
    )
    stated = (
        "--cluster",
        "juwels-booster",
        "--device-step-time",
        "0.002",
    )  # nothing is measured for virtual runs
    for execution, more in (("virtual", stated), ("native", ())):
        done = scalebench(
            "run",
            "study.yaml",
            "--execution",
            execution,
            "--output",
            execution,
            *more,
            cwd=folder,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_successful_processes_leave_no_logs(results):
    assert not (results / "native" / "small" / "logs").exists()


def test_nodes_are_described_only_if_they_are_others_than_the_launching_one(results):
    (file,) = (results / "native" / "small" / "provenance").iterdir()
    assert "nodes" not in json.loads(file.read_text())


def runs(results: Path, execution: str) -> list[dict[str, str]]:
    with (results / execution / "small" / "runs.csv").open() as file:
        return list(csv.DictReader(file))


def weights(
    results: Path, execution: str, strategy: str, workers: int
) -> dict[str, np.ndarray]:
    (row,) = [
        row
        for row in runs(results, execution)
        if (row["strategy"], row["workers"]) == (strategy, str(workers))
    ]
    with np.load(
        results / execution / "small" / "weights" / f"{row['run_id']}.npz"
    ) as archive:
        return dict(archive)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("strategy", DETERMINISTIC)
def test_native_and_virtual_runs_end_with_the_same_weights(results, strategy, workers):
    if strategy == "serial":
        workers = 1
    native, virtual = (
        weights(results, execution, strategy, workers)
        for execution in ("native", "virtual")
    )
    np.testing.assert_array_equal(native["initial"], virtual["initial"])
    scale = np.abs(virtual["final"]).max()
    np.testing.assert_allclose(
        native["final"], virtual["final"], atol=1e-6 * scale, rtol=1e-6
    )
    assert np.abs(native["final"] - native["initial"]).max() > 1e-3


def test_asynchronous_averaging_trains_on_real_ranks(results):
    native = {
        row["workers"]: row
        for row in runs(results, "native")
        if row["strategy"] == "epoch_async"
    }
    assert {workers: row["status"] for workers, row in native.items()} == dict.fromkeys(
        "12", "completed"
    )
    assert float(native["1"]["final_metric"]) > 0.5


def test_one_native_worker_equals_serial_bit_for_bit(results):
    serial = weights(results, "native", "serial", 1)["final"]
    for strategy in DETERMINISTIC[1:]:
        np.testing.assert_array_equal(
            weights(results, "native", strategy, 1)["final"], serial
        )


@pytest.mark.parametrize("execution", ["native", "virtual"])
def test_rows_are_complete_and_times_add_up(results, execution):
    found = runs(results, execution)
    assert len(found) == 1 + 5 * 2
    for row in found:
        assert row["status"] == "completed", row["error"]
        assert row["execution"] == execution
        if row["comm_s"]:
            parts = sum(
                float(row[name])
                for name in ("compute_s", "comm_s", "data_s", "other_s")
            )
            assert parts == pytest.approx(float(row["train_s"]), rel=1e-6)
    split = {row["strategy"] for row in found if not row["comm_s"]}
    assert split == ({"ddp"} if execution == "native" else set())


def test_engines_are_native_and_oversubscription_is_marked(results):
    cores = len(os.sched_getaffinity(0))
    rows = runs(results, "native")
    assert len(rows) == RUNS
    for row in rows:
        assert row["engine"] == {"horovod": "horovod", "ddp": "gloo"}.get(
            row["strategy"], "mpi"
        )
        workers = int(row["workers"])
        progress = 1 if row["engine"] in ("horovod", "gloo") and workers > 1 else 0
        assert row["oversubscribed"] == str(workers * (1 + progress) > cores).lower()


def test_metrics_do_not_depend_on_the_execution(results):
    native = {(row["strategy"], row["workers"]): row for row in runs(results, "native")}
    rows = [row for row in runs(results, "virtual") if row["strategy"] in DETERMINISTIC]
    assert len(rows) == RUNS - 2, "all but those of epoch_async"
    for row in rows:
        for metric in ("final_metric", "final_train_metric"):
            real = native[row["strategy"], row["workers"]][metric]
            assert float(row[metric]) == pytest.approx(float(real), abs=1e-9)


def test_figures_of_both_executions_are_drawn(results):
    words = "plot", "virtual/small", "--output", "plots", "--format", "svg"
    done = scalebench(*words, cwd=results)
    assert done.returncode == 0, done.stderr
    for figure in ("strong-scaling", "time-reduction", "convergence", "breakdown"):
        for suffix in ("svg", "csv"):
            (path,) = (results / "plots").rglob(f"{figure}.{suffix}")
            assert path.stat().st_size > 100
