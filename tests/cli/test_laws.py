"""`scalebench laws`: tables, JSON and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scalebench.cli.main import main
from scalebench.records.store import Store
from tests.facts import in_order, together
from tests.records_factory import study_rows


@pytest.fixture
def scalebench(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Store(tmp_path / "results" / "mine", fsync=False) as store:
        for run, epochs in study_rows(
            strategies=("serial", "allreduce", "epoch_average"), noise=0.01
        ):
            store.append(run, epochs)

    def call(*words, code=0):
        with pytest.raises(SystemExit) as end:
            main.main(["laws", *map(str, words)], prog_name="scalebench")
        out, err = capsys.readouterr()
        assert int(end.value.code or 0) == code, err
        return out, err

    return call


def test_each_series_has_a_table_or_a_reason(scalebench):
    out, _ = scalebench()
    assert together(out, "allreduce", "virtual", "7 worker counts", "1-64", "21 runs")
    assert in_order(out, "largest N", "efficiency of 50 %")
    for word in (
        "amdahl",
        "usl",
        "weight",
        "ΔAICc",
        "leave-out",
        "calibration interval",
    ):
        assert word in out
    said = " ".join(out.split())
    assert said.startswith("allreduce, virtual: knee ")
    few = ("2 worker counts (1, 2)", "a law wants 4")
    assert in_order(said, "No law of allreduce, native mpi", *few)
    assert in_order(said, "mechanistic law not fitted", "do not count steps")


def test_json_holds_the_laws(scalebench):
    out, _ = scalebench(
        "results/mine", "--strategy", "epoch_average", "--efficiency", "0.8", "--json"
    )
    native, virtual = json.loads(out)["laws"]
    assert (native["execution"], native["engine"], native["workers"]) == (
        "native",
        "mpi",
        [1, 2],
    )
    assert native["refusal"].startswith("2 worker counts")
    assert "law" not in native
    assert (virtual["execution"], virtual["refusal"], virtual["runs"]) == (
        "virtual",
        None,
        21,
    )
    laws = virtual["laws"]
    assert virtual["law"] == laws[0]["law"]
    assert [law["aicc"] for law in laws] == sorted(law["aicc"] for law in laws)
    assert sum(law["weight"] for law in laws) == pytest.approx(1)
    assert virtual["worth"]["efficiency"] == 0.8
    assert virtual["worth"]["low"] <= virtual["worth"]["workers"]
    for parameter in virtual["parameters"]:
        assert parameter["low"] <= parameter["value"] <= parameter["high"]
    # More workers are worth running where less is asked of them.
    less = json.loads(
        scalebench("--strategy", "epoch_average", "--efficiency", "0.3", "--json")[0]
    )["laws"][1]
    assert less["worth"]["workers"] > virtual["worth"]["workers"]


def test_efficiency_takes_percent_or_fraction(scalebench):
    said = [
        json.loads(scalebench("--efficiency", share, "--json")[0])
        for share in ("80%", "0.8")
    ]
    assert said[0] == said[1]
    _, err = scalebench("--efficiency", "80", code=2)
    assert "write 80% for per cent" in " ".join(err.split())


def test_extrap_file_is_written(scalebench, tmp_path):
    _, err = scalebench("--extrap", "times.jsonl")
    assert "for Extra-P: times.jsonl" in err
    lines = [
        json.loads(line) for line in (tmp_path / "times.jsonl").read_text().splitlines()
    ]
    assert {line["callpath"] for line in lines} == {"allreduce", "epoch_average"}
    assert all(len(line["value"]) == 3 for line in lines)


def test_exit_code_is_1_without_any_fit(scalebench, tmp_path):
    with Store(tmp_path / "results" / "few", fsync=False) as store:
        for run, epochs in study_rows(workers=(1, 2, 4), native_workers=()):
            store.append(run, epochs)
    out, _ = scalebench("results/few", code=1)
    # the reason that all share stands once, in the first line
    assert out.startswith("No law of allreduce, virtual; horovod, virtual; ")
    assert len(out.splitlines()) == 1
    assert together(out, "3 worker counts", "1, 2, 4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["results/none"], "results/none holds no runs.csv"),
        (["--strategy", "allredduce"], "did you mean 'allreduce'?"),
        (
            ["--efficiency", "2"],
            "expected a share such as 5% or 0.05, got 2; write 2% for per cent",
        ),
        (["--efficiency", "0"], "an efficiency lies above 0 and is at most 1, got 0"),
        (["--efficiency", "half"], "expected a share such as 5% or 0.05, got 'half'"),
        (["--extrap", "none/times.jsonl"], "cannot write none/times.jsonl"),
    ],
)
def test_usage_error_is_one_line_with_exit_code_2(scalebench, words, message):
    _, err = scalebench(*words, code=2)
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_help_imports_nothing_heavy():
    program = (
        "import sys, scalebench.cli.laws; "
        "print([name for name in ('torch', 'pandas', 'numpy', 'scipy', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
