from __future__ import annotations

import csv

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.errors import UsageError

BASE = ["predict", "resnet50", "--cluster", "juwels-booster"]


def invoke(*arguments: str):
    result = CliRunner().invoke(main, [*BASE, *arguments], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result


def test_predict_prints_points_and_what_they_advise(tmp_path):
    table = tmp_path / "points.csv"
    result = invoke(
        "--step-time", "0.1", "--workers", "1,4,64", "--strategy", "allreduce", "--strategy", "local_sgd:steps=4",
        "--budget", "60", "--price", "2", "--e0", "35", "--b-crit", "20000", "--csv", str(table),
    )  # fmt: skip
    assert "bound by compute" in result.output
    assert "Best for 60 GPU-hours" in result.output
    assert "To target" in result.output
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {row["execution"] for row in rows} == {"modelled"}
    first, last = rows[0], rows[2]
    assert float(first["train_s"]) == pytest.approx(90 * 1281167 / 64 * 0.1, rel=1e-3)
    assert float(last["speedup"]) == pytest.approx(float(first["train_s"]) / float(last["train_s"]), rel=1e-3)
    assert float(last["time_to_target_s"]) == pytest.approx(
        35 * (1 + float(last["batch_global"]) / 20000) * float(last["epoch_s"])
    )


def test_figure_is_written_in_the_format_of_its_ending(tmp_path):
    picture = tmp_path / "points.svg"
    invoke("--step-time", "0.1", "--workers", "1,8", "--figure", str(picture))
    assert picture.read_text().startswith("<?xml")
    with pytest.raises(UsageError, match=r"ends in .png, .pdf or .svg"):
        invoke("--step-time", "0.1", "--workers", "1,8", "--figure", str(tmp_path / "points.gif"))


def test_model_that_does_not_fit_says_what_would():
    output = invoke("--device", "v100-16gb", "--batch", "512", "--workers", "4").output
    assert "Does not fit" in output
    assert "batch" in output.split("Does not fit")[1]


def test_point_outside_the_inputs_range_is_marked():
    output = invoke("--step-time", "0.1", "--workers", "8192").output
    assert "8,192*" in output
    assert "beyond the 3,744 workers of juwels-booster" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--step-time"),
        (["--step-time", "0.1", "--device", "v100-16gb"], "one of them"),
        (["--step-time", "0"], "greater than 0"),
        (["--step-time", "0.1", "--batch", "0"], "--batch: expected 1 or more"),
        (["--step-time", "0.1", "--batch", "8", "--batch-global", "8"], "not both"),
        (["--step-time", "0.1", "--strategy", "alreduce"], "allreduce"),
        (["--step-time", "0.1", "--strategy", "local_sgd:step=4"], "steps"),
        (["--step-time", "0.1", "--workers", "4..1"], "--workers"),
        (["--step-time", "0.1", "--budget", "-1"], "--budget"),
        (["--step-time", "0.1", "--e0", "35"], "belong together"),
        (["--step-time", "0.1", "--input-rate", "0"], "--input-rate"),
        (["--step-time", "0.1", "--collective", "rign"], "ring"),
        (["--device", "a100-40g"], "a100-40gb"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    with pytest.raises(UsageError, match=message) as caught:
        invoke(*arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
