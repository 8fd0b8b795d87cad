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


@pytest.mark.parametrize("axis", ["batch", "batch=8..4", "batch=0..4", "latency=a,b", "batch=1..8:x", "latnecy=1..2"])
def test_bad_axis_is_one_line(axis):
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(main, [*BASE, "--vary", axis], standalone_mode=False, catch_exceptions=False)
    assert "\n" not in str(caught.value)
