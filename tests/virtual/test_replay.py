from __future__ import annotations

import pytest
import torch

from scalebench.virtual.engine import alike, simulate, simulate_alike

BASELINES = ["allreduce", "horovod", "ddp"]
VIRTUAL = {"jitter": "lognormal", "slowdown": {1: 1.3}}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_replay_has_the_time_and_the_numbers_of_a_run_computed_in_full(make_run, blobs, scenery, workers):
    names = ["serial", *BASELINES, "epoch_average"] if workers == 1 else BASELINES
    runs = [make_run(name, workers, run_id=name, epochs=3, virtual=VIRTUAL) for name in names]
    assert len({alike(run) for run in runs}) == 1
    for run, outcome, weights in simulate_alike(runs, blobs, scenery):
        alone, alone_weights = simulate(run, blobs, scenery)
        assert torch.equal(weights["final"], alone_weights["final"])
        for report, expected in zip(outcome.workers, alone.workers, strict=True):
            report.peak_rss_mib = expected.peak_rss_mib = None
            assert report == expected
        assert outcome.evaluations == alone.evaluations
        assert outcome.facts == alone.facts
        assert outcome.run_id == run.run_id


def test_only_what_computes_the_same_is_alike(make_run):
    def key(strategy, workers=2, **values):
        return alike(make_run(strategy, workers, run_id=f"{strategy} {workers} {values}", **values))

    assert key("allreduce") == key("ddp") == key("horovod")
    assert key({"horovod": {"compression": "fp16"}}) != key("horovod")
    assert key("allreduce", seed=4) != key("ddp", seed=5)
    assert key("allreduce", 2) != key("ddp", 3)
    assert key("epoch_average") != key("allreduce")
    assert key("epoch_async", 1) != key("serial", 1)
    assert key("allreduce", shuffle="global") != key("ddp", shuffle="global")


def test_what_fails_fails_for_all_that_are_alike(make_run, blobs, scenery):
    runs = [make_run(name, 2, run_id=name, lr=1e30, dtype="float32") for name in BASELINES]
    outcomes = [outcome for _, outcome, _ in simulate_alike(runs, blobs, scenery)]
    assert [outcome.status for outcome in outcomes] == ["diverged"] * 3
    assert [outcome.run_id for outcome in outcomes] == BASELINES
