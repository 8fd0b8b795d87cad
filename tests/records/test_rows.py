from __future__ import annotations

import json

import pytest

from scalebench.records.rows import rows_of
from scalebench.training.outcome import EpochReport, Evaluation, Outcome, WorkerReport

NOTHING = {
    "host_hash": None,
    "git_commit": None,
    "git_dirty": None,
    "packages_hash": None,
    "scheduler_job_id": None,
    "provenance": None,
}


def worker(rank: int, train_s: float, **values) -> WorkerReport:
    epochs = [
        EpochReport(
            e,
            train_s * (e + 1) / 2,
            train_s / 2,
            0.3,
            0.1,
            0.05,
            0.0,
            1.0 - 0.1 * e,
            2,
            80,
        )
        for e in (0, 1)
    ]
    parts = {
        "compute_s": 0.6,
        "comm_s": train_s - 0.7,
        "wait_s": 0.1,
        "data_s": 0.0,
        "other_s": 0.1,
        **values,
    }
    return WorkerReport(
        rank,
        train_s,
        **parts,
        optimizer_steps=10,
        syncs=4,
        bytes_sent=160,
        epochs=epochs,
    )


def convert(run, outcome, **values):
    settings = {
        "attempt": 1,
        "oversubscribed": False,
        "started_utc": "2026-01-01T00:00:00+00:00",
        **values,
    }
    return rows_of(run, outcome, provenance=NOTHING, **settings)


def test_train_s_is_the_slowest_workers_and_idle_time_is_waiting(make_run):
    outcome = Outcome(
        "test-run",
        "completed",
        "",
        [worker(0, 1.0), worker(1, 1.4)],
        [Evaluation(1, 1.4, 0.9)],
    )
    row, epochs = convert(make_run("allreduce", 2), outcome)
    assert row.train_s == 1.4
    assert row.compute_s + row.comm_s + row.data_s + row.other_s == pytest.approx(1.4)
    assert row.wait_s == pytest.approx(0.1 + 0.2)
    assert row.final_metric == 0.9
    assert [epoch.epoch_s_max for epoch in epochs] == [0.7, 0.7]
    assert [epoch.test_metric for epoch in epochs] == [None, 0.9]


def test_unmeasured_columns_are_empty(make_run):
    blank = {"compute_s": None, "comm_s": None, "wait_s": None, "other_s": None}
    outcome = Outcome(
        "test-run",
        "completed",
        "",
        [worker(0, 1.0, **blank), worker(1, 1.2, **blank)],
        [],
    )
    row, _ = convert(make_run("ddp", 2), outcome)
    assert (row.compute_s, row.comm_s, row.wait_s, row.other_s) == (
        None,
        None,
        None,
        None,
    )
    assert row.data_s == 0.0
    assert row.peak_rss_mib is None


def test_cost_is_the_time_of_the_cores_and_gpus_that_the_workers_hold(make_run):
    outcome = Outcome("test-run", "completed", "", [worker(0, 1.8), worker(1, 1.2)], [])
    row, _ = convert(make_run("allreduce", 2, threads_per_worker=4), outcome)
    assert row.cost_core_hours == pytest.approx(1.8 * 8 / 3600)
    assert row.cost_gpu_hours is None, "there are none"
    outcome.add_facts(gpus=2)
    row, _ = convert(make_run("allreduce", 2), outcome)
    assert (row.cost_core_hours, row.cost_gpu_hours) == pytest.approx(
        (1.8 * 2 / 3600, 1.8 * 2 / 3600)
    )
    failed, _ = convert(
        make_run("allreduce", 2), Outcome("test-run", "failed", "rank 1 was killed")
    )
    assert (failed.cost_core_hours, failed.cost_gpu_hours) == (None, None)


def test_failed_run_has_a_row_with_its_error(make_run):
    row, epochs = convert(
        make_run("allreduce", 2), Outcome("test-run", "failed", "rank 1 was killed")
    )
    assert (row.status, row.error, row.train_s, epochs) == (
        "failed",
        "rank 1 was killed",
        None,
        [],
    )


def test_time_to_target_is_the_first_evaluation_at_or_above_it(make_run):
    evaluations = [
        Evaluation(0, 0.5, 0.7),
        Evaluation(1, 1.0, 0.85),
        Evaluation(2, 1.5, 0.8),
    ]
    outcome = Outcome("test-run", "completed", "", [worker(0, 1.5)], evaluations)
    row, _ = convert(make_run(target_metric=0.8), outcome)
    assert (row.time_to_target_s, row.epochs_to_target, row.best_metric) == (
        1.0,
        2,
        0.85,
    )
    missed, _ = convert(make_run(target_metric=0.99), outcome)
    assert (missed.time_to_target_s, missed.target_metric) == (None, 0.99)


def test_paced_overrun_counts_as_oversubscribed(make_run):
    run = make_run(
        "allreduce", 2, execution="paced", engine="mpi", device_step_time=0.1
    )
    kept = Outcome("test-run", "completed", "", [worker(0, 1.0)], [])
    kept.workers[0].paced_overrun = 0.005
    assert convert(run, kept)[0].oversubscribed is False
    kept.workers[0].paced_overrun = 0.02
    assert convert(run, kept)[0].oversubscribed is True


