"""Warnings about BatchNorm statistics that a strategy leaves local to each worker."""

from __future__ import annotations

import pytest

from scalebench.cluster.load import load_cluster
from scalebench.launch.model_check import look_at_model
from scalebench.launch.planning import StudyPlan
from scalebench.launch.preparation import local_statistics, prepare_study
from scalebench.launch.sweep import expand
from scalebench.study.spec import Study


def study_of(model, strategies, workers="2"):
    values = {"dataset": "wine", "execution": "virtual", "batch_per_worker": 8}
    return Study.model_validate({"model": model, "strategies": strategies, "workers": workers, **values})


def test_only_strategies_with_local_statistics_are_named():
    strategies = ["serial", "epoch_average", "dislib-compat", "local_sgd", {"slowmo": {"buffers": "keep"}}]
    (note,) = local_statistics(study_of("resnet", strategies))
    assert note.startswith("dislib-compat, slowmo(buffers=keep): the running statistics (BatchNorm) of resnet stay")
    assert "\n" not in note
    assert local_statistics(study_of("resnet", ["serial", "local_sgd"])) == []
    assert local_statistics(study_of("resnet", ["allreduce"], "1")) == []


def test_ddp_statistics_are_named_as_those_of_worker_0():
    local, sent = local_statistics(study_of("resnet", ["ddp", "horovod", "allreduce", "epoch_average"]))
    assert local.startswith("horovod, allreduce: the running statistics (BatchNorm) of resnet stay local")
    assert sent.startswith("ddp: the running statistics (BatchNorm) of resnet are worker 0's, of its batches alone")


OWN = """
from torch import nn

def build(input_shape, outputs):
    return nn.Sequential(nn.Linear(input_shape[0], 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))
"""


@pytest.mark.parametrize("normalised", [True, False])
def test_only_models_with_statistics_are_warned_about(normalised, tmp_path):
    (tmp_path / "own.py").write_text(OWN if normalised else OWN.replace("nn.BatchNorm1d(4), ", ""))
    study = study_of(f"{tmp_path / 'own.py'}:build", ["allreduce"])
    cluster = load_cluster("this-machine")
    sweep = expand(study, cluster)
    notes = look_at_model(StudyPlan(study, cluster, sweep, prepare_study(study, sweep.runs)))
    assert len(notes) == (1 if normalised else 0)
