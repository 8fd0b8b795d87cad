"""`scalebench status` and `scalebench retry`: progress, failures, and continued studies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.analysis import load
from scalebench.calibration.calibration_file import Calibration
from scalebench.cli.main import main
from scalebench.records.lock import folder_lock
from scalebench.records.store import Store
from tests.conftest import runs_made, some
from tests.records_factory import run_row

STUDY = """\
name: mine
dataset: wine
epochs: 1
repetitions: 1
execution: virtual
workers: 1,2
strategies: [serial, allreduce, epoch_average]
calibration: given.json
"""

NET = """\
import pathlib
import torch

def build(input_shape, outputs):
    return Net(input_shape[0], outputs)

class Net(torch.nn.Linear):
    def forward(self, x):
        if pathlib.Path("broken").exists() and len(x) > 4:
            raise OSError("it is broken")
        return super().forward(x)
"""


@pytest.fixture
def scalebench(tmp_path, monkeypatch, invoke, machine):
    monkeypatch.chdir(tmp_path)
    # How long real engines take to be measured says how busy the machine is.
    monkeypatch.setattr(
        "scalebench.calibration.engine_measurement.measure_engine_costs",
        lambda *_, **__: machine.engines,
    )
    given = Calibration(key="given", tables=machine.tables, engines=machine.engines)
    (tmp_path / "given.json").write_text(given.model_dump_json())
    (tmp_path / "study.yaml").write_text(STUDY)

    return invoke


@pytest.fixture
def half_failed(scalebench, monkeypatch):
    """The study, run while averaging epochs was broken."""
    from scalebench.errors import RunError
    from scalebench.strategies.epoch_average import EpochAverage

    def broken(*_):
        raise RunError("it broke, see [red]")

    with monkeypatch.context() as patch:
        patch.setattr(EpochAverage, "train_epoch", broken)
        scalebench("run", "study.yaml", "--jobs", "1", "--quiet", code=1)
    return scalebench


def progress(invoke, *words):
    """Runs of the study that are planned, done, failed and remaining; the lines of `status` hold the same."""
    facts = json.loads(invoke("status", *words, "--json"))
    counts = (
        facts["planned"],
        facts["done"],
        len(facts["failed"]),
        sum(facts["remaining"].values()),
    )
    first = invoke("status", *words).splitlines()[0]
    name, *numbers = re.match(
        r"(\S+): (\d+) of (\d+) runs done, (\d+) failed, (\d+) remaining", first
    ).groups()
    done, planned, failed, remaining = map(int, numbers)
    assert (facts["study"], *counts) == (name, planned, done, failed, remaining)
    return counts


def test_status_counts_done_and_failed_runs(half_failed):
    assert progress(half_failed, "results/mine") == (5, 3, 2, 0)
    facts = json.loads(half_failed("status", "--json"))
    assert facts["study"] == "mine"
    said = half_failed("status")
    for failure in facts["failed"]:
        assert failure["run_id"].startswith("epoch_average-w")
        assert failure["error"] == "it broke, see [red]"
        assert failure["run_id"] in said
    assert said.count("it broke, see [red]") == 2
    assert "scalebench run results/mine --retry" in said


def test_retry_repeats_only_failed_runs(half_failed, tmp_path):
    before = (tmp_path / "results" / "mine" / "runs.csv").read_text()
    assert runs_made(half_failed("retry", "--jobs", "1")) == (2, 3)
    after = (tmp_path / "results" / "mine" / "runs.csv").read_text()
    assert after.startswith(before)
    assert [line.split(",")[4:6] for line in after[len(before) :].splitlines()] == 2 * [
        ["2", "completed"]
    ]
    assert progress(half_failed) == (5, 5, 0, 0)
    assert "no failed runs in results/mine/\n" in half_failed("retry")
    assert half_failed("retry", "results") == half_failed("retry"), (
        "the folder given to run --output"
    )
    assert (tmp_path / "results" / "mine" / "runs.csv").read_text() == after


@pytest.mark.parametrize("study", ["results/mine", "study.yaml"])
def test_run_with_retry_repeats_only_failed_runs(half_failed, study):
    words = ("run", study, "--retry", "--jobs", "1")
    assert runs_made(half_failed(*words)) == (2, 3)
    assert "no failed runs" in half_failed(*words)
    assert re.search(
        r"--retry: .*results/mine2", half_failed(*words, "--name", "mine2", code=2)
    )


def test_retry_works_inside_the_folder(half_failed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "results" / "mine")
    assert runs_made(half_failed("retry", ".", "--jobs", "1")) == (2, 3)


def test_retry_resolves_relative_paths_from_the_first_folder(
    half_failed, tmp_path, monkeypatch
):
    """`calibration: given.json` too, after everything was moved together; the file in another folder is another's."""
    assert (
        json.loads((tmp_path / "results" / "mine" / "planned.json").read_text())[
            "begun_in"
        ]
        == "../.."
    )
    (tmp_path / "moved").mkdir()
    for name in ("results", "given.json", "study.yaml"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    (tmp_path / "given.json").write_text("another one's")
    assert runs_made(half_failed("retry", "moved/results/mine", "--jobs", "1")) == (
        2,
        3,
    )


def test_run_goes_on_in_a_copy_of_another_name(half_failed, tmp_path):
    """Not in the folder that it was copied from, and not in a new one."""
    results = tmp_path / "results"
    shutil.copytree(results / "mine", results / "copy")
    before = (results / "mine" / "runs.csv").read_text()
    assert runs_made(half_failed("run", "results/copy", "--retry", "--jobs", "1")) == (
        2,
        3,
    )
    assert (results / "mine" / "runs.csv").read_text() == before
    assert (results / "copy" / "runs.csv").read_text().startswith(before)
    assert progress(half_failed, "results/copy") == (5, 5, 0, 0)
    assert sorted(path.name for path in results.iterdir()) == ["copy", "mine"]


def test_run_on_study_yaml_in_results_resumes_there(half_failed, tmp_path, monkeypatch):
    """`calibration: given.json` is seen from where the study was begun; other options make it a study of its own."""
    path = tmp_path / "results" / "mine" / "runs.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",allreduce," not in line))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    study = "../results/mine/study.yaml"
    assert "mine: 5 runs" in half_failed("run", study, "--dry-run")
    monkeypatch.chdir(tmp_path / "else")
    said = half_failed(
        "run", study, "--workers", "1", "--calibration", "../given.json", "--jobs", "1"
    )
    assert runs_made(said) == (3, 0)
    assert "results in results/mine/" in said
    said = half_failed("run", study, "--jobs", "1")
    assert runs_made(said) == (4, 1)
    assert f"results in {path.parent}/" in said
    assert Path.cwd() == tmp_path


def test_retry_from_another_folder_finds_the_own_model(
    scalebench, tmp_path, monkeypatch
):
    for folder in ("home/carlotta/work", "scratch", "else"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "carlotta"))
    monkeypatch.chdir(tmp_path / "home" / "carlotta" / "work")
    shutil.copy(tmp_path / "given.json", "given.json")
    Path("net.py").write_text(NET)
    Path("broken").touch()
    study = tmp_path / "study.yaml"
    words = (
        "--output",
        str(tmp_path / "scratch"),
        "--model",
        "./net.py:build",
        "--jobs",
        "1",
    )
    scalebench(
        "run", str(study), *words, "--strategy", "serial", "--workers", "1", code=1
    )
    Path("broken").unlink()
    monkeypatch.chdir(tmp_path / "else")
    planned = tmp_path / "scratch" / "mine" / "planned.json"
    assert json.loads(planned.read_text())["begun_in"] == "~/work/."
    assert runs_made(scalebench("retry", "../scratch/mine", "--jobs", "1")) == (1, 0)
    for path in (tmp_path / "scratch").rglob("*.*"):
        assert "carlotta" not in path.read_text(), path
    planned.write_text(
        json.dumps(json.loads(planned.read_text()) | {"begun_in": ["no", "place"]})
    )
    assert "no failed runs" in scalebench("retry", planned.parent), (
        "what cannot be read is left out"
    )


