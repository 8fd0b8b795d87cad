"""Studies on the engine `tasks`, by the command."""

from __future__ import annotations

import json

import pytest
import yaml

from scalebench.analysis.loading import load
from scalebench.cli.main import main
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.comm.base import Capability
from scalebench.errors import EngineError
from scalebench.launch.engine_choice import describe_strategies
from scalebench.launch.hosts import Allocation
from scalebench.launch.planning import plan_study
from scalebench.study.spec import Study
from tests.facts import naming, together

STUDY = """\
name: by-tasks
dataset: wine
model: {mlp: {hidden: [6]}}
workers: [1, 2]
strategies: [serial, epoch_average, epoch_async]
epochs: 2
repetitions: 1
execution: native
engine: tasks
"""


def scalebench(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


def test_rows_say_engine_and_backend(place):
    assert scalebench("run", "study.yaml") == 0
    runs = load(place / "results" / "by-tasks").runs
    assert list(runs["status"]) == ["completed"] * 5
    assert set(runs["engine"]) == {"tasks"}
    assert set(runs["launcher"]) == {"processes"}
    assert not runs["run_id"].duplicated().any()


def test_virtual_runs_are_charged_by_measured_rounds_of_tasks(place, monkeypatch):
    # fewer and smaller models than a cost is measured by, of fewer epochs
    monkeypatch.setattr("scalebench.tasks.run._EPOCHS", {1: 8, 200: 8})
    words = [
        "--execution",
        "virtual",
        "--set",
        "virtual.engine=tasks",
        "--set",
        "calibration_budget_s=1",
    ]
    assert scalebench("run", "study.yaml", *words) == 0
    folder = place / "results" / "by-tasks"
    engines = EngineCosts.model_validate(
        json.loads((folder / "calibration.json").read_text())["engines"]
    )
    rounds = [entry for entry in engines.entries if entry.engine == "tasks"]
    assert [entry.ranks for entry in rounds] == [1, 2]
    assert all(seconds > 0 for entry in rounds for _, seconds in entry.points)
    runs = load(folder).runs.set_index(["strategy", "workers"])
    assert runs.loc[("epoch_average", 2), "comm_s"] > 2 * rounds[0].alpha_s, (
        "a round in each of two epochs"
    )


def test_stated_clusters_are_charged_the_typical_cost_of_the_backend(place, capsys):
    """`epoch_average` waits for a round of tasks behind each of two epochs, whose links take microseconds."""
    words = [
        "--execution",
        "virtual",
        "--set",
        "virtual.engine=tasks",
        "--set",
        "tasks.backend=ray",
    ]
    words += ["--cluster", "juwels-booster", "--device-step-time", "0.001", "--verbose"]
    assert scalebench("run", "study.yaml", *words) == 0
    runs = load(place / "results" / "by-tasks").runs.set_index(["strategy", "workers"])
    assert runs.loc[("epoch_average", 2), "comm_s"] == pytest.approx(
        2 * 3.2e-3, rel=0.02
    )
    assert runs.loc[("epoch_async", 1), "comm_s"] == pytest.approx(2 * 3.2e-3, rel=0.02)
    assert runs.loc[("serial", 1), "comm_s"] == 0
    assert together(capsys.readouterr().err, "typical of ray", "3.2 ms")


def test_strategy_that_tasks_cannot_carry_is_charged_as_on_its_own_engine(place):
    words = {
        "virtual": {"engine": "tasks"},
        "strategies": ["allreduce"],
        "execution": "virtual",
    }
    notes = plan_study(Study.model_validate(yaml.safe_load(STUDY) | words)).sweep.notes
    assert any(together(note, "allreduce", "mpi", "tasks") for note in notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--strategy", "allreduce"],
            "allreduce cannot run on engine tasks, which has no batches; use --engine mpi",
        ),
        (["--set", "tasks.backend=spark"], "tasks.backend"),
        (["--set", "tasks.scheduler=tcp://a:1"], "say backend: dask or backend: ray"),
    ],
)
def test_bad_requests_are_one_line(place, capsys, words, said):
    assert scalebench("run", "study.yaml", *words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_processes_of_one_node_do_not_fill_several():
    study = Study.model_validate(yaml.safe_load(STUDY) | {"workers": [1, 4]})
    with pytest.raises(
        EngineError,
        match=naming("one node", "2 slots", "4", "--workers 1..2"),
    ):
        plan_study(study, Allocation.asked(2, 2))
    assert len(plan_study(study, Allocation.asked(1, 4)).sweep.runs) == 5


def test_strategies_of_whole_epochs_alone_are_carried():
    carried = {each.name for each in describe_strategies() if "tasks" in each.engines}
    assert {
        "serial",
        "epoch_average",
        "epoch_async",
        "dislib-compat",
        "dislib-compat-async",
    } <= carried
    assert not carried & {
        "allreduce",
        "local_sgd",
        "diloco",
        "fedprox",
        "daso-heat",
        "ddp",
        "pipeline",
        "fsdp",
        "bsp",
    }
    lacking = {
        each.name: each.missing.get("tasks", ()) for each in describe_strategies()
    }
    assert lacking["diloco"] == (str(Capability.BATCHES),)
