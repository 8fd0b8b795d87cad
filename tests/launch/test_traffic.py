"""Recorded traffic of a study is what its runs send, moved rows included."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalebench.data.batch_plan import MOVING
from scalebench.launch.planning import plan_study
from scalebench.launch.traffic import TrafficCheck, bytes_of_row, traffic_of
from scalebench.records.rows import rows_of
from scalebench.study.load import load_study
from scalebench.virtual.engine import simulate


@pytest.mark.parametrize("shuffle", ["in_block", *MOVING])
@pytest.mark.parametrize(
    ("dataset", "dtype"), [("wine", "float32"), ("diabetes", "float64")]
)
def test_bytes_of_a_run_are_those_recorded_and_those_of_moved_rows(
    machine, shuffle, dataset, dtype
):
    said = {
        "dataset": dataset,
        "dtype": dtype,
        "shuffle": shuffle,
        "workers": "4",
        "epochs": 3,
        "execution": "virtual",
    }
    plan = plan_study(
        load_study(
            None,
            {**said, "strategies": ["epoch_average"], "repetitions": 1},
            ["blocks=8", "lr=1e-3"],
        )
    )
    (expected,) = traffic_of(plan)
    outcome, _ = simulate(plan.sweep.runs[0], plan.prepared.datasets[4], machine)
    assert outcome.status == "completed", outcome.error
    assert {worker.syncs for worker in outcome.workers} == {expected.syncs * 3}, (
        "rows that move are none"
    )
    assert sum(epoch.syncs for epoch in outcome.workers[0].epochs) == expected.syncs * 3
    sent = sum(worker.bytes_sent for worker in outcome.workers) / 4 / 3
    assert sent == pytest.approx(expected.bytes_sent + expected.rows_bytes, rel=1e-12)
    assert (expected.rows_bytes > 0) == (shuffle in MOVING)


def test_a_row_is_its_features_and_its_label(blobs):
    import torch

    assert bytes_of_row(blobs, torch.float32) == 2 * 4 + 8
    assert bytes_of_row(blobs, torch.bfloat16) == 2 * 2 + 8


def test_buffers_that_ddp_sends_are_recorded(machine):
    model = (
        f"{Path(__file__).parents[1] / 'strategies' / 'models' / 'normalised.py'}:build"
    )
    said = {
        "dataset": "wine",
        "model": model,
        "workers": "4",
        "epochs": 2,
        "execution": "virtual",
        "repetitions": 1,
    }
    plan = plan_study(load_study(None, {**said, "strategies": ["ddp"]}, []))
    (expected,) = traffic_of(plan)
    outcome, _ = simulate(plan.sweep.runs[0], plan.prepared.datasets[4], machine)
    assert outcome.status == "completed", outcome.error
    assert (
        sum(worker.bytes_sent for worker in outcome.workers) / 4 / 2
        == expected.bytes_sent
    )
    buffers = 4 * (5 + 5) + 8
    assert expected.bytes_sent == expected.steps * (
        4 * outcome.facts.parameters + buffers / 4
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lars", "lamb", "muon"])
def test_averaged_optimizer_state_is_recorded(machine, optimizer):
    """Adam's step counter too; of two clients one is averaged before it has stepped for the first time."""
    if optimizer in ("lars", "lamb"):
        pytest.importorskip("pytorch_optimizer")
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    said = {
        "dataset": "wine",
        "workers": "2",
        "epochs": 2,
        "execution": "virtual",
        "repetitions": 1,
        "lr": 1e-3,
    }
    fedavg = {"fedavg": {"fraction": 0.5, "optimizer_state": "average"}}
    plan = plan_study(
        load_study(
            None,
            {**said, "optimizer": {optimizer: options}, "strategies": [fedavg]},
            [],
        )
    )
    (expected,) = traffic_of(plan)
    outcome, _ = simulate(plan.sweep.runs[0], plan.prepared.datasets[2], machine)
    assert outcome.status == "completed", outcome.error
    assert [worker.bytes_sent / 2 for worker in outcome.workers] == [
        expected.bytes_sent
    ] * 2
    moments = {"sgd": 1, "lars": 1, "muon": 1}.get(optimizer, 2)
    numbers = outcome.facts.parameters * (1 + moments) + optimizer.startswith("adam")
    if optimizer == "muon":
        # second moments and counters of two biases, which AdamW steps
        numbers += 128 + 3 + 2
    assert expected.bytes_sent == 4 * numbers


def test_a_count_that_differs_from_the_program_is_reported_once(machine):
    said = {
        "dataset": "wine",
        "workers": "2,4",
        "epochs": 2,
        "execution": "virtual",
        "repetitions": 1,
    }
    plan = plan_study(load_study(None, {**said, "strategies": ["local_sgd"]}, []))
    check = TrafficCheck(plan)
    run = next(run for run in plan.sweep.runs if run.workers == 2)
    outcome, _ = simulate(run, plan.prepared.datasets[2], machine)
    told = {"attempt": 1, "oversubscribed": False, "started_utc": "", "provenance": {}}
    row = rows_of(run, outcome, **told)[0]
    assert TrafficCheck(plan).differences(run, row) == []
    (line,) = check.differences(run, row.model_copy(update={"syncs": row.syncs + 1}))
    assert f"{row.syncs + 1} synchronisations were counted" in line
    assert check.differences(run, row.model_copy(update={"syncs": 0})) == []


def test_counts_that_follow_the_loss_are_not_compared(machine):
    said = {
        "dataset": "wine",
        "workers": "8",
        "epochs": 10,
        "execution": "virtual",
        "repetitions": 1,
    }
    plan = plan_study(load_study(None, {**said, "strategies": ["daso-heat"]}, []))
    run = plan.sweep.runs[0]
    outcome, _ = simulate(run, plan.prepared.datasets[8], machine)
    row = rows_of(
        run, outcome, attempt=1, oversubscribed=False, started_utc="", provenance={}
    )[0]
    assert (
        TrafficCheck(plan).differences(run, row.model_copy(update={"syncs": 0})) == []
    )
