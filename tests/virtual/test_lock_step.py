"""Times of runs whose arithmetic is known."""

from __future__ import annotations

from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import torch

from scalebench.pricing.price import NotLockStepError
from scalebench.strategies import registry
from scalebench.virtual import lock_step
from scalebench.virtual.engine import simulate
from scalebench.virtual.lock_step import Trace, is_lock_step, time
from scalebench.virtual.pool import alike, simulate_alike

BASELINES = ["allreduce", "horovod", "ddp"]
VIRTUAL = {"jitter": "lognormal", "slowdown": {1: 1.3}}


def numbers(report):
    """All numbers of a report and its epochs by name; sums in another order differ in their last bits."""
    epochs = {
        f"{epoch.epoch} {key}": value
        for epoch in report.epochs
        for key, value in asdict(epoch).items()
    }
    return {
        key: value
        for key, value in (asdict(report) | epochs).items()
        if isinstance(value, int | float)
    }


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_time_of_a_schedule_equals_a_computed_run(make_run, blobs, machine, workers):
    names = ["serial", *BASELINES, "epoch_average"] if workers == 1 else BASELINES
    runs = [
        make_run(name, workers, run_id=name, epochs=3, virtual=VIRTUAL)
        for name in names
    ]
    assert len({alike(run) for run in runs}) == 1
    for run, outcome, weights in simulate_alike(runs, blobs, machine):
        alone, alone_weights = simulate(run, blobs, machine)
        # one replica for all sums in another order
        differ = 0 if workers == 1 else 1e-12
        assert torch.allclose(
            weights["final"], alone_weights["final"], rtol=0, atol=differ
        )
        for report, expected in zip(outcome.workers, alone.workers, strict=True):
            report.peak_rss_mib = expected.peak_rss_mib = None
            assert numbers(report) == pytest.approx(
                numbers(expected), rel=1e-9, abs=1e-15
            )
        assert [each.metric for each in outcome.evaluations] == [
            each.metric for each in alone.evaluations
        ]
        how = {"arithmetic": None, "why_single": ""}  # gradients were computed
        assert replace(outcome.facts, **how) == replace(alone.facts, **how)
        assert outcome.run_id == run.run_id


@pytest.mark.parametrize(
    ("strategy", "recordings"),
    [("ddp", 1), ("epoch_average", 1), ("epoch_async", None)],
    ids=["with its time", "after its events", "not known, as order depends on time"],
)
def test_time_without_jitter_is_that_of_the_run_without_it(
    make_run, blobs, machine, monkeypatch, strategy, recordings
):
    recorded = Mock(wraps=lock_step.record_each)
    monkeypatch.setattr(lock_step, "record_each", recorded)
    run = make_run(strategy, 4, virtual=VIRTUAL, also_without_jitter=True)
    ((_, outcome, _),) = simulate_alike([run], blobs, machine)
    steady, _ = simulate(
        make_run(strategy, 4, virtual=VIRTUAL | {"jitter": "none"}), blobs, machine
    )
    known = outcome.facts.train_s_no_jitter
    assert known == (pytest.approx(steady.train_s, rel=1e-12) if recordings else None)
    assert recorded.call_count == (recordings or 0)


def test_runs_with_equal_arithmetic_share_it(make_run):
    def key(strategy, workers=2, **values):
        return alike(
            make_run(
                strategy, workers, run_id=f"{strategy} {workers} {values}", **values
            )
        )

    assert key("allreduce") == key("ddp") == key("horovod")
    assert key({"horovod": {"compression": "fp16"}}) != key("horovod")
    assert key("allreduce", seed=4) != key("ddp", seed=5)
    assert key("allreduce", 2) != key("ddp", 3)
    assert key("epoch_average") != key("allreduce")
    assert key("epoch_async", 1) != key("serial", 1)
    assert key("allreduce", shuffle="global") != key("ddp", shuffle="global")


def test_failure_applies_to_all_runs_with_equal_arithmetic(make_run, blobs, machine):
    runs = [
        make_run(name, 2, run_id=name, lr=1e30, dtype="float32") for name in BASELINES
    ]
    outcomes = [outcome for _, outcome, _ in simulate_alike(runs, blobs, machine)]
    assert [outcome.status for outcome in outcomes] == ["diverged"] * 3
    assert [outcome.run_id for outcome in outcomes] == BASELINES