def test_retry_skips_runs_never_tried(half_failed, tmp_path):
    path = tmp_path / "results" / "mine" / "runs.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if ",allreduce," not in line))
    assert progress(half_failed) == (5, 1, 2, 2)
    half_failed("retry", "results/mine", "--jobs", "1")
    assert progress(half_failed) == (5, 3, 0, 2)
    half_failed("run", "study.yaml", "--jobs", "1", "--quiet")
    assert progress(half_failed) == (5, 5, 0, 0)


def test_status_counts_repeated_rows(half_failed, tmp_path):
    path = tmp_path / "results" / "mine" / "runs.csv"
    path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[1])
    assert progress(half_failed) == (5, 3, 2, 0)
    assert json.loads(half_failed("status", "--json"))["doubled"] == 1


def test_extended_study_continues_the_numbers(scalebench, tmp_path):
    scalebench("run", "study.yaml", "--jobs", "1", "--quiet")
    scalebench(
        "run", "study.yaml", "--jobs", "1", "--workers", "1,2,4", "--repetitions", "2"
    )
    runs = load(tmp_path / "results" / "mine").runs
    assert sorted(runs["run_order"][:5]) == [0, 1, 2, 3, 4]
    assert len(runs) == runs["run_order"].nunique() == 14
    assert runs["run_order"][5:].min() >= 5


