"""Tests that skip themselves fail where everything is required; which of them run together, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests import conftest

ROOT = Path(__file__).parents[1]

TESTS = """\
import pytest

@pytest.mark.skipif(True, reason="no MPI here")
def test_marked():
    pass

def test_asks():
    pytest.skip("no Slurm here")

@pytest.fixture
def browser():
    pytest.skip("no Chromium here")

def test_of_a_fixture(browser):
    pass

def test_without_gpu():
    pytest.skip("no GPU here")
"""


def test_skipped_tests_fail_where_all_is_required(tmp_path):
    (tmp_path / "test_parts.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def summary(**switch):
        done = subprocess.run(words, cwd=tmp_path, env=environment | switch, capture_output=True, text=True)
        return done.stdout

    assert "4 skipped" in summary(SCALEBENCH_TEST_ALL="")
    required = summary(SCALEBENCH_TEST_ALL="required")
    assert "1 failed, 1 skipped, 2 errors" in required
    assert "(no Slurm here), but SCALEBENCH_TEST_ALL=required" in required


def test_what_takes_longest_together_is_begun_first_and_files_stay_together():
    assert all((ROOT / name).is_file() for name in conftest.LONGEST if "/" in name)
    names = ["tests/cli/test_list.py::a", "tests/cli/test_run.py::a", "tests/papers/test_smoke.py::a"]
    names += ["tests/hosts/test_slurm.py::a", "tests/cli/test_run.py::b", "tests/launch/test_sweep.py::a"]
    items = [SimpleNamespace(nodeid=name, add_marker=lambda mark: None) for name in names]
    conftest.pytest_collection_modifyitems(SimpleNamespace(workerinput={}), items)
    assert [names.index(item.nodeid) for item in items] == [5, 3, 2, 1, 4, 0]
