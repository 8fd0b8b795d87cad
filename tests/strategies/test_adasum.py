"""Adasum against its formula, written here with numpy; the real op is met in test_real_ranks.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.data.batch_plan import BatchPlan
from scalebench.errors import StudyError
from scalebench.strategies import registry
from scalebench.strategies.adasum import Merging
from tests.conftest import setting


def combined(a, b):
    """Adasum of two vectors, by the paper."""
    ratio_a = (a @ b) / (2 * (a @ a)) if a @ a else 0.0
    ratio_b = (a @ b) / (2 * (b @ b)) if b @ b else 0.0
    return (1 - ratio_a) * a + (1 - ratio_b) * b


def tree(vectors):
    while len(vectors) > 1:
        vectors = [
            combined(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


@settings(deadline=None)
@given(n=st.integers(1, 9), seed=st.integers(0, 999), zero=st.booleans())
def test_two_vectors_by_the_formula_each_part_for_itself(n, seed, zero):
    random = np.random.default_rng(seed)
    a, b = random.standard_normal((2, n + 2))
    if zero:
        b[:2] = 0
    merged = torch.tensor(a)
    Merging([2, n], merged)(merged, torch.tensor(b))
    np.testing.assert_allclose(merged[:2].numpy(), combined(a[:2], b[:2]), atol=1e-13)
    np.testing.assert_allclose(merged[2:].numpy(), combined(a[2:], b[2:]), atol=1e-13)


def test_equal_steps_are_averaged_and_orthogonal_ones_added():
    for a, b, expected in (
        ([3.0, 4.0], [3.0, 4.0], [3.0, 4.0]),
        ([2.0, 0.0], [0.0, 5.0], [2.0, 5.0]),
    ):
        merged = torch.tensor(a)
        Merging([2], merged)(merged, torch.tensor(b))
        assert merged.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_run_follows_the_rule(play, blobs, make_run, workers):
    """Softmax regression (no hidden layer) with momentum, by hand: its gradient is (p - y) x / n."""
    options = {
        "epochs": 2,
        "model": {"mlp": {"hidden": []}},
        "optimizer": {"sgd": {"momentum": 0.9}},
    }
    outcome, weights = play("adasum", workers, **options)
    run = make_run("adasum", workers, **options)
    plan = BatchPlan.of(run, workers, run.seed, blobs)
    w, moments = (
        weights["initial"].numpy().copy(),
        [np.zeros(9) for _ in range(workers)],
    )
    for epoch in range(2):
        for step in range(plan.steps(epoch)):
            deltas = []
            for rank in range(workers):
                low, high = plan.bounds(epoch, rank)[step : step + 2]
                rows = plan.indices(epoch, rank)[low:high]
                x, y = blobs.x_train[rows].astype(float), np.eye(3)[blobs.y_train[rows]]
                scores = np.exp(x @ w[:6].reshape(3, 2).T + w[6:])
                error = (scores / scores.sum(1, keepdims=True) - y) / len(x)
                gradient = np.concatenate([(error.T @ x).ravel(), error.sum(0)])
                moments[rank] = 0.9 * moments[rank] + gradient
                deltas.append(-0.1 * moments[rank])
            w += np.concatenate(
                [tree([d[:6] for d in deltas]), tree([d[6:] for d in deltas])]
            )
    np.testing.assert_allclose(weights["final"].numpy(), w, atol=1e-12)
    levels, steps = workers.bit_length() - 1, outcome.workers[0].optimizer_steps
    for worker in outcome.workers:
        assert worker.syncs == steps == sum(plan.steps(epoch) for epoch in range(2))
        assert worker.bytes_sent == steps * levels * 9 * 8


@pytest.mark.parametrize("workers", [3, 6, 12])
def test_worker_count_other_than_a_power_of_two_is_refused(workers):
    for engine in ("virtual", "horovod"):
        strategy = registry.create("adasum", {}, engine)
        assert strategy.check(setting(8)) == strategy.check(setting(1)) == []
        with pytest.raises(
            StudyError,
            match=f"strategy adasum: {workers} workers; expected a power of two",
        ):
            strategy.check(setting(workers))
