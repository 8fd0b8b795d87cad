"""`scalebench validate` prints errors beside linear scaling and writes predictions and the figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from scalebench.calibration.calibration_file import Calibration, Measurement
from scalebench.cli.main import main
from scalebench.cli.validate import validate
from scalebench.pricing.machine import Machine
from tests.facts import together

FILE = Path(__file__).parents[2] / "experiments" / "published" / "scaling.csv"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = pd.read_csv(FILE)
    file = tmp_path_factory.mktemp("published") / "small.csv"
    table[table["source"].str.startswith(("MXNet", "PyTorch DDP"))].to_csv(
        file, index=False
    )
    return file


def test_predictions_are_printed_beside_linear_scaling_and_written(
    small: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(
        validate, ["--published", str(small), "--output", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    for words in (
        "MXNet scalability results",
        "linear scaling",
        "skill",
        "intervals held",
        "assumed, as 0 config",
    ):
        assert words in done.output
    table = pd.read_csv(tmp_path / "out" / "prediction-error.csv")
    assert len(table) == 24 + 32
    assert {
        "measured",
        "predicted",
        "low",
        "high",
        "linear",
        "error",
        "held",
        "doublings",
    } <= set(table)
    assert (
        table["error"] - (table["predicted"] / table["measured"] - 1)
    ).abs().max() < 1e-12
    for suffix in ("png", "svg", "pdf"):
        assert (tmp_path / "out" / f"prediction-error.{suffix}").stat().st_size > 10_000


def test_a_missing_file_leaves_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(
            ["validate", "--published", str(tmp_path / "none.csv")],
            prog_name="scalebench",
        )
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert together(error, "not", "CSV", "published measurements")


def test_own_runs_are_predicted_by_the_calibration_that_they_are_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    invoke: Callable[..., str],
) -> None:
    """Rows priced by a file and marked as native are predicted without error by it; a slower allreduce is seen."""
    monkeypatch.chdir(tmp_path)
    calibration = Calibration(
        key="made up", tables=machine.tables, engines=machine.engines
    )
    Path("mine.json").write_text(calibration.model_dump_json())
    slow = [
        entry.model_copy(update={"points": [(4, 0.1), (1 << 20, 0.1)]})
        for entry in machine.engines.entries
    ]
    slower = calibration.model_copy(
        update={"engines": machine.engines.model_copy(update={"entries": slow})}
    )
    Path("slow.json").write_text(slower.model_dump_json())
    run = (
        "run",
        "--dataset",
        "wine",
        "--epochs",
        "1",
        "--execution",
        "modelled",
        "--calibration",
        "mine.json",
    )
    run += ("--batch-per-worker", "8")  # that of the calibration
    invoke(
        *run,
        "--workers",
        "1,2",
        "--strategy",
        "allreduce",
        "--name",
        "mine",
        "--repetitions",
        "2",
    )
    rows = pd.read_csv("results/mine/runs.csv", dtype=str, keep_default_na=False)
    rows.assign(execution="native", engine="mpi").to_csv(
        "results/mine/runs.csv", index=False
    )
    said = invoke("validate", "results/mine", "--output", "out")
    assert "mine: native, mpi" in said
    table = pd.read_csv("out/prediction-error.csv").set_index("workers")
    assert set(table["execution"]) == {"native"}
    assert table["error"].abs().max() < 1e-9
    assert table["linear"].isna().tolist() == [True, False]
    assert table["linear"][2] == pytest.approx(table["measured"][1] / 2)
    spread = rows["train_s"].astype(float) * np.where(
        rows["repetition"] == "0", 1.21, 1.0
    )
    rows.assign(execution="native", engine="mpi", train_s=spread).to_csv(
        "results/mine/runs.csv", index=False
    )
    invoke("validate", "results/mine", "--output", "out")
    scattered = pd.read_csv("out/prediction-error.csv").set_index("workers")
    assert (
        scattered["high"] / scattered["low"] > table["high"] / table["low"]
    ).all(), "equal runs differ by more"
    # standard deviation of two runs, of their mean
    of_mean = math.sqrt(2) * math.log(1.1) / math.sqrt(2)
    assert math.log(scattered["high"][1] / scattered["predicted"][1]) == pytest.approx(
        1.96 * of_mean, rel=0.2
    )
    invoke("validate", "results/mine", "--calibration", "slow.json", "--output", "out")
    steps = 9  # 142 samples, two workers, batches of 8
    slowed = (
        pd.read_csv("out/prediction-error.csv").set_index("workers")["predicted"]
        - table["predicted"]
    )
    assert slowed[1] == pytest.approx(0.0)
    # the former allreduce takes 0.1 ms at most
    assert slowed[2] == pytest.approx(steps * 0.1, rel=0.02)
    of = {
        "dtype": "float32",
        "optimizer": "sgd",
        "threads_per_worker": 1,
        "cpu": "Z80",
        "cores": 1,
        "torch": "1.0",
    }
    other = calibration.model_copy(
        update={"measured": Measurement(model="mlp(hidden=[4])", **of)}
    )
    Path("other.json").write_text(other.model_dump_json())
    refused = invoke("validate", "results/mine", "--calibration", "other.json", code=2)
    assert together(
        refused, "model mlp(hidden=[4])", "not mlp(hidden=[128])", "cpu Z80", "not"
    )
    Path("results/mine/calibration.json").unlink(missing_ok=True)
    Path("mine.json").unlink()
    assert "cannot read mine.json" in invoke("validate", "results/mine", code=2)


def test_runs_and_published_rows_exclude_each_other(invoke: Callable[..., str]) -> None:
    assert "leave RESULTS and --calibration out" in invoke(
        "validate", "results", "--published", str(FILE), code=2
    )
