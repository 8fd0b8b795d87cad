"""Properties of the batch plan: conserved samples, even batches, equal steps, seeded order."""

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scalebench.data.batch_plan import BatchPlan, order_by_draw
from scalebench.data.layout import SHUFFLES
from scalebench.errors import DataError
from scalebench.study.spec import Component, Study

PARTITIONS = [
    Component(name="iid"),
    Component(name="by_order"),
    Component(name="dirichlet", options={"alpha": 5.0}),
]


@st.composite
def plans(draw):
    workers = draw(st.integers(1, 9))
    blocks = draw(st.one_of(st.none(), st.integers(workers, 3 * workers)))
    n = draw(st.integers(blocks or workers, 400))
    batch = draw(st.integers(1, 40))
    name = draw(st.sampled_from(["batch_per_worker", "batch_global"]))
    labels = np.random.default_rng(n).integers(0, 3, n)
    try:
        return BatchPlan(
            n,
            workers,
            seed=draw(st.integers(0, 5)),
            blocks=blocks,
            shuffle=draw(st.sampled_from(SHUFFLES)),
            partition=draw(st.sampled_from(PARTITIONS)),
            labels=labels,
            **{name: batch},
        )
    except DataError:
        assume(False)


@settings(max_examples=300, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 4))
def test_every_sample_is_visited_once_by_its_owner(plan, epoch):
    chains = [plan.indices(epoch, worker) for worker in range(plan.workers)]
    assert np.array_equal(np.sort(np.concatenate(chains)), np.arange(plan.n))
    assert [len(chain) for chain in chains] == plan.shard_sizes(epoch).tolist()
    owners = plan.owners(epoch)
    for worker, chain in enumerate(chains):
        assert (owners[chain] == worker).all()


@settings(max_examples=300, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 4))
def test_all_workers_take_the_same_steps_with_even_batches(plan, epoch):
    steps = plan.steps(epoch)
    sizes = plan.batch_sizes(epoch)
    assert sizes.shape == (plan.workers, steps)
    assert sizes.min() >= 1
    assert (sizes.max(axis=1) - sizes.min(axis=1) <= 1).all()
    assert sizes.max() <= plan.batch_size
    for worker in range(plan.workers):
        bounds = plan.bounds(epoch, worker)
        assert bounds[0] == 0
        assert bounds[-1] == plan.shard_sizes(epoch)[worker]
        assert np.array_equal(np.diff(bounds), sizes[worker])
    assert set(np.unique(sizes)) <= plan.all_batch_sizes(epoch + 1)


@settings(max_examples=200, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 4))
def test_moved_counts_agree_with_owners(plan, epoch):
    moved = plan.moved(epoch)
    assert (np.diag(moved) == 0).all()
    if epoch == 0 or plan.shuffle in ("none", "in_block"):
        assert moved.sum() == 0
        return
    change = moved.sum(axis=0) - moved.sum(axis=1)
    assert np.array_equal(plan.shard_sizes(epoch - 1) + change, plan.shard_sizes(epoch))
    assert moved.sum() == (plan.owners(epoch - 1) != plan.owners(epoch)).sum()


@settings(max_examples=100, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 3))
def test_blocks_keep_their_rows_together(plan, epoch):
    """Without mixing shuffles a block has the same rows in every epoch."""
    assume(plan.shuffle not in ("pairwise", "global"))

    def blocks(of_epoch):
        parts = (
            np.split(
                plan.indices(of_epoch, worker), plan.block_starts(of_epoch, worker)[1:]
            )
            for worker in range(plan.workers)
        )
        return {frozenset(block.tolist()) for chain in parts for block in chain}

    assert blocks(epoch) == blocks(0)
    assert len(blocks(0)) == plan.blocks


def test_block_k_goes_to_worker_k_mod_workers_in_file_order():
    plan = BatchPlan(
        11,
        2,
        seed=0,
        batch_per_worker=2,
        blocks=4,
        shuffle="none",
        partition=PARTITIONS[1],
    )
    assert plan.indices(0, 0).tolist() == [0, 1, 2, 6, 7, 8]
    assert plan.indices(0, 1).tolist() == [3, 4, 5, 9, 10]
    assert plan.block_starts(0, 0).tolist() == [0, 3]
    assert plan.indices(3, 1).tolist() == plan.indices(0, 1).tolist()


def test_in_block_permutes_inside_blocks_each_epoch():
    plan = BatchPlan(
        200, 2, seed=0, batch_per_worker=10, blocks=4, partition=PARTITIONS[1]
    )
    first, second = plan.indices(0, 0), plan.indices(1, 0)
    assert sorted(first[:50]) == sorted(second[:50]) == list(range(50))
    assert first.tolist() != second.tolist()
    assert first.tolist() != sorted(first)


def test_samples_are_ordered_by_draw_inside_their_block():
    random = np.random.default_rng(0)
    places = np.repeat(np.arange(50), random.integers(1, 40, size=50))
    draws = random.random(len(places))
    assert np.array_equal(order_by_draw(places, draws), np.lexsort((draws, places)))


def test_draws_that_are_equal_once_rounded_keep_their_order():
    """The second draw is smaller by less than the distance of numbers at its block's."""
    low, high = 0.5, np.nextafter(0.5, 1.0)
    places, draws = np.array([0, 1000, 1000]), np.array([0.9, high, low])
    assert places[1] + low == places[1] + high
    assert order_by_draw(places, draws).tolist() == [0, 2, 1]