@pytest.mark.parametrize(
    ("strategy", "partition", "recordings"),
    [
        ("epoch_average", "iid", 1),
        ("horovod", "iid", 1),
        ("gossip", "iid", 4),  # partners are drawn
        ("epoch_average", {"dirichlet": {"alpha": 5.0}}, 4),  # shards are drawn
    ],
    ids=["average", "horovod", "drawn partners", "drawn shards"],
)
def test_repetitions_share_schedules_that_do_not_depend_on_the_seed(
    make_run, blobs, machine, monkeypatch, strategy, partition, recordings
):
    virtual = VIRTUAL | {
        "slow_windows": [{"rank": 0, "from_s": 0.0, "until_s": 0.01, "factor": 2.0}]
    }
    runs = [
        make_run(
            strategy,
            4,
            run_id=str(seed),
            seed=seed,
            repetition=seed,
            partition=partition,
            virtual=virtual,
        )
        for seed in range(3)
    ]
    traces = [Trace.untrained(run) for run in runs]
    recorded = Mock(wraps=lock_step.record_each)
    monkeypatch.setattr(lock_step, "record_each", recorded)
    together = time(runs, blobs, machine, traces)
    assert recorded.call_count == recordings
    assert len({outcome.train_s for outcome in together}) == 3
    for run, outcome in zip(runs, together, strict=True):
        (alone,) = time([run], blobs, machine, [Trace.untrained(run)])
        assert outcome.run_id == run.run_id
        for report, expected in zip(outcome.workers, alone.workers, strict=True):
            report.peak_rss_mib = expected.peak_rss_mib = None
            assert numbers(report) == pytest.approx(
                numbers(expected), rel=1e-12, abs=1e-15
            )


def test_schedule_that_sends_other_bytes_than_the_trace_is_refused(
    make_run, blobs, machine
):
    run = make_run("epoch_average", 4)
    computed, _ = simulate(run, blobs, machine)
    sent = computed.workers[0].syncs, computed.workers[0].bytes_sent + 8
    with pytest.raises(NotLockStepError, match="other bytes"):
        time([run], blobs, machine, [replace(Trace.of(computed), sent=sent)])


DEPENDS_ON_TIME = {
    "ad_psgd",
    "asp",
    "bsp_backup",
    "dislib-compat-async",
    "dssp",
    "elastic_bsp",
    "epoch_async",
    "ssp",
}
DEPENDS_ON_TIME |= {"adaptive"}  # in its layout, not in its weights
FALLS_BACK = {  # computed again where another strategy is timed
    "bsp": "its server keeps the model",
}


@pytest.mark.parametrize("name", registry.names())
def test_strategy_is_timed_or_refuses(make_run, blobs, machine, name):
    workers = 1 if name == "serial" else 4
    slowdown = {} if name == "serial" else {1: 1.3}
    run = make_run(name, workers, virtual={"jitter": "lognormal", "slowdown": slowdown})
    assert is_lock_step(run) == (name not in DEPENDS_ON_TIME)
    if not is_lock_step(run):
        return
    computed, _ = simulate(run, blobs, machine)
    assert computed.status == "completed", computed.error
    if name in FALLS_BACK:
        with pytest.raises((NotLockStepError, RuntimeError)):
            time([run], blobs, machine, [Trace.of(computed)])
        return
    (found,) = time([run], blobs, machine, [Trace.of(computed)])
    for report, expected in zip(found.workers, computed.workers, strict=True):
        report.peak_rss_mib = expected.peak_rss_mib = None
        assert numbers(report) == pytest.approx(numbers(expected), rel=1e-9, abs=1e-15)
    assert [each.metric for each in found.evaluations] == [
        each.metric for each in computed.evaluations
    ]
    assert found.facts == computed.facts
    slower = replace(machine, tables=[table.scaled(2.0) for table in machine.tables])
    (twice,) = time([run], blobs, slower, [Trace.of(computed)])
    for report, before in zip(twice.workers, found.workers, strict=True):
        assert (report.syncs, report.bytes_sent) == (before.syncs, before.bytes_sent)
        assert report.compute_s == pytest.approx(2 * before.compute_s)
