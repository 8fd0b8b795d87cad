"""A study is submitted from a login node without importing torch or pandas, which take seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from scalebench.launch import planning
from tests.conftest import needs_mpi

pytestmark = needs_mpi

PROGRAM = """
import sys
from scalebench.cli.main import main
try:
    main(["submit", "study.yaml", *sys.argv[1:]])
finally:
    print("heavy:", sorted({"torch", "pandas", "scipy"} & set(sys.modules)))
"""


def heavy_imports(*words: str) -> str:
    """Submit the study in a process of its own; return the heavy packages that it loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("heavy: ")


def test_a_model_of_this_package_is_submitted_without_torch(clients, place):
    assert heavy_imports("--time", "01:00:00") == "[]"


def test_the_step_of_a_time_limit_is_measured_once(clients, place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    assert "torch" in heavy_imports("--dry-run")
    assert heavy_imports("--dry-run") == "[]"


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"batch_per_worker": 1}, False),
        ({"strategies": ["pipeline"], "batch_global": 16}, False),
        ({"model": "own.py:build"}, False),
    ],
)
def test_what_only_the_built_model_shows_is_looked_at(
    changed, fits, tmp_path, monkeypatch
):
    from scalebench.launch.planning import plan_study
    from scalebench.study.spec import Study

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from torch import nn\ndef build(shape, outputs): return nn.Linear(shape[0], outputs)\n"
    )
    values = {
        "dataset": "wine",
        "workers": "2",
        "strategies": ["local_sgd"],
        "execution": "virtual",
    }
    plan = plan_study(Study.model_validate(values | changed))
    assert planning.fits_unseen(plan) is fits
