from __future__ import annotations

import csv

import pytest
from click.testing import CliRunner

from scalebench.cli.main import main
from scalebench.errors import UsageError

BASE = ["what-if", "resnet50", "--cluster", "ethernet-10g", "--step-time", "0.1"]


def test_plane_is_written_and_drawn(tmp_path):
    table, figure = tmp_path / "cells.csv", tmp_path / "plane.png"
    axes = ["--vary", "link-bandwidth=0.1..10:5", "--vary", "workers=4,16"]
    arguments = [*BASE, *axes, "--csv", str(table), "--figure", str(figure)]
    result = CliRunner().invoke(main, arguments, standalone_mode=False, catch_exceptions=False)
    assert "10 cells, modelled" in result.output
    assert "bound by compute" in result.output
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert {row["workers"] for row in rows} == {"4.0", "16.0"}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_cells_outside_the_inputs_range_or_too_large_are_marked(tmp_path):
    table, figure = tmp_path / "cells.csv", tmp_path / "plane.png"
    asked = ["what-if", "resnet50", "--cluster", "juwels-booster", "--device", "v100-16gb"]
    axes = ["--vary", "workers=64,4096", "--vary", "batch=32,512"]
    arguments = [*asked, *axes, "--csv", str(table), "--figure", str(figure)]
    output = CliRunner().invoke(main, arguments, standalone_mode=False, catch_exceptions=False).output
    assert "the least at workers 64, batch 32" in output
    assert "outside what the inputs are known to hold for, 50 % of the cells: beyond the 3,744 workers" in output
    assert "too large, 50 % of the cells: resnet50 at batch 5" in output
    with table.open() as file:
        rows = {(row["workers"], row["batch"]): row for row in csv.DictReader(file)}
    assert {place for place, row in rows.items() if row["fits"] == "no"} == {("64.0", "512.0"), ("4096.0", "512.0")}
    assert {place for place, row in rows.items() if row["outside"]} == {("4096.0", "32.0"), ("4096.0", "512.0")}


@pytest.mark.parametrize(
    "axis",
    [
        "flops=1..inf",
        "latency=0..1",
        "flops=10..1",
        "flops=1..2:1000000",
        "flops=nan",
        "batch",
        "batch=8..4",
        "batch=0..4",
        "latency=a,b",
        "batch=1..8:x",
        "latnecy=1..2",
    ],
)
def test_bad_axis_is_one_line(axis):
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(main, [*BASE, "--vary", axis], standalone_mode=False, catch_exceptions=False)
    assert "\n" not in str(caught.value)
