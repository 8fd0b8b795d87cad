"""The preset `dislib-compat`: what it fixes, what it leaves out, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.data.shard import equal_batches
from scalebench.errors import StudyError
from scalebench.launch.hosts import reachable
from scalebench.launch.sweep import expand
from scalebench.strategies import registry
from scalebench.study.spec import Study


def test_batches_lie_inside_blocks_and_the_rest_of_a_block_is_left_out():
    slices, firsts = equal_batches(np.array([0, 30, 59]), 88, 8)
    assert slices[:4] == [(0, 7), (7, 14), (14, 21), (21, 28)]
    assert slices[4:8] == [(30, 37), (37, 44), (44, 51), (51, 58)]
    assert firsts == {0, 4, 8}
    assert equal_batches(np.array([0]), 5, 8) == ([(0, 5)], {0})


def test_a_tail_sample_is_never_trained_on(play, blobs):
    """96 samples in 5 blocks of 20 and 19, batches of 6: 4 of 5 or 4, so that 3 of 19 change nothing."""
    options = {
        "blocks": 5,
        "partition": "by_order",
        "shuffle": "none",
        "batch_per_worker": 6,
    }
    _, before = play("dislib-compat", 2, **options)
    changed = blobs.x_train.copy()
    changed[36:39] = 100.0  # the end of the second block, 20 to 38
    other = type(blobs)(
        "blobs", "classification", 3, changed, blobs.y_train, blobs.x_test, blobs.y_test
    )
    _, after = play("dislib-compat", 2, data=other, **options)
    assert before["final"].equal(after["final"])
    _, plain = play("epoch_average", 2, data=other, **options)
    assert not plain["final"].equal(after["final"])


@pytest.mark.parametrize("name", ["dislib-compat", "dislib-compat-async"])
def test_options_fixed_by_the_preset_are_refused(name):
    strategy = registry.create(name, {})
    rule = strategy.synchronisation
    assert (rule.averaged, rule.optimizer_state) == ("parameters", "reset_per_block")
    assert rule.merge == ("half" if name.endswith("async") else "mean")
    with pytest.raises(StudyError, match=r"'optimizer_state'.*'reset_per_block'"):
        registry.create(name, {"optimizer_state": "keep"})
    study = Study.model_validate(
        {
            "strategies": [name],
            "workers": [2],
            "lr_policy": "linear",
            "execution": "virtual",
        }
    )
    with pytest.raises(
        StudyError,
        match=f"{name}: dislib knows no lr_policy linear; write lr_policy: constant",
    ):
        expand(study, load_cluster("this-machine"), reachable())


@pytest.mark.parametrize(
    ("name", "workers"),
    [("dislib-compat", 2), ("dislib-compat", 4), ("dislib-compat-async", 3)],
)
def test_communications_are_those_of_the_rule(play, name, workers):
    """There and back through the master after epochs 2, 4 and 5; a merge after 2 and 4, and the mean at the end."""
    outcome, _ = play({name: {"every": 2}}, workers, epochs=5, blocks=8)
    expected = [0, 1, 0, 1, 1] if name.endswith("async") else [0, 2, 0, 2, 2]
    assert len(outcome.workers) == workers
    for worker in outcome.workers:
        counted = [epoch.syncs for epoch in worker.epochs]
        counted[-1] += worker.syncs - sum(counted)  # what `finish` did
        assert counted == expected
