"""Pairwise shuffle: pairs of blocks exchange rows, all rows are kept, rounds compose."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.data.batch_plan import BatchPlan
from scalebench.data.layout import PairwiseRounds, mix_pairs
from scalebench.study.spec import Component


def split(rows, sizes):
    return np.split(rows, np.cumsum(sizes)[:-1])


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), seed=st.integers(0, 5)
)
def test_blocks_exchange_rows_in_pairs_and_an_odd_block_stays_alone(sizes, seed):
    rows = np.arange(sum(sizes)) * 10
    mixed = mix_pairs(rows, np.array(sizes), np.random.default_rng(seed))
    assert sorted(mixed) == rows.tolist()
    home = dict(
        zip(
            rows.tolist(), np.repeat(np.arange(len(sizes)), sizes).tolist(), strict=True
        )
    )
    came_from = [{home[row] for row in block.tolist()} for block in split(mixed, sizes)]
    partners = [origins | {block} for block, origins in enumerate(came_from)]
    assert all(len(members) <= 2 for members in partners)
    for block, members in enumerate(partners):
        for other in members:
            assert block in partners[other] or partners[other] == {other}
    if len(sizes) == 1:
        assert partners == [{0}]


def test_pairs_mix_and_partners_change():
    rows, sizes = np.arange(400), np.full(8, 50)
    rounds = PairwiseRounds(rows, sizes, np.random.default_rng)
    seen = set()
    for number in range(6):
        before, after = rounds.rows_after(number - 1), rounds.rows_after(number)
        home = np.empty(400, int)
        home[before] = np.repeat(np.arange(8), 50)
        pairs = {frozenset(home[block].tolist()) for block in split(after, sizes)}
        assert sorted(len(pair) for pair in pairs) == [2, 2, 2, 2]
        seen |= pairs
    assert len(seen) > 10  # of 28
    assert not np.array_equal(rounds.rows_after(5), np.sort(rounds.rows_after(5)))


def test_an_odd_block_is_permuted_too():
    mixed = mix_pairs(np.arange(50), np.array([50]), np.random.default_rng(0))
    assert mixed.tolist() != list(range(50))


def test_round_does_not_depend_on_previous_queries():
    sizes = np.array([5, 6, 7])
    forward = PairwiseRounds(np.arange(18), sizes, np.random.default_rng)
    in_order = [forward.rows_after(number).tolist() for number in range(40)]
    jumping = PairwiseRounds(np.arange(18), sizes, np.random.default_rng)
    for number in (39, 3, 20, 39, 0):
        assert jumping.rows_after(number).tolist() == in_order[number]
    assert len(forward._kept) <= 5


def test_rows_reach_all_workers():
    plan = BatchPlan(
        64,
        4,
        seed=0,
        batch_per_worker=8,
        shuffle="pairwise",
        partition=Component(name="by_order"),
    )
    owners = [
        set(np.flatnonzero(plan.owners(epoch) == 0).tolist()) for epoch in range(8)
    ]
    assert len(owners[0] & owners[1]) > 2  # half of them stay ...
    assert plan.moved(1).sum() < 64 * 0.8
    # ... and in the end nearly all have been there
    assert len(set().union(*owners)) > 50


@pytest.mark.parametrize(
    ("strategy", "workers"), [("epoch_average", 4), ("allreduce", 3)]
)
def test_moved_bytes_are_charged(play, strategy, workers, blobs):
    """2 float64 features and an int64 class: 24 bytes a row that leaves its worker."""
    epochs = 4
    options = {"epochs": epochs, "shuffle": "pairwise", "blocks": 2 * workers}
    still, _ = play(strategy, workers, **{**options, "shuffle": "in_block"})
    moving, _ = play(strategy, workers, **options)
    plan = BatchPlan(
        96, workers, seed=3, batch_per_worker=8, shuffle="pairwise", blocks=2 * workers
    )
    moved = sum(plan.moved(epoch) for epoch in range(1, epochs))
    assert moved.sum() > 0
    for worker in range(workers):
        extra = moving.workers[worker].bytes_sent - still.workers[worker].bytes_sent
        assert extra == 24 * moved[worker].sum()
        assert moving.workers[worker].comm_s > still.workers[worker].comm_s
