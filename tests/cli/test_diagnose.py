"""`scalebench diagnose`: on a screen, for programs, and its exit codes."""

from __future__ import annotations

import json

import pytest

from scalebench.records.store import Store
from tests.records_factory import run_row

CROWDED = {
    "execution": "native",
    "engine": "mpi",
    "workers": 4,
    "workers_per_node": 4,
    "oversubscribed": True,
}
LISTS = {"worker_nodes": ["ab"] * 4, "worker_cores": ["0-1"] * 4}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """`results(rows)` writes a study into results/mine."""
    monkeypatch.chdir(tmp_path)

    def write(*rows):
        with Store(tmp_path / "results" / "mine", fsync=False) as store:
            for row in rows:
                store.append(row, [])

    return write


def test_nothing_found_is_one_line(results, invoke):
    results(run_row())
    assert invoke("diagnose") == "results/mine: nothing found in 1 run\n"


def test_symptoms_are_followed_by_what_to_do(results, invoke):
    results(
        *(
            run_row(run_id=f"run-{n}", repetition=n, **CROWDED, **LISTS)
            for n in range(5)
        )
    )
    lines = invoke("diagnose", code=1).splitlines()
    assert lines[0] == "results/mine: 1 symptom in 5 runs"
    assert lines[2] == "oversubscription"
    assert lines[3].split("  ")[-2:] == [
        "4 workers on 2 cores (0-1)",
        "run-0, run-1 and 3 more",
    ]
    assert lines[-1].startswith("oversubscription: ")
    assert ". To do: " in lines[-1]


def test_programs_get_all_runs(results, invoke):
    results(
        *(
            run_row(run_id=f"run-{n}", repetition=n, **CROWDED, **LISTS)
            for n in range(5)
        )
    )
    (row,) = json.loads(invoke("diagnose", "results/mine", "--format", "json", code=1))[
        "rows"
    ]
    assert list(row) == ["what", "where", "measured", "consequence", "remedy", "runs"]
    assert row["runs"] == "run-0, run-1, run-2, run-3, run-4"
    assert invoke("diagnose", "--format", "csv", code=1).startswith(
        "What,Where,Measured,Consequence,Remedy,Runs\n"
    )


def test_an_empty_folder_is_refused(tmp_path, monkeypatch, invoke):
    monkeypatch.chdir(tmp_path)
    invoke("diagnose", code=2)
