"""Checks of the study's model: local BatchNorm statistics, memory and time."""

from __future__ import annotations

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import ModelError, StudyError
from scalebench.formatting import memory_size
from scalebench.launch import model_check
from scalebench.launch.compute_estimate import ComputeEstimate
from scalebench.launch.hosts import reachable
from scalebench.launch.model_check import local_statistics, look_at_model
from scalebench.launch.planning import StudyPlan, prepare_study
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study
from tests.conftest import needs_mpi
from tests.facts import in_order, together


def study_of(model, strategies, workers="2"):
    values = {"dataset": "wine", "execution": "virtual", "batch_per_worker": 8}
    return Study.model_validate(
        {"model": model, "strategies": strategies, "workers": workers, **values}
    )


def test_only_strategies_with_local_statistics_are_named():
    strategies = [
        "serial",
        "epoch_average",
        "dislib-compat",
        "local_sgd",
        {"slowmo": {"buffers": "keep"}},
    ]
    (note,) = local_statistics(study_of("resnet", strategies))
    local = "dislib-compat, slowmo(buffers=keep) (evaluated with worker 0's)"
    assert in_order(note, "BatchNorm", "resnet stay local", local)
    assert "\n" not in note
    assert local_statistics(study_of("resnet", ["serial", "local_sgd"])) == []
    assert local_statistics(study_of("resnet", ["allreduce"], "1")) == []


def test_ddp_statistics_are_named_as_those_of_worker_0():
    (note,) = local_statistics(
        study_of("resnet", ["ddp", "horovod", "allreduce", "epoch_average"])
    )
    local = "horovod, allreduce (evaluated with worker 0's)"
    assert in_order(note, "resnet stay local", local, "worker 0's", "step of ddp")


OWN = """
from torch import nn

def build(input_shape, outputs):
    return nn.Sequential(nn.Linear(input_shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))
"""


@pytest.mark.parametrize("normalised", [True, False])
def test_only_models_with_statistics_are_warned_about(normalised, tmp_path):
    (tmp_path / "own.py").write_text(
        OWN if normalised else OWN.replace("nn.BatchNorm1d(4), ", "")
    )
    study = study_of(f"{tmp_path / 'own.py'}:build", ["allreduce"])
    cluster = load_cluster("this-machine")
    sweep = expand(study, cluster, reachable())
    notes = look_at_model(
        StudyPlan(study, cluster, reachable(), sweep, prepare_study(study, sweep.runs))
    )
    assert len(notes) == (1 if normalised else 0)


GIB = 2**30


def plan_of(**values):
    common = {
        "dataset": "wine",
        "execution": "virtual",
        "batch_per_worker": 2,
        "device_step_time": 0.01,
    }
    study = Study.model_validate(
        {
            "strategies": ["local_sgd"],
            "workers": "1,16",
            "epochs": 10,
            **common,
            **values,
        }
    )
    cluster = load_cluster("this-machine")
    sweep = expand(study, cluster, reachable())
    return StudyPlan(
        study, cluster, reachable(), sweep, prepare_study(study, sweep.runs)
    )


@pytest.fixture
def machine_of(monkeypatch):
    monkeypatch.setattr(model_check.hardware, "gpus", lambda: 0)
    return lambda gib: monkeypatch.setattr(
        model_check.hardware, "usable_memory_mib", lambda: gib * 1024
    )


@pytest.mark.parametrize(
    ("changes", "models"),
    [({}, 16 * 10), ({"evaluate_every": 3}, 16 * 4), ({"evaluate_every": 0}, 16)],
)
def test_memory_is_that_of_replicas_and_of_models_kept_for_evaluation(
    changes, models, machine_of
):
    replicas = 16 * 3
    plan = plan_of(**changes)
    machine_of(replicas + models)
    assert model_check.memory_notes(plan, GIB, lambda run: 3 * GIB) == []
    machine_of(replicas + models - 1)
    (note,) = model_check.memory_notes(plan, GIB, lambda run: 3 * GIB)
    assert together(
        note,
        "local_sgd",
        "16 workers",
        "virtual",
        memory_size((replicas + models) * GIB),
    )
    assert together(
        note,
        memory_size((replicas + models - 1) * GIB),
        memory_size(replicas * GIB),
        "16 replicas",
        memory_size(models * GIB),
        "models",
    )


