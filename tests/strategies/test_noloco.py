"""NoLoCo against its formulas in numpy, and against bmuf, which two workers are."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.strategies.gossip import partner_of
from tests.conftest import setting
from tests.strategies.test_local_sgd import (
    EXACT,
    STEPS,
    WORKERS,
    Replicas,
    arrays,
    intervals,
    trained,
)

__all__ = ["arrays", "trained"]  # fixtures


def test_two_workers_are_bmuf(play):
    values = {
        "epochs": 3,
        "batch_per_worker": 12,
        "optimizer": {"sgd": {"momentum": 0.9}},
    }
    _, weights = play(
        {"noloco": {"steps": 3, "outer_lr": 0.7, "outer_momentum": 0.5}}, 2, **values
    )
    _, expected = play(
        {"bmuf": {"steps": 3, "block_lr": 0.7, "block_momentum": 0.5}}, 2, **values
    )
    torch.testing.assert_close(weights["final"], expected["final"], atol=1e-12, rtol=0)


@pytest.mark.parametrize("gamma", [None, 0.2])
def test_pairs_take_the_papers_outer_step(trained, arrays, gamma):
    outcome, weights, _ = trained({"noloco": {"steps": 4, "gamma": gamma}})
    replicas = Replicas(arrays, weights["initial"])
    slow, move = replicas.w.copy(), np.zeros_like(replicas.w)
    draw = random.Random(3)
    for t in range(STEPS):
        replicas.step(t)
        if t + 1 not in intervals(4):
            continue
        round_ = draw.getstate()
        partners = []
        for rank in range(WORKERS):
            draw.setstate(round_)
            partners.append(partner_of(rank, WORKERS, draw))
        went = replicas.w - slow
        drawn = (slow + slow[partners]) / 2 - slow
        move = (
            0.5 * move
            + 0.7 * (went + went[partners]) / 2
            + (0.7 if gamma is None else gamma) * drawn
        )
        slow = slow + move
        replicas.w[:] = slow
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w.mean(0), **EXACT)
    messages = len(intervals(4)) * 2 * 8 * 8
    # and the mean at the end
    sent = [worker.bytes_sent for worker in outcome.workers]
    assert sent == [messages + 8 * 8] * WORKERS


def test_a_lone_worker_is_refused():
    with pytest.raises(
        StudyError, match="noloco at 1 worker: there is no partner to step with"
    ):
        registry.create("noloco", {}).check(setting(1))
