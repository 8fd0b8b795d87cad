"""`scalebench check`: text, JSON and exit codes."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest

from scalebench.cli.main import main
from scalebench.records.store import Store
from tests.facts import together
from tests.records_factory import study_rows


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Three repetitions of three strategies in results/mine; nothing describes the machine."""
    rows = study_rows(
        strategies=("serial", "allreduce", "epoch_average"),
        workers=(1, 2),
        native_workers=(),
    )
    with Store(tmp_path / "results" / "mine", fsync=False) as store:
        for run, epochs in rows:
            store.append(run, epochs)
    monkeypatch.chdir(tmp_path)

    def invoke(*words, code=0):
        with pytest.raises(SystemExit) as end:
            main.main(list(words), prog_name="scalebench")
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, out + err
        return out, err

    return invoke


@pytest.fixture
def without_metric(tmp_path):
    path = tmp_path / "results" / "mine" / "runs.csv"
    header, *lines = path.read_text().splitlines()
    at = header.split(",").index("final_metric")
    rows = list(csv.reader(lines))
    for row in rows:
        row[at] = ""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header.split(","), *rows])


def test_warnings_exit_with_0(call):
    out, err = call("check")
    assert together(out, "warning", "no-provenance", "study.yaml", "missing")
    assert "\n  fix    keep the whole folder" in out
    assert out.startswith("synthetic: 0 errors, ")
    assert err == ""


def test_errors_come_first_and_exit_with_1(call, without_metric):
    out, _ = call("check", "results/mine", code=1)
    assert out.splitlines()[2] == "error  metric"
    assert "without a metric on held-out data" in out
    out, _ = call("check", "--ignore", "metric")
    assert "1 ignored (metric)" in out


def test_json_holds_the_findings(call, without_metric):
    out, _ = call(
        "check", "results/mine", "--json", "--ignore", "time-to-target", code=1
    )
    facts = json.loads(out)
    assert list(facts) == [
        "schema",
        "study",
        "folder",
        "errors",
        "warnings",
        "notes",
        "findings",
        "passed",
        "ignored",
    ]
    assert (facts["schema"], facts["study"], facts["errors"], facts["ignored"]) == (
        1,
        "synthetic",
        1,
        ["time-to-target"],
    )
    assert list(facts["findings"][0]) == ["severity", "rule", "what", "where", "fix"]
    assert facts["errors"] + facts["warnings"] + facts["notes"] == len(
        facts["findings"]
    )


def test_rules_are_listed_without_results(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "results")
    out, _ = call("check", "--rules")
    assert together(out, "dirty-commit", "checkout", "commit")
    assert together(out, "12.", "Plot")
    facts = json.loads(call("check", "--rules", "--json")[0])
    assert len(facts["twelve"]) == 12
    assert {"name", "summary"} == set(facts["rules"][0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["results/none"], "results/none holds no runs.csv"),
        (["--ignore", "metrics"], "unknown rule 'metrics'; did you mean 'metric'?"),
        (["--strict"], "No such option"),
    ],
)
def test_usage_error_is_one_line_with_exit_code_2(call, words, said):
    _, err = call("check", *words, code=2)
    assert said in err
    assert len(err.splitlines()) == 1


def test_help_imports_nothing_heavy():
    heavy = ("torch", "pandas", "numpy", "scipy", "matplotlib", "rich")
    program = f"import sys, scalebench.cli.check; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
