"""The strategy of docs/own-strategy.md, found through an entry point as another package's is, trains on both kinds."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.launch import engines

PAGE = Path(__file__).parents[2] / "docs" / "own-strategy.md"
POINT = "[scalebench.strategies]\nlazy_average = lazy_average\n"


@pytest.fixture
def package(tmp_path):
    """The environment in which the page's package is installed."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "lazy_average.py").write_text(source)
    info = tmp_path / "my_strategies-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(POINT)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize("execution", ["virtual", "native"])
def test_the_strategy_of_the_page_runs(package, tmp_path, execution):
    if execution == "native" and (reason := engines.available("mpi")):
        pytest.skip(reason)
    words = ["--strategy", "lazy_average", "--dataset", "wine", "--workers", "2", "--epochs", "3", "--jobs", "1"]
    words += ["--execution", execution, "--repetitions", "1", "--name", "own"]
    done = subprocess.run(
        [sys.executable, "-m", "scalebench", "run", *words], cwd=tmp_path, env=package, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "formula" not in done.stderr, "what was counted is what the page's formula says"
    with (tmp_path / "results/own/runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    steps = 3 * int(row["steps_per_epoch"])
    averages, period = 0, 2
    while steps >= period:
        steps, period, averages = steps - period, 2 * period, averages + 1
    assert (row["status"], row["execution"]) == ("completed", execution)
    assert int(row["syncs"]) == averages + 1, "and one at the end"


def test_a_formula_that_says_something_else_than_was_counted_is_told_once(package, tmp_path):
    file = tmp_path / "lazy_average.py"
    file.write_text(file.read_text().partition("    @property")[0])  # leaves the default: one in every step
    words = ["--strategy", "lazy_average", "--dataset", "wine", "--workers", "1,2,4", "--epochs", "3", "--jobs", "1"]
    words += ["--execution", "virtual", "--repetitions", "2", "--device-step-time", "0.001"]
    done = subprocess.run(
        [sys.executable, "-m", "scalebench", "run", *words], cwd=tmp_path, env=package, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "formula" in line]
    (syncs,) = [line for line in notes if "syncs_formula" in line]
    counted, stated = re.findall(r"([0-9,]+) synchronisations were counted, its syncs_formula says ([0-9,]+)", syncs)[0]
    assert int(counted) < int(stated)
    assert len([line for line in notes if "its bytes_formula" in line]) == 1
