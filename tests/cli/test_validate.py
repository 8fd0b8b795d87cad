"""`scalebench validate` prints errors beside linear scaling and writes predictions and the figure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.cli.validate import validate
from scalebench.pricing.calibration_file import Calibration
from scalebench.pricing.machine import Machine
from tests.conftest import needs_mpi

FILE = Path(__file__).parents[2] / "experiments" / "published" / "scaling.csv"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = pd.read_csv(FILE)
    file = tmp_path_factory.mktemp("published") / "small.csv"
    table[table["source"].str.startswith(("MXNet", "PyTorch DDP"))].to_csv(file, index=False)
    return file


def test_predictions_are_printed_beside_linear_scaling_and_written(small: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(validate, ["--published", str(small), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for words in ("MXNet scalability results", "linear scaling", "skill", "intervals held", "assumed, as 0 config"):
        assert words in done.output
    table = pd.read_csv(tmp_path / "out" / "prediction-error.csv")
    assert len(table) == 24 + 32
    assert {"measured", "predicted", "low", "high", "linear", "error", "held", "doublings"} <= set(table)
    assert (table["error"] - (table["predicted"] / table["measured"] - 1)).abs().max() < 1e-12
    for suffix in ("png", "svg", "pdf"):
        assert (tmp_path / "out" / f"prediction-error.{suffix}").stat().st_size > 10_000


def test_a_missing_file_leaves_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["validate", "--published", str(tmp_path / "none.csv")], prog_name="scalebench")
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not a readable CSV of published measurements" in error


@needs_mpi
def test_own_runs_are_predicted_by_the_calibration_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_model: Machine, invoke: Callable[..., str]
) -> None:
    """Native runs of 1 and 2 workers: steps of 1 ms and an allreduce of 100 ms by the file, whatever they took."""
    monkeypatch.chdir(tmp_path)
    slow = [entry.model_copy(update={"points": [(4, 0.1), (1 << 20, 0.1)]}) for entry in cost_model.engines.entries]
    costs = cost_model.engines.model_copy(update={"entries": slow})
    Path("mine.json").write_text(Calibration(key="made up", tables=cost_model.tables, engines=costs).model_dump_json())
    invoke(
        *("run", "--dataset", "wine", "--epochs", "1", "--execution", "native", "--engine", "mpi"),
        *("--workers", "1,2", "--strategy", "allreduce", "--name", "mine", "--repetitions", "2"),
    )
    assert "no calibration.json to predict by; measure one" in invoke("validate", "results/mine", code=2)
    said = invoke("validate", "results/mine", "--calibration", "mine.json", "--output", "out")
    assert "mine: native, mpi" in said
    table = pd.read_csv("out/prediction-error.csv").set_index("workers")
    assert set(table["execution"]) == {"native"}
    for workers, expected in ((1, 18 * 1e-3), (2, 9 * (1e-3 + 0.1))):  # 142 samples in batches of 8
        assert table["predicted"][workers] == pytest.approx(expected, rel=0.01)
        assert table["error"][workers] == pytest.approx(expected / table["measured"][workers] - 1, rel=0.1)
    assert table["linear"].isna().tolist() == [True, False]
    assert table["linear"][2] == pytest.approx(table["measured"][1] / 2)


def test_runs_and_published_rows_exclude_each_other(invoke: Callable[..., str]) -> None:
    assert "leave RESULTS and --calibration out" in invoke("validate", "results", "--published", str(FILE), code=2)
