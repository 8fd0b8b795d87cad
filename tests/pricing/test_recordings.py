"""Schedules that repetitions share: only those that do not depend on the seed."""

from __future__ import annotations

import pytest
import torch

from scalebench.data.plan import BatchPlan
from scalebench.models.registry import build_model
from scalebench.pricing.recording import Recordings
from scalebench.strategies import registry


@pytest.mark.parametrize(
    ("strategy", "partition", "shares"),
    [
        ("epoch_average", "iid", True),
        ("allreduce", "iid", True),
        ("gossip", "iid", False),  # partners are drawn
        ("epoch_average", {"dirichlet": {"alpha": 0.5}}, False),  # shards are drawn
    ],
    ids=["average", "allreduce", "drawn partners", "drawn shards"],
)
def test_repetitions_share_schedules_that_do_not_depend_on_the_seed(make_run, blobs, strategy, partition, shares):
    recordings, found = Recordings(), []
    for seed in (3, 4):
        run = make_run(strategy, 4, seed=seed, partition=partition)
        model = build_model(run.model, blobs.input_shape, blobs.outputs, blobs.task, torch.float64, seed).to("meta")
        rule = registry.create(run.strategy.name, run.strategy.options, "virtual")
        found.append(recordings.of(run, rule, BatchPlan.of(run, 4, seed, blobs), model, 2))
    assert (found[0] is found[1]) == shares
    assert [schedule.rank for schedule in found[1]] == [0, 1, 2, 3]
