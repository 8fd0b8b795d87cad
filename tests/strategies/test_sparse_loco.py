"""SparseLoCo against its formulas in numpy, and against diloco where everything is sent as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalebench.strategies.few_bits import by_bins
from scalebench.strategies.tiles import StrongestOfTiles, cosines, largest_divisor
from tests.strategies.test_local_sgd import (
    EXACT,
    STEPS,
    Replicas,
    arrays,
    intervals,
    trained,
)

__all__ = ["arrays", "trained"]  # fixtures
ROUNDS = {"epochs": 4, "batch_per_worker": 12, "optimizer": {"sgd": {"momentum": 0.9}}}


@pytest.mark.parametrize("outer_lr", [1.0, 0.7])
def test_sending_everything_is_diloco_without_momentum(play, outer_lr):
    whole = {"keep": 1.0, "bits": 32, "outer_lr": outer_lr, "steps": 3}
    _, weights = play({"sparse_loco": whole}, 4, **ROUNDS)
    _, expected = play(
        {"diloco": {"steps": 3, "outer_momentum": 0.0, "outer_lr": outer_lr}},
        4,
        **ROUNDS,
    )
    torch.testing.assert_close(weights["final"], expected["final"], atol=1e-11, rtol=0)


def test_sending_everything_at_full_length_is_local_sgd(play):
    _, weights = play(
        {"sparse_loco": {"keep": 1.0, "bits": 32, "steps": 3}}, 4, **ROUNDS
    )
    _, expected = play({"local_sgd": {"steps": 3}}, 4, **ROUNDS)
    torch.testing.assert_close(weights["final"], expected["final"], atol=1e-11, rtol=0)


def two_bits(values):
    """Means of four bins that cover six standard deviations around the mean."""
    if len(values) == 1:
        return values.astype(np.float32)
    width = 6 * values.std(ddof=1) / 4
    codes = np.clip(np.round((values - values.mean()) / width + 2), 0, 3)
    return np.array([np.float32(values[codes == code].mean()) for code in codes])


def sent(matrix, side, keep, quantised):
    """The strongest entries of each tile of a matrix, in their places."""
    found, rows, columns = (
        np.zeros_like(matrix),
        *(largest_divisor(n, side) for n in matrix.shape),
    )
    chosen, values = [], []
    for top in range(0, matrix.shape[0], rows):
        for left in range(0, matrix.shape[1], columns):
            tile = matrix[top : top + rows, left : left + columns]
            order = np.argsort(-np.abs(tile), axis=None)[
                : max(1, round(keep * tile.size))
            ]
            for place in order:
                chosen.append((top + place // columns, left + place % columns))
                values.append(tile.flat[place])
    values = np.array(values)
    for place, value in zip(
        chosen, two_bits(values) if quantised else values, strict=True
    ):
        found[place] = value
    return found


@pytest.mark.parametrize("bits", [32, 2])
def test_a_message_holds_the_strongest_entries_of_each_tile(bits):
    random = np.random.default_rng(3)
    matrix, vector = random.standard_normal((6, 10)), random.standard_normal(7)
    flat = torch.from_numpy(np.concatenate([matrix.ravel(), vector]))
    strongest = StrongestOfTiles(
        [(6, 10), (7,)], 5, lambda n: round(0.4 * n), flat, bits=bits
    )
    tiled = strongest.tiled(flat)
    rest = tiled.clone()
    message = strongest.take_(rest)
    both = torch.stack([message, message])
    for values, places in zip(*strongest.taken(both), strict=True):
        stands_for = torch.zeros_like(flat).index_add_(0, places, values)
        assert torch.equal(stands_for[places], tiled[places] - rest[places])
    found = strongest.vector(stands_for).numpy()
    torch.testing.assert_close(rest + stands_for, tiled)
    expected = [
        sent(matrix, 5, 0.4, bits == 2).ravel(),
        sent(vector[None], 5, 0.4, bits == 2).ravel(),
    ]
    np.testing.assert_allclose(
        found, np.concatenate(expected), atol=1e-12 if bits == 32 else 1e-6, rtol=0
    )
    entries = 4 * 6, 7  # 4 tiles of 3 x 5 numbers; 7 of one, each of which sends one
    each = (
        sum(8 * n for n in entries)
        if bits == 32
        else sum(16 + -(-2 * n // 8) for n in entries)
    )
    assert message.nbytes == strongest.nbytes == each + 2 * sum(entries)
    blank = strongest.take_(strongest.tiled(flat.to("meta")))
    assert (blank.is_meta, blank.shape, blank.dtype) == (
        True,
        message.shape,
        message.dtype,
    )
    entries_back, _ = strongest.taken(blank[None])
    assert (entries_back.is_meta, entries_back.shape, entries_back.dtype) == (
        True,
        (1, sum(entries)),
        flat.dtype,
    )


@pytest.mark.parametrize("bits", [32, 2])
@pytest.mark.parametrize(("decay", "outer_lr"), [(0.9, 1.0), (1.0, 0.7), (0.0, 1.0)])
def test_what_is_not_sent_stays_for_the_next_round(
    trained, arrays, bits, decay, outer_lr
):
    """All rounds in numpy: what each worker sends of its move and of what stayed, and the step along their mean."""
    options = {
        "steps": 4,
        "keep": 0.3,
        "tile": 4,
        "bits": bits,
        "decay": decay,
        "outer_lr": outer_lr,
    }
    _, weights, _ = trained({"sparse_loco": options})
    replicas = Replicas(arrays, weights["initial"])
    anchor, unsent = replicas.w[0].copy(), np.zeros_like(replicas.w)
    for t in range(STEPS):
        replicas.step(t)
        if t + 1 not in intervals(4):
            continue
        unsent = decay * unsent + anchor - replicas.w
        messages = np.array([of_parameters(each, 4, 0.3, bits == 2) for each in unsent])
        unsent -= messages
        anchor = anchor - outer_lr * messages.mean(0)
        replicas.w[:] = anchor
    # the table of a message is in float32
    tolerance = EXACT if bits == 32 else {"atol": 1e-6, "rtol": 0}
    np.testing.assert_allclose(weights["final"].numpy(), anchor, **tolerance)


def of_parameters(vector, side, keep, quantised):
    """The message of a matrix of 2 x 3 numbers and a vector of 2, as the vector that it stands for."""
    parts = vector[:6].reshape(2, 3), vector[6:].reshape(1, 2)
    return np.concatenate([sent(each, side, keep, quantised).ravel() for each in parts])


@given(st.integers(1, 40), st.sampled_from([2, 4, 8]), st.integers(0, 2**32 - 1))
def test_bins_stand_for_the_mean_of_their_values(n, bits, seed):
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(n))
    codes, table = by_bins(values, bits)
    assert len(codes) == n
    for code in set(codes.tolist()):
        torch.testing.assert_close(
            table[code].double(), values[codes == code].mean(), atol=1e-6, rtol=0
        )
    if n > 1 and bits == 2:
        np.testing.assert_allclose(
            table[codes.long()].numpy(), two_bits(values.numpy()), atol=1e-6
        )


def test_equal_values_fall_into_one_bin():
    codes, table = by_bins(torch.full((5,), 3.0), 2)
    assert table[codes.long()].tolist() == [3.0] * 5


@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_tiles_come_back_as_they_were(n, seed):
    vector = torch.from_numpy(np.random.default_rng(seed).standard_normal(6 * n + 5))
    for cosine in (False, True):
        strongest = StrongestOfTiles(
            [(6, n), (5,)], 4, lambda _: 1, vector, cosines=cosine
        )
        torch.testing.assert_close(
            strongest.vector(strongest.tiled(vector)), vector, atol=1e-12, rtol=0
        )


def test_cosines_are_the_orthonormal_transform():
    fft = pytest.importorskip("scipy.fft")
    for n in (1, 2, 5, 64):
        found = cosines(n, torch.float64, torch.device("cpu")).numpy()
        np.testing.assert_allclose(
            found, fft.dct(np.eye(n), axis=0, norm="ortho"), atol=1e-13
        )
