"""The order of asynchronous merges: its effect on each worker, and its record."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.strategies import registry
from scalebench.strategies.epoch_async import final_weights, merge_order


def test_the_order_is_read_from_each_workers_places():
    assert merge_order([[0, 5], [2, 3], [1, 4]]) == [0, 2, 1, 1, 2, 0]
    assert merge_order([[], []]) == []


@given(workers=st.integers(1, 8), weight=st.floats(0.05, 1.0), seed=st.integers(0, 9))
def test_one_round_is_the_closed_form(workers, weight, seed):
    """The p-th merger's share of g_q is a (1 - a)^(q - p) for q >= p; every replica took g as it merged."""
    order = np.random.default_rng(seed).permutation(workers).tolist()
    found = final_weights(order, workers, 1, 1, weight)
    for place, worker in enumerate(order):
        shares = [
            weight * (1 - weight) ** (later - place) for later in range(place, workers)
        ]
        assert found[worker] == pytest.approx(sum(shares) / workers, abs=1e-12)


@given(
    workers=st.integers(1, 5), rounds=st.integers(0, 6), every=st.integers(1, 3), rest=st.integers(0, 2),
    weight=st.sampled_from([0.5, 0.2]), seed=st.integers(0, 9),
)  # fmt: skip
def test_weights_predict_where_constant_updates_lead(
    workers, rounds, every, rest, weight, seed
):
    """Workers that move by the same vector in every epoch: the final model is known without following it."""
    rest = min(rest, every - 1)
    epochs = rounds * every + rest
    if not epochs:
        return
    random = np.random.default_rng(seed)
    order = random.permutation(np.repeat(np.arange(workers), rounds)).tolist()
    move = random.standard_normal((workers, 3))
    common, mine = np.zeros(3), np.zeros((workers, 3))
    for worker in order:
        mine[worker] += every * move[worker]
        common = (1 - weight) * common + weight * mine[worker]
        mine[worker] = common
    mine += rest * move
    found = np.array(final_weights(order, workers, epochs, every, weight))
    np.testing.assert_allclose(epochs * found @ move, mine.mean(axis=0), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "merge"), [("epoch_async", "half"), ("epoch_async", "inverse_k")]
)
def test_order_staleness_and_weights_of_a_run(play, name, merge):
    """Worker 0 is twice as slow: the others merge meanwhile, and its own merges are the stale ones."""
    outcome, _ = play(
        {name: {"merge": merge}},
        3,
        epochs=6,
        virtual={"slowdown": {0: 2.0}, "jitter": "none", "ties": "rank"},
    )
    places = [
        sorted(map(int, worker.histograms["merge_position"]))
        for worker in outcome.workers
    ]
    order = merge_order(places)
    assert sorted(np.concatenate(places).tolist()) == list(range(18))
    assert order[-1] == 0
    for worker, report in enumerate(outcome.workers):
        counted = np.diff([-1, *places[worker]]) - 1
        assert sum(report.histograms["staleness"].values()) == 6
        assert [epoch.max_staleness for epoch in report.epochs] == counted.tolist()
    first = [epoch.mean_staleness for epoch in outcome.workers[0].epochs]
    assert max(first[:3]) >= 3  # two others, two merges each
    strategy = registry.create(name, {"merge": merge})
    found = strategy.final_weights(places, 6, [1, 1, 1])
    assert found == final_weights(order, 3, 6, 1, 0.5 if merge == "half" else 1 / 3)
    assert sum(found) < 1


def test_a_lone_worker_loses_half_of_its_training_to_the_initial_weights_in_half_only(
    play,
):
    """epoch_async at one worker is not serial where the merge halves."""
    for merge, weight in (("half", 0.5), ("inverse_k", 1.0)):
        strategy = registry.create("epoch_async", {"merge": merge})
        assert strategy.final_weights([[0]], 1, [1]) == [weight]
    _, serial = play("serial", 1, epochs=3)
    _, merged = play({"epoch_async": {"merge": "inverse_k"}}, 1, epochs=3)
    assert (serial["final"] - merged["final"]).abs().max() < 1e-12
