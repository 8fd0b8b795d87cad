"""Registry of modules and third-party entry points."""

import subprocess
import sys

import pytest

from scalebench.data.builder import DATASETS, DatasetBuilder
from scalebench.strategies.base import Strategy
from scalebench.strategies.registry import register

PLUGIN = """
import numpy as np
from scalebench.data.builder import DATASETS, Arrays, DatasetBuilder

@DATASETS.add
class Pair(DatasetBuilder):
    name = "pair"
    summary = "two points"

    def build(self, files, allocate):
        x, y = np.eye(2, dtype=np.float32), np.arange(2)
        return Arrays("classification", 2, x, y, x, y)
"""

PROGRAM = """
import pathlib, sys
from scalebench.data.builder import DATASETS
from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import ScalebenchError
from scalebench.study.spec import Training
try:
    folder = prepare(Training(dataset="pair"), 1, pathlib.Path(sys.argv[1]))
    print(open_dataset(folder).x_train.tolist(), "digits" in DATASETS.names())
except ScalebenchError as error:
    print(error)
"""


def run_with_plugin(tmp_path, target):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[scalebench.datasets]\npair = {target}\n")
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_data_set_of_an_entry_point_is_found(tmp_path):
    assert run_with_plugin(tmp_path, "plugin") == "[[1.0, 0.0], [0.0, 1.0]] True"


def test_failing_entry_point_is_named(tmp_path):
    said = run_with_plugin(tmp_path, "plugin_that_is_gone")
    assert said.startswith(
        "the entry point 'pair' (plugin_that_is_gone) of group 'scalebench.datasets' cannot be loaded"
    )
    assert "\n" not in said


def test_class_without_required_variables_is_refused():
    class Nameless(DatasetBuilder):
        summary = "two points"

    class Silent(Strategy):
        name = "silent"

    with pytest.raises(TypeError, match=r"^class Nameless does not say its name$"):
        DATASETS.add(Nameless)
    with pytest.raises(
        TypeError, match=r"^class Silent does not say its source, summary$"
    ):
        register()(Silent)
