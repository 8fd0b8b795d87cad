"""`scalebench validate --published` prints errors beside linear scaling and writes predictions and the figure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.cli.validate import validate

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
