"""The strategy of the tutorial, found through an entry point as another package's is, trains on both kinds."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalebench.analysis import compare_strategies, load
from scalebench.analysis.verdicts import changed
from scalebench.artifact import write_artifact
from scalebench.artifact.artifact_description import PaperFile
from scalebench.comm import engines
from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.study.load import load_study
from tests.conftest import runs_made, some

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-model-data-strategy.md"
POINT = "[scalebench.strategies]\nlazy_average = lazy_average\n"


@pytest.fixture
def package(tmp_path):
    """The environment in which the page's package is installed."""
    (source,) = re.findall(
        r"```python\n# lazy_average.py\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    (tmp_path / "lazy_average.py").write_text(source)
    info = tmp_path / "my_strategies-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-strategies\nVersion: 0.1\n"
    )
    (info / "entry_points.txt").write_text(POINT)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }


@pytest.mark.parametrize("execution", some(["virtual", "native"], "virtual"))
def test_strategy_of_the_page_runs_as_an_entry_point(package, tmp_path, execution):
    if execution == "native" and (reason := engines.available("mpi")):
        pytest.skip(reason)
    words = [
        "--strategy",
        "lazy_average",
        "--dataset",
        "wine",
        "--workers",
        "2",
        "--epochs",
        "3",
        "--jobs",
        "1",
    ]
    words += ["--execution", execution, "--repetitions", "1", "--name", "own"]
    if execution == "virtual":  # nothing is to be measured
        words += ["--cluster", "juwels-booster", "--device-step-time", "0.002"]
    done = subprocess.run(
        [sys.executable, "-m", "scalebench", "run", *words],
        cwd=tmp_path,
        env=package,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "were counted" not in done.stderr, "counts are those of the recorded program"
    with (tmp_path / "results/own/runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    steps = 3 * int(row["steps_per_epoch"])
    averages, period = 0, 2
    while steps >= period:
        steps, period, averages = steps - period, 2 * period, averages + 1
    assert (row["status"], row["execution"]) == ("completed", execution)
    assert int(row["syncs"]) == averages + 1, "and one at the end"


OWN = "lazy.py:LazyAverage"
RUN = ("run", "--name", "mine", "--dataset", "wine", "--epochs", "1", "--execution", "virtual", "--jobs", "1",
       "--workers", "2", "--cluster", "juwels-booster", "--device-step-time", "0.002",
       "--repetitions", "1")  # fmt: skip


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The page's strategy as a file in the working folder."""
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(
        r"```python\n# lazy_average.py\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    (tmp_path / "lazy.py").write_text(source)
    return tmp_path / "lazy.py"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("execution", some(["virtual", "native"], "native"))
def test_strategy_of_a_file_and_class_runs(file, execution):
    if execution == "native" and (reason := engines.available("mpi")):
        pytest.skip(reason)
    words = [
        "--strategy",
        "serial",
        "--strategy",
        f"{OWN}: {{first: 3}}",
        *RUN[1:],
        "--execution",
        execution,
    ]
    command = [sys.executable, "-m", "scalebench", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = load("results/mine").runs.set_index("strategy")
    assert (runs["status"] == "completed").all()
    assert runs.loc[OWN, "strategy_options"] == '{"first": 3}'
    assert runs.loc[OWN, "strategy_sha256"] == sha256(file)
    assert runs["strategy_sha256"].isna()["serial"]


def test_runs_of_an_edited_strategy_are_not_resumed(file, invoke):
    invoke(*RUN, "--strategy", OWN)
    before = sha256(file)
    assert load_study(Path("results/mine/study.yaml"), {}, []).strategy_sha256 == {
        OWN: before
    }
    assert runs_made(invoke(*RUN, "--strategy", OWN)) == (0, 1), "unchanged, it is done"
    assert runs_made(invoke("run", "results/mine/study.yaml", "--jobs", "1")) == (0, 1)
    file.write_text(file.read_text().replace("Field(2, ge=2", "Field(3, ge=2"))
    output = invoke(*RUN, "--strategy", OWN, code=2)
    assert re.search(
        rf"strategy_sha256 .*{OWN} .*{before[:12]}, .*{sha256(file)[:12]}", output
    )
    output = invoke("run", "results/mine/study.yaml", code=2)
    assert re.search(rf"lazy\.py has changed .*sha256 {before[:12]}", output)
    assert output.count("\n") == 1
    invoke(*RUN, "--strategy", OWN, "--new")
    assert len(load("results/mine-2").runs) == 1
    assert changed(load("results/mine"), load("results/mine-2"))[0].startswith(
        f"{OWN} (sha256 {before[:12]} → "
    )
    first, second = Path("results/mine/runs.csv"), Path("results/mine-2/runs.csv")
    first.write_text(first.read_text() + second.read_text().partition("\n")[2])
    (note,) = load("results/mine").notes
    assert re.match(r"left out 1 run .*strategy_sha256", note)


def test_a_strategy_that_changes_while_the_study_runs_fails_the_run(file, invoke):
    line = 'from pathlib import Path; Path("lazy.py").write_text(Path("lazy.py").read_text() + "#")'
    text = file.read_text().replace(
        "        worker.state.left =", f"        {line}\n        worker.state.left =", 1
    )
    file.write_text(text)
    output = invoke(*RUN, "--strategy", OWN, "--workers", "1,2", code=1)
    assert "lazy.py has changed" in output


def test_a_changed_default_is_another_run(file, invoke, monkeypatch):
    """The strategy is an installed one, whose file has no checksum in the study."""
    from scalebench.strategies.local_sgd import LocalSgd

    invoke(*RUN, "--strategy", "local_sgd")
    assert runs_made(invoke(*RUN, "--strategy", "local_sgd")) == (0, 1)
    monkeypatch.setattr(LocalSgd.model_fields["steps"], "default", 5)
    LocalSgd.model_rebuild(force=True)
    try:
        output = invoke(*RUN, "--strategy", "local_sgd")
    finally:
        monkeypatch.undo()
        LocalSgd.model_rebuild(force=True)
    assert runs_made(output) == (1, 0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            ("worker.state.period *=", "worker.stat.period *="),
            "has no attribute 'stat' (lazy.py:29)",
        ),
        (
            ('worker.comm.allreduce_(worker.parameters, "mean")', "1 / 0"),
            "ZeroDivisionError: division by zero (lazy.py:28)",
        ),
        (
            (
                'worker.comm.allreduce_(worker.parameters, "mean")',
                "raise SystemExit(3)",
            ),
            "exited with code 3 before reporting (lazy.py:28)",
        ),
    ],
)
def test_an_error_inside_names_its_own_line(file, invoke, edit, message):
    file.write_text(file.read_text().replace(*edit, 1))
    output = invoke(*RUN, "--strategy", OWN, code=1)
    assert message in output
    number = int(re.search(r"lazy\.py:(\d+)", output)[1])
    assert edit[1] in file.read_text().splitlines()[number - 1]


def test_error_while_planning_is_one_line(file, invoke):
    file.write_text(
        file.read_text()
        + "\n    def check(self, setting):\n        return [][setting.workers]\n"
    )
    output = invoke(*RUN, "--strategy", OWN, "--dry-run", code=2)
    number = len(file.read_text().splitlines())
    assert (
        output
        == f"scalebench: error: IndexError: list index out of range (lazy.py:{number})\n"
    )
    file.write_text(
        file.read_text().replace("return [][setting.workers]", "raise SystemExit('no')")
    )
    output = invoke(*RUN, "--strategy", OWN, "--dry-run", code=2)
    assert (
        output == f"scalebench: error: exited before reporting: no (lazy.py:{number})\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("nowhere.py:Mine", "", r"no file .*nowhere\.py"),
        ("lazy.py", "", "expected file.py:Class, for example"),
        (
            "lazy.py:LazyAverage:growth",
            None,
            r"'growth' is no option; expected growth=VALUE",
        ),
        (
            "lazy.py:LazyAvrage",
            None,
            "has no class 'LazyAvrage'; did you mean 'LazyAverage'",
        ),
        (
            "lazy.py:Field",
            None,
            "expected a class derived from scalebench.strategies.base.Strategy",
        ),
        (
            "lazy.py:Mine",
            "import nothing_like_this",
            r"raised ModuleNotFoundError: .* \(lazy.py:1\)",
        ),
        ("lazy.py:Mine", "x = 1\ndef f(:", r"raised SyntaxError: .*lazy.py, line 2"),
        (
            "lazy.py:Mine",
            "from scalebench.strategies.base import Strategy\nclass Mine(Strategy): ...",
            "defines neither train_epoch",
        ),
        (
            "lazy.py:Mine",
            "from scalebench.strategies.base import Strategy\nclass Mine(Strategy):\n    def train(self, worker): ...",
            r"lacks source = \"\.\.\.\" and summary",
        ),
    ],
)
def test_file_without_a_strategy_is_refused_in_one_line(file, name, text, message):
    if text is not None:
        file.write_text(text)
    with pytest.raises(StudyError, match=message) as caught:
        registry.create(name, {})
    assert "\n" not in str(caught.value)


def test_options_of_an_own_strategy_are_checked_and_explained(file, invoke):
    assert "option 'first': expected" in invoke(
        *RUN, "--strategy", f"{OWN}: {{first: 0}}", code=2
    )
    output = invoke("explain", OWN)
    assert "w <- mean of all w after `first` local steps" in output
    assert "file.py:Class" in invoke("list", "strategies")


def test_artifact_ships_an_own_strategy(file, invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "scalebench.figures.plotting.default_figures", lambda: ["convergence"]
    )
    invoke(*RUN, "--strategy", "serial", "--strategy", OWN, "--strategy", "allreduce")
    made = write_artifact(Path("results/mine"), tmp_path / "out", PaperFile())
    records = made.folder / "results" / "mine"
    shipped = load_study(records / "study.yaml", {}, [])
    assert [item.name for item in shipped.strategies] == [
        "serial",
        f"inputs/{OWN}",
        "allreduce",
    ]
    assert shipped.strategy_sha256 == {f"inputs/{OWN}": sha256(file)}
    assert (made.folder / "inputs/lazy.py").read_text() == file.read_text()
    assert set(load(records).runs["strategy"]) == {
        "serial",
        f"inputs/{OWN}",
        "allreduce",
    }
    assert (
        len(compare_strategies(load(records), "allreduce", f"inputs/{OWN}").table) == 1
    )


def test_options_are_written_behind_the_name_in_every_command(file, invoke):
    """NAME:OPTION=VALUE, as --help promises it, of an own strategy and of one of the package."""
    own, label = f"{OWN}:first=3:growth=4", f"{OWN}(first=3, growth=4)"
    local = "local_sgd:steps=2"
    invoke(*RUN, "--strategy", own, "--strategy", local)
    assert set(load("results/mine").runs["label"]) == {label, "local_sgd(steps=2)"}
    short = ("resnet50", "--cluster", "juwels-booster", "--step-time", "0.1", "--workers", "4", "--samples", "4096",
             "--epochs", "2")  # fmt: skip
    assert "LazyAverage" in invoke(
        "predict", *short, "--strategy", own, "--strategy", local
    )
    assert label in invoke(
        "what-if", *short, "--strategy", own, "--vary", "latency=0.1..10:3"
    )
    assert OWN in invoke("explain", own)
    invoke(
        "trace",
        "--strategy",
        own,
        "--workers",
        "2",
        "--cluster",
        "juwels-booster",
        "--device-step-time",
        "0.002",
    )
    compared = invoke(
        "compare", "results/mine", "--strategy", own, "--strategy", local, "--json"
    )
    assert label in compared
    assert label in invoke(
        "table", "results/mine", "--strategy", own, "--style", "markdown"
    )
    assert "unknown option 'last'" in invoke(
        *RUN, "--strategy", f"{OWN}:last=3", code=2
    )
