"""SPARTA against its formula in numpy, and where all weights are averaged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.strategies.test_local_sgd import (
    EXACT,
    STEPS,
    WORKERS,
    Replicas,
    arrays,
    trained,
)

__all__ = ["arrays", "trained"]  # fixtures


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_drawn_weights_are_averaged_after_every_step(trained, arrays, share):
    outcome, weights, _ = trained({"sparta": {"share": share}})
    replicas = Replicas(arrays, weights["initial"])
    generator = torch.Generator().manual_seed(3)  # the run's
    drawn = math.ceil(share * 8)
    for t in range(STEPS):
        replicas.step(t)
        places = (
            torch.empty(drawn, dtype=torch.int64)
            .random_(0, 8, generator=generator)
            .numpy()
        )
        replicas.w[:, places] = replicas.w[:, places].mean(0)
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w.mean(0), **EXACT)
    sent = [worker.bytes_sent for worker in outcome.workers]
    assert sent == [8 * (STEPS * drawn + 8)] * WORKERS


def test_many_draws_of_every_weight_are_local_sgd_of_one_step(trained, monkeypatch):
    monkeypatch.setattr(
        "scalebench.strategies.sparta.Sparta._draw", lambda *_: torch.arange(8)
    )
    _, weights, _ = trained({"sparta": {"share": 1.0}})
    _, expected, _ = trained({"local_sgd": {"steps": 1}})
    torch.testing.assert_close(weights["final"], expected["final"], atol=1e-12, rtol=0)
