"""What a large model will take is said before it takes it."""

from __future__ import annotations

import pytest

from scalebench.cluster.load import load_cluster
from scalebench.launch import memory
from scalebench.launch.planning import StudyPlan
from scalebench.launch.preparation import prepare_study
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study

GIB = 2**30


def plan_of(**values):
    common = {"dataset": "wine", "execution": "virtual", "batch_per_worker": 2, "device_step_time": 0.01}
    study = Study.model_validate({"strategies": ["local_sgd"], "workers": "1,16", "epochs": 10, **common, **values})
    cluster = load_cluster("this-machine")
    sweep = expand(study, cluster)
    return StudyPlan(study, cluster, sweep, prepare_study(study, sweep.runs))


@pytest.fixture
def machine_of(monkeypatch):
    monkeypatch.setattr(memory.engines, "gpus", lambda: 0)
    return lambda gib: monkeypatch.setattr(memory, "usable_memory_mib", lambda: gib * 1024)


@pytest.mark.parametrize(
    ("changes", "models"), [({}, 16 * 10), ({"evaluate_every": 3}, 16 * 4), ({"evaluate_every": 0}, 16)]
)
def test_memory_is_that_of_replicas_and_of_models_kept_for_evaluation(changes, models, machine_of):
    replicas = 16 * 3
    plan = plan_of(**changes)
    machine_of(replicas + models)
    assert memory.memory_notes(plan, GIB, lambda run: 3 * GIB) == []
    machine_of(replicas + models - 1)
    (note,) = memory.memory_notes(plan, GIB, lambda run: 3 * GIB)
    assert note.startswith(f"local_sgd at 16 workers (virtual) may take up to {replicas + models} GiB of memory")
    assert f"has {replicas + models - 1} GiB: {replicas} GiB for 16 replicas, {models} GiB for their models at" in note


def test_real_workers_count_by_the_node_and_not_where_they_train_on_gpus(machine_of, monkeypatch):
    plan = plan_of(execution="native", engine="mpi", workers="2", device_step_time=None)
    machine_of(1)
    (note,) = memory.memory_notes(plan, GIB, lambda run: 3 * GIB)
    assert "(native)" in note
    monkeypatch.setattr(memory.engines, "gpus", lambda: 2)
    assert memory.memory_notes(plan, GIB, lambda run: 3 * GIB) == []
