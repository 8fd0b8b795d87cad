"""Averaged state, optimizer state, weighting and the partial interval at the end: options of every averaging strategy.

The model has BatchNorm, so that there are buffers; partitions are uneven, so that
weights differ.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from scalebench.pricing.machine import Choice
from scalebench.records.rows import rows_of
from scalebench.strategies import registry, replica_state
from scalebench.strategies.averaging import Averaging
from scalebench.strategies.registry import options_of
from scalebench.training.loop import evaluate
from scalebench.training.replica import Replica
from scalebench.virtual import engine

MODEL = f"{Path(__file__).parent / 'models' / 'normalised.py'}:build"
POLICIES = ("buffers", "optimizer_state", "weighting", "trailing")
AVERAGING = sorted(
    name for name in registry.names() if issubclass(registry.find(name), Averaging)
)
WORKERS, ALONE = (
    3,
    {"local_sgd": {"steps": 10_000, "buffers": "keep", "trailing": "leave"}},
)
UNEVEN = {
    "model": MODEL, "partition": {"dirichlet": {"alpha": 2}}, "optimizer": {"sgd": {"momentum": 0.9}}, "epochs": 3,
    "virtual": {"ties": "rank", "jitter": "none"},
}  # fmt: skip
# One synchronisation, at the very end: what it makes of replicas that trained alone is
# known.
ONCE = {
    "local_sgd": {"steps": 10_000},
    "post_local_sgd": {"start": 0, "steps": 10_000},
    "hierarchical_local_sgd": {"groups": {4: 10_000}},
    "epoch_average": {"every": 9},
    "epoch_average-master": {"every": 9, "aggregation": "master"},
    "fedavg": {"local_epochs": 9, "optimizer_state": "keep", "weighting": "uniform"},
    "slowmo": {"steps": 10_000, "slow_momentum": 0.0},
    "bmuf": {"steps": 10_000, "block_momentum": 0.0},
    "diloco": {"steps": 10_000, "outer_momentum": 0.0, "outer_lr": 1.0},
    "streaming_diloco": {
        "steps": 10_000,
        "fragments": 1,
        "outer_momentum": 0.0,
        "outer_lr": 1.0,
    },
    "sparse_loco": {"steps": 10_000, "keep": 1.0, "bits": 32},
    "gossip": {"every": 10_000},
    "ad_psgd": {"every": 10_000},
}


@pytest.fixture
def replicas(monkeypatch, play):
    """`replicas(strategy, workers, ...)`: the workers of a virtual run as training left them."""

    def of(strategy, workers=WORKERS, **values):
        made = []

        class Kept(Replica):
            def __init__(self, *arguments, **options):
                super().__init__(*arguments, **options)
                made.append(self)

        # gradients replica by replica
        monkeypatch.setattr(engine, "choose", lambda *_: Choice())
        monkeypatch.setattr(engine, "Replica", Kept)
        monkeypatch.setattr(
            engine, "evaluate", lambda *arguments: engine.EvaluationResult([], None)
        )
        play(strategy, workers, **{**UNEVEN, **values})
        return made

    return of


def weights_of(made):
    return np.stack([replica.parameters.detach().numpy() for replica in made])


def buffers_of(made):
    return np.stack(
        [
            torch.cat(
                [b for b in replica.model.buffers() if b.is_floating_point()]
            ).numpy()
            for replica in made
        ]
    )


def momenta_of(made):
    return np.stack(
        [
            next(iter(replica.optimizer.state.values()))["momentum_buffer"].numpy()
            for replica in made
        ]
    )


@pytest.mark.parametrize("name", AVERAGING)
def test_every_averaging_strategy_states_its_policies(name, make_run):
    known = {option.name: option for option in options_of(registry.find(name))}
    assert set(POLICIES) <= set(known)
    assert all(
        known[policy].description and known[policy].allowed for policy in POLICIES
    )
    assert known["buffers"].default == (
        "keep" if name.startswith("dislib") else "average"
    )


@pytest.mark.parametrize(
    ("name", "options", "policy"),
    [
        ("bsp", {}, "mean of the round"),
        ("ssp", {}, "each push at once"),
        ("asp", {"scale": "sum"}, "each push at once, scale sum"),
        ("elastic_bsp", {"scale": "sum"}, "each push at once, scale sum"),
        ("ssp", {"staleness": 0}, "mean of the round"),
        ("ssp", {"staleness": 0, "scale": "sum"}, "sum of the round"),
        ("dssp", {"lower": 0, "upper": 0}, "mean of the round"),
        ("dssp", {"lower": 0, "upper": 1}, "each push at once"),
    ],
)
def test_merge_policy_of_servers_distinguishes_rounds_from_pushes_and_sums_from_means(
    name, options, policy
):
    assert registry.create(name, options).synchronisation.merge == policy


def test_rows_hold_the_policies_of_their_run(make_run, play):
    def row(strategy):
        outcome, _ = play(strategy, 4)
        facts = {
            "attempt": 1,
            "oversubscribed": False,
            "started_utc": "",
            "provenance": {},
        }
        return rows_of(make_run(strategy, 4), outcome, **facts)[0]

    default = row("easgd")
    assert (
        default.averaged_state,
        default.optimizer_state_policy,
        default.merge_policy,
    ) == ("parameters+buffers", "keep", "elastic")
    chosen = {
        "buffers": "keep",
        "optimizer_state": "average",
        "weighting": "samples",
        "trailing": "leave",
    }
    for name, merge in [
        ("epoch_average", "mean"),
        ("gossip", "ring mean"),
        ("bmuf", "block momentum"),
    ]:
        other = row({name: chosen})
        assert (other.averaged_state, other.optimizer_state_policy) == (
            "parameters+optimizer",
            "average",
        )
        assert other.merge_policy == f"{merge} by samples, partial interval left"
    assert (
        row({"epoch_async": {"trailing": "synchronise"}}).merge_policy
        == "half, partial interval merged"
    )
    assert row({"fedavg": {}}).merge_policy == "mean of a sample by samples"


@pytest.mark.parametrize("case", ONCE)
def test_final_average_is_the_mean_of_replicas_that_trained_alone(case, replicas):
    """Parameters, buffers and momentum: each is the (weighted) mean of the isolated ones, or stays what it was."""
    name = case.partition("-")[0]
    alone = replicas(ALONE)
    samples = np.array([replica.samples for replica in alone], dtype=float)
    assert len(set(samples)) > 1
    for weighting, weight in (("uniform", None), ("samples", samples)):
        made = replicas(
            {
                name: {
                    **ONCE[case],
                    "weighting": weighting,
                    "optimizer_state": "average",
                    "buffers": "average",
                }
            }
        )
        for found, isolated in zip(
            (weights_of(made), buffers_of(made), momenta_of(made)),
            (weights_of(alone), buffers_of(alone), momenta_of(alone)),
            strict=True,
        ):
            np.testing.assert_allclose(
                found,
                np.tile(np.average(isolated, 0, weight), (WORKERS, 1)),
                atol=1e-12,
            )
    kept = replicas(
        {name: {**ONCE[case], "buffers": "keep", "optimizer_state": "keep"}}
    )
    np.testing.assert_array_equal(buffers_of(kept), buffers_of(alone))
    np.testing.assert_array_equal(momenta_of(kept), momenta_of(alone))
    forgot = replicas({name: {**ONCE[case], "optimizer_state": "reset"}})
    assert all(not replica.optimizer.state for replica in forgot)


@pytest.mark.parametrize("case", ONCE)
def test_a_partial_interval_can_be_left_as_it_is(case, replicas, play):
    name = case.partition("-")[0]
    alone, left = replicas(ALONE), replicas({name: {**ONCE[case], "trailing": "leave"}})
    np.testing.assert_array_equal(weights_of(left), weights_of(alone))
    np.testing.assert_array_equal(buffers_of(left), buffers_of(alone))


@pytest.mark.parametrize("name", ["local_sgd", "epoch_average"])
def test_consensus_after_a_partial_interval_without_average(name, play, replicas):
    """The weighted mean of the replicas, which `consensus` forms outside training; statistics included."""
    options = {**ONCE[name], "trailing": "leave", "weighting": "samples"}
    left, weights = play({name: options}, WORKERS, **UNEVEN)
    agreed, same = play(
        {name: {**options, "trailing": "synchronise"}}, WORKERS, **UNEVEN
    )
    np.testing.assert_allclose(weights["final"], same["final"], atol=1e-12)
    assert left.evaluations[-1].metric == agreed.evaluations[-1].metric
    assert left.workers[0].syncs == agreed.workers[0].syncs - 1


def test_easgd_draws_to_the_centre_by_samples(replicas):
    """One exchange: w_i - a (w_i - w0) each; the centre, which ends training, w0 + a K sum_i n_i (w_i - w0) / N."""
    alone = replicas(ALONE)
    initial, samples = (
        alone[0].initial.numpy(),
        np.array([replica.samples for replica in alone], dtype=float),
    )
    for weighting, weight in (("uniform", None), ("samples", samples)):
        made = replicas(
            {"easgd": {"steps": 10_000, "alpha": 0.2, "weighting": weighting}}
        )
        centre = initial + 0.2 * WORKERS * np.average(
            weights_of(alone) - initial, 0, weight
        )
        np.testing.assert_allclose(
            weights_of(made), np.tile(centre, (WORKERS, 1)), atol=1e-12
        )
        expected = np.tile(np.average(buffers_of(alone), 0, weight), (WORKERS, 1))
        np.testing.assert_allclose(buffers_of(made), expected, atol=1e-12)
    left = replicas({"easgd": {"steps": 10_000, "trailing": "leave"}})
    # nothing was ever exchanged
    np.testing.assert_array_equal(weights_of(left), np.tile(initial, (WORKERS, 1)))


@pytest.mark.parametrize("merge", ["half", "inverse_k"])
def test_asynchronous_merges_carry_buffers_and_momentum(merge, replicas):
    """One merge each, in order of rank (of equal speed), then the mean; written out with numpy."""
    alone = replicas(ALONE)
    samples = np.array([replica.samples for replica in alone], dtype=float)
    for weighting, weight in (("uniform", np.ones(WORKERS)), ("samples", samples)):
        options = {
            "every": 3,
            "merge": merge,
            "weighting": weighting,
            "optimizer_state": "average",
        }
        made = replicas({"epoch_async": options})
        order = np.argsort(
            [
                min(map(int, replica.meters.histograms["merge_position"]))
                for replica in made
            ]
        )
        shares = np.full(WORKERS, 0.5) if merge == "half" else weight / weight.sum()
        starts = (
            made[0].initial.numpy(),
            np.array([0.0] * 5 + [1.0] * 5),
            np.zeros(made[0].initial.numel()),
        )
        for start, found, isolated in zip(
            starts, (weights_of(made), buffers_of(made), momenta_of(made)),
            (weights_of(alone), buffers_of(alone), momenta_of(alone)), strict=True,
        ):  # fmt: skip
            shared, merged = start, np.empty_like(isolated)
            for worker in order:
                shared = shared + shares[worker] * (isolated[worker] - shared)
                merged[worker] = shared
            np.testing.assert_allclose(
                found, np.tile(np.average(merged, 0, weight), (WORKERS, 1)), atol=1e-12
            )


def test_a_partial_interval_of_asynchronous_merges(play):
    """every = 2 of 3 epochs: the paper leaves the third to the final mean; merged, it has a place in the order."""
    paper, _ = play({"epoch_async": {"every": 2}}, WORKERS, **UNEVEN)
    merged, _ = play(
        {"epoch_async": {"every": 2, "trailing": "synchronise"}}, WORKERS, **UNEVEN
    )
    counted = [
        sorted(len(worker.histograms["merge_position"]) for worker in each.workers)
        for each in (paper, merged)
    ]
    assert counted == [[1] * WORKERS, [2] * WORKERS]
    assert sorted(evaluation.epoch for evaluation in merged.evaluations) == [1, 2]


def test_statistics_are_averaged_for_evaluation_while_averaged_gradients_keep_the_weights_equal(
    replicas, play, monkeypatch
):
    ended = buffers_of(replicas({"post_local_sgd": {"start": 99}}))
    assert np.ptp(ended, axis=0).max() > 1e-3
    seen = {}

    def looking(replica, *arguments):
        verdict = evaluate(replica, *arguments)
        seen[replica.rank] = buffers_of([replica])[0]
        return verdict

    monkeypatch.setattr(engine, "evaluate", looking)
    play({"post_local_sgd": {"start": 99}}, WORKERS, **UNEVEN)
    np.testing.assert_allclose(seen[0], ended.mean(axis=0), atol=1e-12, rtol=0)
    play({"post_local_sgd": {"start": 99, "buffers": "keep"}}, WORKERS, **UNEVEN)
    np.testing.assert_array_equal(seen[0], ended[0])


def test_daso_carries_the_statistics_with_the_parameters(replicas):
    """Two nodes of two: after the blocking sum that ends each epoch all hold the same statistics and momentum."""
    daso = {"devices_per_node": 2, "global_skip": 3, "wait": 1}
    even = {"partition": "iid"}
    agreed = replicas({"daso-fixed": {**daso, "optimizer_state": "average"}}, 4, **even)
    for found in (weights_of(agreed), buffers_of(agreed), momenta_of(agreed)):
        assert np.ptp(found, axis=0).max() == 0
    kept = replicas({"daso-fixed": {**daso, "buffers": "keep"}}, 4, **even)
    assert np.ptp(buffers_of(kept), axis=0).max() > 0
    np.testing.assert_array_equal(
        weights_of(kept), weights_of(replicas({"daso-fixed": daso}, 4, **even))
    )
    # shards of one size
    alike = replicas({"daso-fixed": {**daso, "weighting": "samples"}}, 4, **even)
    np.testing.assert_allclose(weights_of(alike), weights_of(kept), atol=1e-12)
    uneven = [
        replicas({"daso-fixed": {**daso, "weighting": weighting}}, 4)
        for weighting in ("uniform", "samples")
    ]
    assert np.abs(weights_of(uneven[0]) - weights_of(uneven[1])).max() > 1e-6


def test_a_client_that_was_not_chosen_takes_the_others_momentum(replicas):
    """fraction 1/3 of 3: one client trains in the only round; all leave it with its weights, statistics, momentum."""
    made = replicas({"fedavg": {"fraction": 0.34, "local_epochs": 3, "optimizer_state": "average"}},
                    optimizer={"adam": {}})  # fmt: skip
    (trained,) = [replica.rank for replica in made if replica.steps]
    states = [next(iter(replica.optimizer.state.values())) for replica in made]
    assert float(states[trained]["step"]) == made[trained].steps > 0
    for state in states:
        for name, value in states[trained].items():
            torch.testing.assert_close(state[name], value)
    assert np.ptp(buffers_of(made), axis=0).max() < 1e-12


def test_an_epoch_is_evaluated_with_the_statistics_of_its_own_end(play):
    """Training on does not change how an earlier epoch is judged."""
    short, _ = play("epoch_average", 2, **{**UNEVEN, "epochs": 2})
    long, _ = play("epoch_average", 2, **{**UNEVEN, "epochs": 6, "lr": 0.1})
    assert [each.metric for each in long.evaluations[:2]] == [
        each.metric for each in short.evaluations
    ]


OPTIONS = {
    "daso-heat": {"devices_per_node": 2, "warm_up_epochs": 1, "cool_down_epochs": 1},
    "daso-fixed": {"devices_per_node": 2, "cool_down_epochs": 1},
    "hierarchical_local_sgd": {"groups": {2: 2, 4: 5}},
    "fedavg": {"local_epochs": 2},
    "epoch_async": {"every": 2},
    "epoch_average": {"every": 2, "aggregation": "master"},
}


@pytest.mark.parametrize("trailing", ["synchronise", "leave"])
@pytest.mark.parametrize(
    "name", [name for name in AVERAGING if not name.startswith("dislib")]
)
def test_runs_send_what_their_program_records(name, trailing, play, recorded):
    """Parameters, 10 statistics and as much momentum as parameters; by samples some send their weight along."""
    if name.startswith("daso") and trailing == "leave":
        pytest.skip("not applicable: its epochs end with a blocking sum")
    policies = {
        "optimizer_state": "average",
        "weighting": "samples",
        "trailing": trailing,
    }
    strategy = registry.create(name, {**OPTIONS.get(name, {}), **policies}, "virtual")
    outcome, _ = play({name: strategy.model_dump()}, 4, **UNEVEN)
    schedules = recorded({name: strategy.model_dump()}, 4, **UNEVEN)
    assert len(schedules) == 4
    for worker, schedule in zip(outcome.workers, schedules, strict=True):
        assert schedule.syncs > 0
        assert (worker.syncs, worker.bytes_sent) == (
            schedule.syncs,
            schedule.bytes_sent,
        )


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_large_state_is_averaged_in_place_and_counted_alike(
    play, monkeypatch, weighting
):
    """Apart from the vector of what is small: the same weights bit for bit, the same bytes, the same time."""
    options = {
        "local_sgd": {"steps": 3, "optimizer_state": "average", "weighting": weighting}
    }
    values = {**UNEVEN, "optimizer": "adam", "lr": 0.01}
    together, expected = play(options, WORKERS, **values)
    joined, plain = [], replica_state.packed

    def noted(tensors, *dtype):
        joined.append(tensors)
        return plain(tensors, *dtype)

    monkeypatch.setattr(replica_state, "packed", noted)
    monkeypatch.setattr(replica_state, "LARGE", 100)
    apart, found = play(options, WORKERS, **values)
    smaller = [len(tensors) for tensors in joined]
    assert len(smaller) > WORKERS
    # Adam's counter; neither weights, beside which the statistics lie, nor moments
    assert set(smaller) == {1}
    assert torch.equal(found["final"], expected["final"])
    for mine, other in zip(apart.workers, together.workers, strict=True):
        assert (mine.syncs, mine.bytes_sent, mine.train_s) == (
            other.syncs,
            other.bytes_sent,
            other.train_s,
        )
