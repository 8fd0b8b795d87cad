"""Replay of runs for their times, without arithmetic."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from scalebench.pricing.price import NotLockStepError
from scalebench.strategies import registry
from scalebench.virtual.engine import alike, replay, replays, simulate, simulate_alike
from scalebench.virtual.replay import Trace

BASELINES = ["allreduce", "horovod", "ddp"]
VIRTUAL = {"jitter": "lognormal", "slowdown": {1: 1.3}}


def numbers(report):
    """All numbers of a report and its epochs by name; sums in another order differ in their last bits."""
    epochs = {f"{epoch.epoch} {key}": value for epoch in report.epochs for key, value in asdict(epoch).items()}
    return {key: value for key, value in (asdict(report) | epochs).items() if isinstance(value, int | float)}


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_replay_equals_a_computed_run(make_run, blobs, machine, workers):
    names = ["serial", *BASELINES, "epoch_average"] if workers == 1 else BASELINES
    runs = [make_run(name, workers, run_id=name, epochs=3, virtual=VIRTUAL) for name in names]
    assert len({alike(run) for run in runs}) == 1
    for run, outcome, weights in simulate_alike(runs, blobs, machine):
        alone, alone_weights = simulate(run, blobs, machine)
        assert torch.equal(weights["final"], alone_weights["final"])
        for report, expected in zip(outcome.workers, alone.workers, strict=True):
            report.peak_rss_mib = expected.peak_rss_mib = None
            assert numbers(report) == pytest.approx(numbers(expected), rel=1e-9, abs=1e-15)
        assert [each.metric for each in outcome.evaluations] == [each.metric for each in alone.evaluations]
        assert outcome.facts == alone.facts
        assert outcome.run_id == run.run_id


def test_runs_with_equal_arithmetic_share_it(make_run):
    def key(strategy, workers=2, **values):
        return alike(make_run(strategy, workers, run_id=f"{strategy} {workers} {values}", **values))

    assert key("allreduce") == key("ddp") == key("horovod")
    assert key({"horovod": {"compression": "fp16"}}) != key("horovod")
    assert key("allreduce", seed=4) != key("ddp", seed=5)
    assert key("allreduce", 2) != key("ddp", 3)
    assert key("epoch_average") != key("allreduce")
    assert key("epoch_async", 1) != key("serial", 1)
    assert key("allreduce", shuffle="global") != key("ddp", shuffle="global")


def test_failure_applies_to_all_runs_with_equal_arithmetic(make_run, blobs, machine):
    runs = [make_run(name, 2, run_id=name, lr=1e30, dtype="float32") for name in BASELINES]
    outcomes = [outcome for _, outcome, _ in simulate_alike(runs, blobs, machine)]
    assert [outcome.status for outcome in outcomes] == ["diverged"] * 3
    assert [outcome.run_id for outcome in outcomes] == BASELINES


DEPENDS_ON_TIME = {"ad_psgd", "asp", "bsp_backup", "dislib-compat-async", "dssp", "elastic_bsp", "epoch_async", "ssp"}
FALLS_BACK = {  # computed again where another strategy is replayed
    "bsp": "its server keeps the model",
}


@pytest.mark.parametrize("name", registry.names())
def test_strategy_is_replayed_or_refuses(make_run, blobs, machine, name):
    workers = 1 if name == "serial" else 4
    slowdown = {} if name == "serial" else {1: 1.3}
    run = make_run(name, workers, virtual={"jitter": "lognormal", "slowdown": slowdown})
    assert replays(run) == (name not in DEPENDS_ON_TIME)
    if not replays(run):
        return
    computed, _ = simulate(run, blobs, machine)
    assert computed.status == "completed", computed.error
    if name in FALLS_BACK:
        with pytest.raises((NotLockStepError, RuntimeError)):
            replay(run, blobs, machine, Trace.of(computed))
        return
    found = replay(run, blobs, machine, Trace.of(computed))
    for report, expected in zip(found.workers, computed.workers, strict=True):
        report.peak_rss_mib = expected.peak_rss_mib = None
        assert numbers(report) == pytest.approx(numbers(expected), rel=1e-9, abs=1e-15)
    assert [each.metric for each in found.evaluations] == [each.metric for each in computed.evaluations]
    assert found.facts == computed.facts
    slower = replace(machine, tables=[table.scaled(2.0) for table in machine.tables])
    twice = replay(run, blobs, slower, Trace.of(computed))
    for report, before in zip(twice.workers, found.workers, strict=True):
        assert (report.syncs, report.bytes_sent) == (before.syncs, before.bytes_sent)
        assert report.compute_s == pytest.approx(2 * before.compute_s)