@needs_mpi
def test_real_workers_count_by_node_unless_they_train_on_gpus(machine_of, monkeypatch):
    plan = plan_of(execution="native", engine="mpi", workers="2", device_step_time=None)
    machine_of(1)
    (note,) = model_check.memory_notes(plan, GIB, lambda run: 3 * GIB)
    assert "(native)" in note
    monkeypatch.setattr(model_check.hardware, "gpus", lambda: 2)
    assert model_check.memory_notes(plan, GIB, lambda run: 3 * GIB) == []


@pytest.mark.parametrize(
    ("wall_s", "core_hours", "most", "text"),
    [
        (1.0, 0.0001, 1.0, "about 1 s and 0.000 core-hours of training compute"),
        (1.0, 0.0001, 1.2, "about 1 s and 0.000 core-hours of training compute"),
        (
            600.0,
            0.0001,
            3.0,
            "about 10 min to 30 min and 0.000 core-hours of training compute",
        ),
        (
            600.0,
            1.0,
            3.0,
            "about 10 min to 30 min and 1.000 to 3.000 core-hours of training compute",
        ),
    ],
)
def test_estimate_gives_a_range_where_more_runs_may_follow(
    wall_s, core_hours, most, text
):
    assert str(ComputeEstimate(0.001, wall_s, core_hours, most)) == text


UNUSED = """
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.net, self.other = nn.Linear(inputs, outputs), nn.Linear(inputs, 2)

    def forward(self, x):
        return self.net(x)


def build(input_shape, outputs):
    return Net(input_shape[0], outputs)
"""


def test_ddp_refuses_parameters_without_gradient_unless_it_finds_them(tmp_path):
    (tmp_path / "own.py").write_text(UNUSED)
    plan = plan_of(
        model=f"{tmp_path / 'own.py'}:build", strategies=["allreduce", "ddp"]
    )
    with pytest.raises(
        StudyError,
        match=r"ddp.*: other.weight, other.bias of model .* get no gradient in some steps",
    ):
        look_at_model(plan)
    finding = [{"ddp": {"find_unused_parameters": True}}]
    plan = plan_of(model=f"{tmp_path / 'own.py'}:build", strategies=finding)
    assert any(
        "other.weight, other.bias of model" in note for note in look_at_model(plan)
    )


def test_batches_of_one_sample_are_looked_at(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    plan = plan_of(
        model=f"{tmp_path / 'own.py'}:build", batch_per_worker=1, workers="1,2"
    )
    with pytest.raises(ModelError, match="fails while training on a batch of 1 sample"):
        look_at_model(plan)


DEEP = OWN.replace(
    "nn.Linear(4, outputs)", "nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, outputs)"
)


def test_batch_normalisation_of_micro_batches_is_noted(tmp_path):
    (tmp_path / "own.py").write_text(DEEP)
    pipeline = {"pipeline": {"micro_batches": 2}}
    strategies = ["serial", "allreduce", pipeline, "model_parallel"]
    values = {"workers": "1,2", "batch_per_worker": 8, "strategies": strategies}
    plan = plan_of(model=f"{tmp_path / 'own.py'}:build", **values)
    notes = [note for note in look_at_model(plan) if "sees micro-batches" in note]
    (note,) = notes
    assert in_order(note, "own.py:build", "pipeline(micro_batches=2) (2 of", "differ")
    assert not any(name in note for name in ("allreduce", "model_parallel", "serial"))


def test_micro_batches_of_one_sample_are_looked_at(tmp_path):
    (tmp_path / "own.py").write_text(DEEP)
    values = {"workers": "2", "strategies": ["pipeline"], "batch_per_worker": 4}
    plan = plan_of(model=f"{tmp_path / 'own.py'}:build", **values)
    with pytest.raises(ModelError, match=r"batch of 1 sample: .*fewer.* micro-batches"):
        look_at_model(plan)