def test_straggler_factor_is_the_largest_step_time_over_the_mean(make_run):
    uneven = Outcome(
        "test-run", "completed", "", [worker(0, 1.0), worker(1, 1.6, compute_s=1.2)], []
    )
    assert convert(make_run("allreduce", 2), uneven)[
        0
    ].straggler_factor == pytest.approx(1.2 / 0.9)
    even = Outcome("test-run", "completed", "", [worker(0, 1.0), worker(1, 1.0)], [])
    assert convert(make_run("allreduce", 2), even)[0].straggler_factor == 1.0
    blank = Outcome(
        "test-run",
        "completed",
        "",
        [worker(0, 1.0), worker(1, 1.0, compute_s=None)],
        [],
    )
    assert convert(make_run("ddp", 2), blank)[0].straggler_factor is None


def test_straggler_factor_is_per_step(make_run, play):
    """Seconds a step: 0.1, and 0.12 of one that took half the steps; who took none (here worker 0) is left out."""
    half, none = worker(1, 1.0, compute_s=0.6), worker(0, 1.0, compute_s=0.0)
    half.optimizer_steps, none.optimizer_steps = 5, 0
    outcome = Outcome(
        "test-run", "completed", "", [none, half, worker(2, 1.2, compute_s=1.0)], []
    )
    row, _ = convert(make_run("allreduce", 3), outcome)
    assert row.straggler_factor == pytest.approx(0.12 / 0.11)
    assert row.optimizer_steps == 10
    idle = Outcome("test-run", "completed", "", [none], [])
    assert convert(make_run("allreduce", 3), idle)[0].straggler_factor is None


@pytest.mark.parametrize(
    ("strategy", "slowdown", "factor"),
    [
        ({"fedavg": {"fraction": 0.5}}, {}, 1.0),
        ("bsp_backup", {2: 3.0}, 3.0 / 1.5),
    ],
)
def test_straggler_factor_under_partial_participation(
    make_run, play, strategy, slowdown, factor
):
    virtual = {"slowdown": slowdown, "jitter": "none"}
    outcome, _ = play(strategy, 4, virtual=virtual, epochs=3)
    assert len({worker.optimizer_steps for worker in outcome.workers}) > 1
    row, _ = convert(make_run(strategy, 4, virtual=virtual, epochs=3), outcome)
    assert row.straggler_factor == pytest.approx(factor)


def test_virtual_straggler_factor_is_recorded(make_run, play):
    run = make_run("epoch_average", 4, virtual={"slowdown": {2: 3.0}, "jitter": "none"})
    outcome, _ = play(
        "epoch_average", 4, virtual={"slowdown": {2: 3.0}, "jitter": "none"}
    )
    row, _ = convert(run, outcome)
    assert row.straggler_factor == pytest.approx(3.0 / 1.5)
    assert row.worker_weights is None


def test_merge_order_and_weights_are_recorded(make_run, play):
    options = {"epochs": 5, "virtual": {"ties": "rank", "jitter": "none"}}
    strategy = {"epoch_async": {"every": 2}}
    outcome, _ = play(strategy, 3, **options)
    row, epochs = convert(make_run(strategy, 3, **options), outcome)
    assert [epoch.merge_positions for epoch in epochs] == [
        None,
        "[0, 1, 2]",
        None,
        "[3, 4, 5]",
        None,
    ]
    weights = json.loads(row.worker_weights)
    assert len(weights) == 3
    assert sum(weights) < 1
    assert weights[0] != weights[2]
    synchronous, rows = convert(
        make_run("epoch_average", 3), play("epoch_average", 3)[0]
    )
    assert (synchronous.worker_weights, rows[0].merge_positions) == (None, None)


@pytest.mark.parametrize(
    "strategy", ["bsp", "asp", "ssp", "dssp", "elastic_bsp", "epoch_async"]
)
def test_histograms_sum_over_workers(make_run, play, strategy):
    options = {"epochs": 3, "virtual": {"slowdown": {1: 2.5}, "jitter": "none"}}
    outcome, _ = play(strategy, 3, **options)
    row, epochs = convert(make_run(strategy, 3, **options), outcome)
    stale = {
        int(value): times
        for value, times in json.loads(row.staleness_histogram).items()
    }
    merges = 3 if strategy == "epoch_async" else outcome.facts.steps_per_epoch * 3
    assert sum(stale.values()) == 3 * merges
    assert list(stale) == sorted(stale)
    assert max(stale) == max(
        epoch.max_staleness for epoch in epochs if epoch.max_staleness is not None
    )
    if strategy == "epoch_async":
        assert row.lead_histogram is None
    else:
        lead = {
            int(value): times for value, times in json.loads(row.lead_histogram).items()
        }
        assert sum(lead.values()) == 3 * merges
        assert max(lead) <= {"bsp": 1, "ssp": 4, "dssp": 16}.get(strategy, 3 * merges)
    if strategy == "bsp":
        assert stale == {0: 3 * merges}


def test_strategy_without_pushes_has_no_histogram(make_run, play):
    row, _ = convert(make_run("epoch_average", 3), play("epoch_average", 3)[0])
    assert (row.staleness_histogram, row.lead_histogram) == (None, None)
