"""DeMo against its formulas in numpy and scipy, and its identities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scalebench.strategies import registry
from scalebench.strategies.tiles import StrongestOfTiles, largest_divisor
from tests.conftest import setting
from tests.strategies.test_local_sgd import (
    EXACT,
    LR,
    STEPS,
    WORKERS,
    Replicas,
    arrays,
    trained,
)

__all__ = ["arrays", "trained"]  # fixtures
SHAPES = [(2, 3), (2,)]


def tiles(matrix, side):
    """Slices of the tiles of a matrix."""
    height, width = (largest_divisor(n, side) for n in matrix.shape)
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            yield slice(top, top + height), slice(left, left + width)


@pytest.mark.parametrize(("k", "side"), [(2, 64), (1, 2), (99, 64)])
def test_workers_move_by_the_sign_of_the_strongest_cosines(trained, arrays, k, side):
    fft = pytest.importorskip("scipy.fft")
    _, weights, _ = trained(
        {"demo": {"k": k, "tile": side, "decay": 0.9}}, optimizer="sgd"
    )
    replicas = Replicas(arrays, weights["initial"])
    momenta = np.zeros_like(replicas.w)
    for t in range(STEPS):
        momenta = 0.9 * momenta + LR * replicas.gradients(t)
        step, at = [], 0
        for shape in SHAPES:
            size = int(np.prod(shape))
            matrices = momenta[:, at : at + size].reshape(
                WORKERS, shape[0] if len(shape) > 1 else 1, -1
            )
            moved = np.zeros(matrices.shape[1:])
            for place in tiles(moved, side):
                total, senders = (
                    np.zeros(moved[place].shape),
                    np.zeros(moved[place].shape),
                )
                for matrix in matrices:
                    spectrum = fft.dctn(matrix[place], norm="ortho")
                    kept = np.zeros(spectrum.size, bool)
                    kept[np.argsort(-np.abs(spectrum), axis=None)[:k]] = True
                    kept = kept.reshape(spectrum.shape)
                    total, senders = total + spectrum * kept, senders + kept
                    matrix[place] -= fft.idctn(spectrum * kept, norm="ortho")
                moved[place] = fft.idctn(total / np.maximum(senders, 1), norm="ortho")
            momenta[:, at : at + size] = matrices.reshape(WORKERS, -1)
            step.append(np.sign(moved).ravel())
            at += size
        replicas.w -= LR * np.concatenate(step)
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)


def test_sending_everything_is_the_sign_of_the_mean_gradient(trained, arrays):
    """Nothing stays in the momentum, whatever its decay."""
    _, weights, _ = trained({"demo": {"k": 99, "tile": 1}}, optimizer="sgd")
    replicas = Replicas(arrays, weights["initial"])
    for t in range(STEPS):
        replicas.w -= LR * np.sign(replicas.gradients(t).mean(0))
    np.testing.assert_allclose(weights["final"].numpy(), replicas.w[0], **EXACT)


def test_convolutions_are_matrices():
    weights = torch.arange(48.0, dtype=torch.float64)
    parts = StrongestOfTiles([(4, 3, 2, 2)], 4, lambda _: 16, weights, cosines=True)
    tiled = parts.tiled(weights)
    # 4 x 12 in tiles of 4 x 4
    first = weights.view(4, 12)[:, :4]
    assert tiled[0] == pytest.approx(float(first.sum()) / 4)
    torch.testing.assert_close(parts.vector(tiled), weights)


def test_an_optimizer_that_is_not_plain_sgd_is_warned_of():
    strategy = registry.create("demo", {})
    assert strategy.check(setting(2, optimizer="sgd")) == []
    for optimizer in ("adam", {"sgd": {"momentum": 0.9}}):
        (note,) = strategy.check(setting(2, optimizer=optimizer))
        assert "takes the sign for a gradient" in note


def test_a_lone_worker_takes_the_same_step_and_sends_nothing(play):
    values = {"optimizer": "sgd", "epochs": 2, "batch_per_worker": 12}
    outcome, weights = play({"demo": {"k": 10_000, "tile": 1}}, 1, **values)
    assert outcome.workers[0].bytes_sent == 0
    assert torch.isfinite(weights["final"]).all()