def test_rotation_moves_whole_blocks():
    plan = BatchPlan(
        64, 4, seed=1, batch_per_worker=4, blocks=8, shuffle="rotate_blocks"
    )
    moved = sum(plan.moved(epoch) for epoch in range(1, 6))
    assert moved.sum() > 0
    assert (moved % 8 == 0).all()


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_order_is_a_function_of_seed_epoch_and_worker(shuffle):
    def orders(seed, epochs):
        plan = BatchPlan(100, 4, seed=seed, batch_per_worker=5, shuffle=shuffle)
        return {
            (epoch, worker): plan.indices(epoch, worker).tolist()
            for epoch in epochs
            for worker in (3, 0, 2, 1)
        }

    forward, backward = orders(7, range(8)), orders(7, reversed(range(8)))
    assert forward == backward
    assert orders(8, range(8)) != forward


def test_global_batch_is_shared_exactly():
    """7185 samples, 48 in all over 10 workers: b = 4.8, S = ceil(719 / 4.8) = 150."""
    plan = BatchPlan(7185, 10, seed=0, batch_global=48)
    assert plan.steps(0) == ceil(719 / Fraction(48, 10)) == 150
    assert plan.batch_size == 5
    assert plan.all_batch_sizes(3) == {4, 5}


def test_too_large_batches_are_reduced_and_noted():
    plan = BatchPlan(600, 2, seed=0, batch_per_worker=512)
    assert plan.notes == ["batch 512 is larger than the shard of 300: reduced to 300"]
    assert (plan.batch_size, plan.steps(0)) == (300, 1)
    plan = BatchPlan(600, 2, seed=0, batch_global=1000)
    assert plan.notes == [
        "batch_global 1000 is larger than the 600 samples: reduced to 600"
    ]
    assert BatchPlan(600, 2, seed=0, batch_per_worker=300).notes == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 101}, "101 workers but 100 training samples; use at most 100"),
        ({"workers": 8, "blocks": 4}, "4 blocks but 8 workers; use blocks: 8"),
        ({"workers": 8, "blocks": 101}, "101 blocks but 100 training samples"),
        (
            {"workers": 3, "blocks": 4, "batch_per_worker": 1},
            "a shard of 25 samples cannot fill the 50 steps",
        ),
        (
            {
                "workers": 2,
                "blocks": 3,
                "shuffle": "rotate_blocks",
                "batch_per_worker": 1,
            },
            "cannot fill the 67 steps",
        ),
        (
            {"workers": 64, "batch_per_worker": None, "batch_global": 32},
            "batch_global 32 is smaller than 64 workers",
        ),
        (
            {"workers": 1, "partition": Component(name="dirichlet")},
            "needs class labels",
        ),
        ({"workers": 1, "partition": Component(name="idd")}, "did you mean 'iid'"),
        (
            {"workers": 1, "partition": Component(name="iid", options={"alpha": 1})},
            "unknown option 'alpha'",
        ),
        (
            {
                "workers": 1,
                "partition": Component(name="dirichlet", options={"alfa": 1}),
            },
            "did you mean 'alpha'",
        ),
        (
            {
                "workers": 1,
                "partition": Component(name="dirichlet", options={"alpha": 0}),
            },
            "greater than 0, got 0",
        ),
    ],
)
def test_impossible_plan_is_a_one_line_error(options, message):
    with pytest.raises(DataError, match=message) as caught:
        BatchPlan(100, seed=0, **{"batch_per_worker": 8, **options})
    assert "\n" not in str(caught.value)


def test_smaller_alpha_skews_labels_more():
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha):
        plan = BatchPlan(
            5000,
            5,
            seed=3,
            batch_per_worker=64,
            labels=labels,
            partition=Component(name="dirichlet", options={"alpha": alpha}),
        )
        counts = [
            np.bincount(labels[plan.indices(0, worker)], minlength=10)
            for worker in range(5)
        ]
        return np.mean([count.max() / count.sum() for count in counts])

    assert largest_share(100) < 0.15  # nearly iid: 10 classes, a tenth each
    assert largest_share(0.3) > 0.25


def test_dirichlet_refuses_an_empty_worker():
    one_class = Component(name="dirichlet", options={"alpha": 0.001})
    with pytest.raises(DataError, match=r"leaves worker .* of 8 with 0 samples"):
        BatchPlan(
            100,
            8,
            seed=0,
            batch_per_worker=8,
            labels=np.zeros(100, dtype=int),
            partition=one_class,
        )


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_grid_blocks_are_visited_row_by_row(shuffle, blobs, make_run):
    """[rows, columns]: every sample once, block (i, j) with worker (columns i + j) mod K."""
    plans = [
        BatchPlan.of(make_run("serial", 4, shuffle=shuffle, blocks=blocks), 4, 0, blobs)
        for blocks in ([4, 3], 12)
    ]
    assert plans[0].blocks == 12
    for epoch in range(3):
        chains = [
            [plan.indices(epoch, worker) for worker in range(4)] for plan in plans
        ]
        assert all(map(np.array_equal, *chains))
        assert np.array_equal(np.sort(np.concatenate(chains[0])), np.arange(96))
    study = Study.model_validate({"blocks": [4, 3]})
    assert Study.model_validate_json(study.model_dump_json()).blocks == (4, 3)
    with pytest.raises(DataError, match="12 blocks but 16 workers"):
        BatchPlan.of(make_run("serial", 16, blocks=[4, 3]), 16, 0, blobs)
