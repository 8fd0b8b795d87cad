"""A schedule may take the learning rate below the smallest numbers: training then stands still, and nothing breaks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalebench.strategies import registry

LR, DECAY = (
    0.1,
    1e-12,
)  # after each step: 1e-13, 1e-25, 1e-37, 1e-49, a subnormal 1e-313, then 0
VANISHING = {
    "lr": LR,
    "lr_policy": "optimizer_steps",
    "lr_decay": DECAY,
    "lr_decay_every": 1,
}
STATED = {
    "daso-heat": {"devices_per_node": 1},
    "daso-fixed": {"devices_per_node": 1},
    "torch_hierarchical_local_sgd": {"groups": {2: 2, 4: 6}},
    **{
        name: {"steps": 2}
        for name in (
            "slowmo",
            "bmuf",
            "diloco",
            "easgd",
            "local_sgd",
            "noloco",
            "sparse_loco",
        )
    },
    "streaming_diloco": {"steps": 2, "delay": 0},
}


def run(play, name, **values):
    strategy = {name: STATED.get(name, {})}
    workers = 1 if not registry.find(name).requires else 4
    return play(
        strategy, workers, batch_per_worker=2, epochs=3, **{**VANISHING, **values}
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", registry.names())
def test_every_strategy_trains_at_a_vanishing_learning_rate(play, name, dtype):
    outcome, weights = run(play, name, dtype=dtype)
    assert LR * DECAY**27 == 0.0
    known = [
        worker for worker in outcome.workers if worker.epochs[-1].train_loss is not None
    ]
    assert len(known) * registry.create(name, {}).traits.mesh(
        len(outcome.workers)
    ).pipeline == len(outcome.workers)
    assert torch.isfinite(weights["final"]).all()
    assert (
        weights["final"] - weights["initial"]
    ).abs().max() < 10  # moves of its first steps, however long


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slowmo_keeps_its_moves_in_units_of_weights(play, dtype):
    """Intervals of one step at rates 0.1, 1e-13 ...: the first moves the weights, by a times its mean; the rest by less
    than a rounding. In units of 1/eta the second would be 1e12 times as long, and the
    fourth no float32."""
    _, alone = play(
        {"local_sgd": {"steps": 1}}, 4, batch_per_worker=24, epochs=1, dtype=dtype
    )
    for epochs in (1, 30):
        slow = {"slowmo": {"steps": 1, "slow_lr": 0.5, "slow_momentum": 0.9}}
        _, weights = play(
            slow, 4, batch_per_worker=24, epochs=epochs, dtype=dtype, **VANISHING
        )
        moved = (weights["final"] - weights["initial"]).numpy()
        expected = 0.5 * (alone["final"] - alone["initial"]).numpy()
        np.testing.assert_allclose(
            moved, expected, atol=1e-6 if dtype == "float32" else 1e-11
        )
