"""Warnings of strategies before they run, and options that would have no effect."""

from __future__ import annotations

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import StudyError
from scalebench.launch.hosts import reachable
from scalebench.launch.planning import plan_study
from scalebench.launch.sweep import expand
from scalebench.native.job_files import server_ranks
from scalebench.strategies import registry
from scalebench.study.spec import Study
from tests.facts import in_order


def notes(strategy, workers="2,4", **values):
    study = Study.model_validate(
        {"execution": "virtual", "workers": workers, "strategies": [strategy], **values}
    )
    return [*expand(study, load_cluster("this-machine"), reachable()).notes]


@pytest.mark.parametrize(
    ("name", "option", "compression", "belongs"),
    [
        ("allreduce", "keep", "none", "topk"),
        ("allreduce", "keep", "powersgd", "topk"),
        ("allreduce", "rank", "none", "powersgd"),
        ("allreduce", "start", "topk", "powersgd"),
        ("ddp", "rank", "none", "powersgd"),
        ("ddp", "start", "fp16", "powersgd"),
    ],
)
def test_an_option_of_another_compression_is_refused(
    name, option, compression, belongs
):
    value = {"keep": 0.5, "rank": 2, "start": 4}[option]
    message = f"strategy {name}: {option} has no effect with compression {compression}; write compression: {belongs}"
    for engine in ("virtual", "gloo"):
        with pytest.raises(StudyError, match=message):
            registry.create(name, {option: value, "compression": compression}, engine)
        registry.create(name, {option: value, "compression": belongs}, engine)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("epoch_average", "every"),
        ("epoch_async", "every"),
        ("fedavg", "local_epochs"),
        ("dislib-compat", "every"),
    ],
)
def test_an_interval_longer_than_the_training_is_warned_of_once(name, option):
    (note,) = notes({name: {option: 7}}, epochs=6)
    assert in_order(note, f"{option} 7", "more than the 6 epochs", "do not meet")
    assert "is more than the 1 epoch: " in notes({name: {option: 2}}, epochs=1)[0]
    assert notes({name: {option: 6}}, epochs=6) == []
    assert notes({name: {option: 7}}, workers="1", epochs=6) == []


def test_local_steps_that_are_more_than_the_training_has_are_warned_of():
    """142 wines by 8: 18 steps at 1 worker, 9 at 2, 5 at 4."""
    values = {
        "execution": "virtual",
        "workers": "1,2,4",
        "dataset": "wine",
        "epochs": 2,
        "batch_per_worker": 8,
    }
    study = Study.model_validate(
        {
            **values,
            "strategies": [{"local_sgd": {"steps": 15}}, {"local_sgd": {"steps": 18}}],
        }
    )
    few = [note for note in plan_study(study).notes if "first average" in note]
    for note, steps in zip(few, (15, 18), strict=True):
        assert in_order(
            note, f"local_sgd(steps={steps}) at 4 workers", f"after {steps} steps", "10"
        )
    assert not [
        note
        for note in plan_study(study.model_copy(update={"epochs": 4})).notes
        if "first average" in note
    ]


@pytest.mark.parametrize(
    ("strategy", "warning"),
    [
        (
            {"daso-fixed": {"global_skip": 30, "devices_per_node": 2}},
            None,
        ),  # the last batch of an epoch blocks
        ({"allreduce": {"accumulate": 30}}, None),  # an epoch's last step has fewer
        ({"post_local_sgd": {"start": 4, "steps": 6}}, None),
        (
            {"post_local_sgd": {"start": 10}},
            "weights comes after 18 steps, but the training has 10",
        ),
        ({"torch_post_local_sgd": {"start": 99}}, "weights comes after 100 steps, but"),
        (
            {"post_local_sgd": {"start": 4, "steps": 7}},
            "weights comes after 11 steps, but",
        ),
        ({"local_sgd": {"steps": 2, "first": 11}}, "weights comes after 11 steps, but"),
        ({"local_sgd": {"steps": 99, "first": 1}}, None),
        (
            {"hierarchical_local_sgd": {"groups": {2: 20, 4: 40}}},
            "weights comes after 20 steps, but",
        ),
        ({"hierarchical_local_sgd": {"groups": {2: 20, 4: 40}, "first": 5}}, None),
        (
            {"gossip": {"every": 11}},
            "weights comes after 11 steps, but the training has 10",
        ),
    ],
)
def test_first_synchronisation_after_the_end_of_training_is_warned_of(
    strategy, warning
):
    """142 wines by 8: 5 steps at 4 workers, 10 in two epochs."""
    values = {
        "execution": "virtual",
        "workers": "4",
        "dataset": "wine",
        "epochs": 2,
        "batch_per_worker": 8,
    }
    found = plan_study(Study.model_validate({**values, "strategies": [strategy]})).notes
    found = [note for note in found if "first average" in note]
    assert len(found) == (warning is not None)
    assert all(warning in note for note in found)


def test_diloco_with_an_inner_optimizer_that_is_not_the_papers_is_warned_of():
    (note,) = notes("diloco", optimizer="sgd")
    assert in_order(note, "diloco", "inner optimizer is sgd", "optimizer: adamw")
    assert notes("diloco", optimizer="adamw", lr=1e-3) == []


def test_a_slow_momentum_over_a_momentum_is_warned_of():
    (note,) = notes("slowmo")
    assert in_order(note, "slowmo", "slow_momentum 0.7", "3.3 times", "optimizer's")
    assert notes("slowmo", optimizer="sgd") == notes({"slowmo": {"slow_lr": 0.3}}) == []
    assert notes({"slowmo": {"slow_momentum": 0.5}}) == []


def test_there_are_no_more_servers_than_workers(play):
    (note,) = notes({"asp": {"shards": 3}}, workers="1,2,4")
    assert in_order(note, "asp(shards=3) at 2 workers", "more servers", "over 2")
    assert "shards 9 are more" in notes({"bsp_backup": {"shards": 9}}, workers="4")[0]
    study = Study.model_validate(
        {
            "workers": "1,2,4",
            "strategies": [{"bsp": {"shards": 3}}],
            "execution": "virtual",
        }
    )
    runs = expand(study, load_cluster("this-machine"), reachable()).runs
    assert {run.workers: server_ranks(run) for run in runs} == {1: 1, 2: 2, 4: 3}
    took = []
    for shards in (1, 2, 1024):
        outcome, _ = play({"bsp": {"shards": shards}}, 2)
        took.append(max(worker.epochs[-1].elapsed_s for worker in outcome.workers))
    assert took[0] > took[1] == took[2]


def test_a_decay_that_nothing_makes_is_refused():
    with pytest.raises(
        ValueError, match="lr_decay has no effect with lr_policy cosine"
    ):
        Study(lr_policy="cosine", lr_decay=0.5)
    Study(lr_policy="step", lr_decay=0.5, lr_decay_every=2)
