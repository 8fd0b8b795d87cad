"""`balance: speed`: slower workers get less data, so that all need the same time for a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalebench.data.batch_plan import BatchPlan, sizes_by_speed
from scalebench.errors import DataError
from scalebench.pricing.machine import BatchTimes, StepTable
from scalebench.study.spec import Component
from scalebench.virtual.engine import simulate
from tests.facts import naming, together

BALANCED = {"iid": {"balance": "speed"}}


def plan_of(n, speeds, name="iid", **options):
    partition = Component(name=name, options={"balance": "speed"})
    return BatchPlan(
        n,
        len(speeds),
        seed=1,
        batch_per_worker=16,
        partition=partition,
        speeds=speeds,
        **options,
    )


@settings(deadline=None)
@given(
    speeds=st.lists(st.floats(0.2, 1.0), min_size=1, max_size=6),
    n=st.integers(200, 500),
    per=st.integers(1, 3),
)
def test_shares_follow_the_speeds_and_no_sample_is_lost(speeds, n, per):
    blocks = per * len(speeds)
    sizes = sizes_by_speed(n, blocks, speeds)
    assert sum(sizes) == n
    for worker, speed in enumerate(speeds):
        share = sizes[worker :: len(speeds)]
        assert abs(sum(share) - n * speed / sum(speeds)) < 1
        assert max(share) - min(share) <= 1


@pytest.mark.parametrize("name", ["iid", "by_order"])
@pytest.mark.parametrize("shuffle", ["none", "in_block", "global"])
def test_every_row_is_trained_once_an_epoch_in_batches_by_speed(name, shuffle):
    plan = plan_of(240, [1.0, 0.5, 0.5], name, shuffle=shuffle)
    for epoch in range(2):
        rows = sorted(row for worker in range(3) for row in plan.indices(epoch, worker))
        assert rows == list(range(240))
        assert plan.shard_sizes(epoch).tolist() == [120, 60, 60]
        sizes = plan.batch_sizes(epoch)
        assert sizes.shape == (3, 5)  # 240 rows by 3 x 16
        assert (sizes[0] == 24).all()
        assert (sizes[1:] == 12).all()


@settings(deadline=None)
@given(
    speeds=st.lists(st.floats(0.2, 1.0), min_size=2, max_size=6),
    n=st.integers(200, 500),
    batch=st.integers(6, 40),
)
def test_steps_and_their_samples_are_those_without_balance(speeds, n, batch):
    """S = ceil(n / K b) whatever the speeds; a step has 1/S of each worker's rows, within one."""
    partition = Component(name="iid", options={"balance": "speed"})
    balanced = BatchPlan(
        n,
        len(speeds),
        seed=1,
        batch_per_worker=batch,
        partition=partition,
        speeds=speeds,
    )
    alike = BatchPlan(
        n,
        len(speeds),
        seed=1,
        batch_per_worker=batch,
        partition=partition,
        speeds=[1.0] * len(speeds),
    )
    assert balanced.steps(0) == alike.steps(0) == -(-n // (len(speeds) * batch))
    assert balanced.batch_sizes(0).sum() == n
    step = n / balanced.steps(0)
    assert (abs(balanced.batch_sizes(0).sum(axis=0) - step) < len(speeds)).all()
    assert (
        abs(balanced.batch_sizes(0) - step * balanced.shard_sizes(0)[:, None] / n) < 1
    ).all()
    assert balanced.batch_size == balanced.batch_sizes(0).max()


def test_note_says_that_equal_speeds_are_not_balanced():
    assert plan_of(240, [1.0, 0.5, 0.5]).notes == []
    (note,) = plan_of(240, [1.0, 1.0]).notes
    assert together(note, "balance: speed", "virtual.slowdown")
    with pytest.raises(
        DataError,
        match=naming("slowest worker", "2 samples", "8 steps", "larger batch"),
    ):
        plan_of(240, [1.0, 0.01])


def test_equal_speeds_give_the_plan_without_balance():
    plain = BatchPlan(97, 4, seed=1, batch_per_worker=16)
    balanced = plan_of(97, [0.3] * 4)
    assert balanced.shard_sizes(0).sum() == 97
    assert sorted(balanced.shard_sizes(0)) == sorted(plain.shard_sizes(0))


def test_balanced_workers_do_not_wait_and_gradients_stay_weighted_by_samples(
    make_run, blobs, machine
):
    """Workers 1 and 2 are half and a third as fast; a step takes time in proportion to its samples."""
    linear = [
        BatchTimes(
            samples=n,
            data_s=[n * 1e-6],
            forward_s=[n * 3e-5],
            backward_s=[n * 6e-5],
            update_s=[1e-7],
        )
        for n in (1, 96)
    ]
    table = StepTable(
        source="test",
        busy_workers=2,
        batches=linear,
        shuffle_s_per_sample=0.0,
        jitter=[],
    )
    proportional = type(machine)(machine.cluster, machine.engines, [table])
    options = {
        "epochs": 3,
        "batch_global": 96,
        "optimizer": "sgd",
        "virtual": {"slowdown": {1: 2.0, 2: 3.0}},
    }
    found = {}
    for partition in ("iid", BALANCED):
        outcome, weights = simulate(
            make_run("allreduce", 3, partition=partition, **options),
            blobs,
            proportional,
        )
        found[str(partition)] = outcome, weights["final"]
    equal, balanced = found["iid"][0], found[str(BALANCED)][0]
    waiting = [
        sum(worker.wait_s for worker in outcome.workers)
        for outcome in (equal, balanced)
    ]
    assert waiting[1] < 0.05 * waiting[0]
    # 96/(1 + 1/2 + 1/3) against 3 x 96/3
    assert balanced.workers[0].train_s < 0.65 * equal.workers[0].train_s
    # A full-batch step averages over all samples on any worker.
    torch.testing.assert_close(
        found["iid"][1], found[str(BALANCED)][1], atol=1e-12, rtol=0
    )


def test_impossible_balance_is_refused():
    with pytest.raises(
        DataError,
        match=naming("balance: speed", "shuffle: in_block"),
    ):
        plan_of(90, [1.0, 0.5], shuffle="rotate_blocks")
    with pytest.raises(
        DataError,
        match=r"leaves worker 1, 0.001 times as fast .* 0 samples for 1 block",
    ):
        plan_of(90, [1.0, 0.001])