@pytest.mark.parametrize(
    "words",
    [
        ("plot", "results/mine"),
        ("laws", "results/mine"),
        ("report", "results/mine"),
        ("artifact", "results/mine"),
        ("compare", "results/mine", "results/mine"),
        (
            "compare",
            "results/mine",
            "--strategy",
            "allreduce",
            "--strategy",
            "epoch_average",
        ),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_study_without_completed_runs_is_one_line(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    with Store(tmp_path / "results" / "mine") as store:
        for strategy in ("allreduce", "epoch_average"):
            store.append(
                run_row(
                    run_id=strategy,
                    strategy=strategy,
                    status="failed",
                    error="it broke",
                    train_s=None,
                )
            )
    with pytest.raises(SystemExit) as end:
        main.main(list(words), prog_name="scalebench")
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert re.fullmatch(
        r"scalebench: error: results/mine: .*`scalebench status results/mine`.*\n", err
    )
    assert not (tmp_path / "plots").exists()
    assert not (tmp_path / "artifacts").exists()


def test_changed_calibration_option_is_another_study(half_failed, tmp_path):
    (tmp_path / "given.json").rename(tmp_path / "other.json")
    text = (tmp_path / "study.yaml").read_text()
    (tmp_path / "study.yaml").write_text(text.replace("given.json", "other.json"))
    said = half_failed("run", "study.yaml", "--jobs", "1", code=2)
    assert re.search(r"calibration.* given\.json.* other\.json", said)


def test_lost_calibration_is_not_measured_again(scalebench, tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY.replace("calibration: given.json\n", ""))
    (tmp_path / "results" / "mine").mkdir(parents=True)
    scalebench("run", "study.yaml", "--workers", "1", "--jobs", "1", "--quiet")
    (tmp_path / "results" / "mine" / "calibration.json").unlink()
    before = (tmp_path / "results" / "mine" / "runs.csv").read_text()
    said = scalebench("run", "study.yaml", "--jobs", "1", code=2)
    assert "not calibration.json" in said
    assert (tmp_path / "results" / "mine" / "runs.csv").read_text() == before


@pytest.mark.parametrize(
    "stated",
    [("--cluster", "juwels-booster"), ()],
    ids=["another machine", "this machine"],
)
def test_study_of_stated_step_times_resumes(scalebench, tmp_path, stated):
    """On another machine nothing of it is measured; on this one the engines are, which stay with it."""
    (tmp_path / "study.yaml").write_text(STUDY.replace("calibration: given.json\n", ""))
    words = ("run", "study.yaml", "--jobs", "1", "--device-step-time", "0.02", *stated)
    assert ("calibration ..." in scalebench(*words)) == (not stated)
    assert runs_made(scalebench(*words, "--set", "repetitions=2")) == (5, 5)
    assert load("results/mine").completed["repetition"].tolist().count(1) == 5


def test_changed_calibration_file_is_refused(scalebench, tmp_path):
    scalebench("run", "study.yaml", "--jobs", "1", "--quiet")
    kept = tmp_path / "results" / "mine" / "calibration.json"
    assert json.loads(kept.read_text()) == json.loads(
        (tmp_path / "given.json").read_text()
    )
    facts = json.loads(kept.read_text())
    facts["tables"][0]["batches"][0]["forward_s"][0] *= 2
    (tmp_path / "given.json").write_text(json.dumps(facts))
    said = scalebench(
        "run", "study.yaml", "--jobs", "1", "--set", "repetitions=2", code=2
    )
    assert re.search(r"given\.json has changed .*results/mine", said)


@pytest.mark.parametrize("background", some([False, True], True))
def test_further_worker_counts_use_the_first_calibration(
    scalebench, tmp_path, background
):
    """Missing loads are measured; on another machine that is refused, and existing numbers are used."""
    (tmp_path / "study.yaml").write_text(STUDY.replace("calibration: given.json\n", ""))
    run = (
        "run",
        "study.yaml",
        "--jobs",
        "1",
        "--strategy",
        "allreduce",
        "--set",
        "batch_global=64",
    )
    scalebench(*run, "--workers", "2", "--quiet")
    path = tmp_path / "results" / "mine" / "calibration.json"
    before = Calibration.model_validate_json(path.read_text())
    if background:
        path.write_text(
            before.model_copy(update={"key": "of another machine"}).model_dump_json()
        )
        said = scalebench(*run, "--workers", "2,4", code=2)
        assert re.search(r"no step times .*11, 12 samples", said)
        assert Calibration.model_validate_json(path.read_text()).tables == before.tables
        said = scalebench(*run, "--workers", "2", "--set", "repetitions=2")
        assert "another machine" in said
        return
    assert "measured now" in scalebench(*run, "--workers", "2,4")
    after = Calibration.model_validate_json(path.read_text())
    assert (after.key, after.engines) == (before.key, before.engines)
    for old, new in zip(before.tables, after.tables, strict=True):
        assert new.batches[: len(old.batches)] == old.batches
        assert len(new.batches) > len(old.batches)
        assert new.model_copy(update={"batches": old.batches}) == old


def test_status_names_the_writer_and_run_refuses(half_failed, tmp_path):
    with folder_lock(tmp_path / "results" / "mine"):
        writer = f"process {os.getpid()}"
        assert f"running: {writer}" in half_failed("status")
        assert writer in half_failed("run", "study.yaml", "--jobs", "1", code=2)
        assert writer in half_failed("retry", "--jobs", "1", code=2)


def test_new_puts_a_changed_study_into_its_own_folder(half_failed, tmp_path):
    assert "use --new" in half_failed(
        "run", "study.yaml", "--lr", "0.5", "--jobs", "1", code=2
    )
    half_failed("run", "study.yaml", "--lr", "0.5", "--new", "--jobs", "1", "--quiet")
    assert (tmp_path / "results" / "mine-2" / "runs.csv").exists()
    said = half_failed("run", "study.yaml", "--lr", "0.5", "--new", "--jobs", "1")
    assert runs_made(said) == (0, 5)
    assert progress(half_failed, "results/mine-2") == (5, 5, 0, 0)


@pytest.mark.parametrize("command", ["status", "retry"])
def test_missing_study_is_one_line(scalebench, command):
    assert "no study in results/" in scalebench(command, code=2)
    assert "expected" in scalebench(command, "given.json", code=2)


def test_retry_refuses_a_renamed_folder(half_failed, tmp_path):
    (tmp_path / "results" / "mine").rename(tmp_path / "results" / "yours")
    assert re.search(
        r"results/yours.* mine again", half_failed("retry", "results/yours", code=2)
    )


def test_status_imports_nothing_heavy(tmp_path):
    with Store(tmp_path / "mine", fsync=False) as store:
        store.append(run_row(), [])
    heavy = (
        "torch",
        "pandas",
        "numpy",
        "scipy",
        "sklearn",
        "matplotlib",
        "mpi4py",
        "rich",
    )
    program = (
        "import sys; from scalebench.cli.status import status; "
        f"status(['{tmp_path}/mine'], standalone_mode=False); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
