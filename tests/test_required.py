"""Tests that skip themselves fail where everything is required."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.facts import together

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
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    root = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "SCALEBENCH_TEST_ALL": "required",
    }

    required = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert "1 failed, 1 skipped, 2 errors" in required
    assert together(required, "no Slurm here", "SCALEBENCH_TEST_ALL=required")
