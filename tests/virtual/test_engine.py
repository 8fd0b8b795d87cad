"""Identities that hold exactly for any clock, in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from scalebench.virtual.engine import Simulation, simulate
from tests.facts import together

PARALLEL = [
    "allreduce",
    "horovod",
    "ddp",
    "epoch_average",
    {"epoch_average": {"aggregation": "master"}},
]


@pytest.mark.parametrize("strategy", PARALLEL, ids=str)
def test_one_worker_equals_serial_bit_for_bit(play, strategy):
    _, serial = play("serial", epochs=3, optimizer={"sgd": {"momentum": 0.9}})
    _, weights = play(strategy, 1, epochs=3, optimizer={"sgd": {"momentum": 0.9}})
    assert torch.equal(weights["final"], serial["final"])
    assert not torch.equal(serial["final"], serial["initial"])


def test_one_asynchronous_worker_follows_its_rule(play):
    """With `half` the model after one epoch is halfway between its start and serial's end."""
    _, serial = play("serial", epochs=1)
    _, half = play("epoch_async", 1, epochs=1)
    expected = (serial["initial"] + serial["final"]) / 2
    torch.testing.assert_close(half["final"], expected, atol=1e-15, rtol=0)
    _, whole = play({"epoch_async": {"merge": "inverse_k"}}, 1, epochs=1)
    assert torch.equal(whole["final"], serial["final"])


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_averaging_after_one_sgd_step_equals_averaging_gradients(play, workers):
    """mean_i (w - eta g_i) = w - eta mean_i g_i, where all batches are equal: 96 samples, one step an epoch."""
    options = {"epochs": 4, "optimizer": "sgd", "batch_per_worker": 96 // workers}
    _, averaged = play("epoch_average", workers, **options)
    _, reduced = play("allreduce", workers, **options)
    torch.testing.assert_close(averaged["final"], reduced["final"], atol=1e-13, rtol=0)


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
@pytest.mark.parametrize("workers", [2, 5])
def test_the_baselines_share_the_arithmetic_of_allreduce(play, strategy, workers):
    _, reduced = play("allreduce", workers)
    _, weights = play(strategy, workers)
    assert torch.equal(weights["final"], reduced["final"])


def test_global_batch_has_equal_steps_at_any_worker_count(play):
    """Plain SGD on the whole data set a step: the weighted mean of uneven shards' gradients is the full gradient."""
    options = {
        "batch_global": 96,
        "epochs": 5,
        "optimizer": "sgd",
        "partition": "by_order",
        "shuffle": "none",
    }
    _, serial = play("serial", **options)
    for workers in (2, 5, 7):
        _, weights = play("allreduce", workers, **options)
        torch.testing.assert_close(
            weights["final"], serial["final"], atol=1e-12, rtol=0
        )


@pytest.mark.parametrize(
    "strategy",
    ["allreduce", "epoch_average", "epoch_async", {"epoch_average": {"every": 2}}],
    ids=str,
)
def test_evaluation_never_changes_training(play, strategy):
    finals = []
    for every in (1, 3, 0):
        outcome, weights = play(strategy, 3, epochs=4, evaluate_every=every)
        finals.append(
            (weights["final"], [report.train_s for report in outcome.workers])
        )
        moments = sorted(evaluation.epoch for evaluation in outcome.evaluations)
        assert moments[-1] == 3
        if strategy != "epoch_async":
            assert moments == {1: [0, 1, 2, 3], 3: [2, 3], 0: [3]}[every]
    assert torch.equal(finals[0][0], finals[1][0])
    assert torch.equal(finals[0][0], finals[2][0])
    assert finals[0][1] == finals[1][1] == finals[2][1]


@pytest.mark.parametrize("strategy", ["allreduce", "epoch_average", "epoch_async"])
def test_training_metric_is_of_the_final_model_on_training_samples_spread_evenly(
    play, blobs, strategy
):
    swapped = replace(blobs, x_test=blobs.x_train[::4], y_test=blobs.y_train[::4])
    outcome, _ = play(strategy, 2, epochs=2, data=swapped)
    last = max(outcome.evaluations, key=lambda evaluation: evaluation.elapsed_s)
    picked = np.linspace(0, blobs.n_train - 1, swapped.n_test).astype(int)
    again, _ = play(
        strategy,
        2,
        epochs=2,
        data=replace(blobs, x_test=blobs.x_train[picked], y_test=blobs.y_train[picked]),
    )
    assert (
        last.train_metric
        == max(again.evaluations, key=lambda evaluation: evaluation.elapsed_s).metric
    )
    assert [
        one.train_metric is None
        for one in sorted(outcome.evaluations, key=lambda one: one.epoch)
    ] == [True, False]


@pytest.mark.parametrize("strategy", [*PARALLEL, "epoch_async"], ids=str)
@pytest.mark.parametrize("workers", [1, 4])
def test_tasks_add_up_to_the_training_time(play, strategy, workers):
    outcome, _ = play(
        strategy,
        workers,
        epochs=3,
        virtual={"slowdown": {0: 1.7}, "jitter": "lognormal"},
    )
    assert [len(report.epochs) for report in outcome.workers] == [3] * workers
    for report in outcome.workers:
        parts = report.compute_s + report.comm_s + report.data_s + report.other_s
        assert parts == pytest.approx(report.train_s, rel=1e-9)
        assert 0 <= report.wait_s <= report.comm_s + 1e-12
        elapsed = [epoch.elapsed_s for epoch in report.epochs]
        assert elapsed == sorted(elapsed)
        assert sum(epoch.epoch_s for epoch in report.epochs) <= report.train_s + 1e-12


def test_repeated_run_is_bit_identical(play):
    first, weights = play("epoch_async", 5, epochs=4)
    second, again = play("epoch_async", 5, epochs=4)
    assert torch.equal(weights["final"], again["final"])
    assert [r.train_s for r in first.workers] == [r.train_s for r in second.workers]


def test_serial_time_is_steps_times_step_time(play):
    outcome, _ = play("serial", epochs=2)
    steps = outcome.facts.steps_per_epoch
    assert steps == 12
    assert outcome.workers[0].train_s == pytest.approx(2 * steps * 1e-3)
    assert outcome.workers[0].optimizer_steps == 2 * steps


def test_averages_under_way_are_hidden_in_part_and_blocking_ones_are_not(play):
    blocking, _ = play("allreduce", 4)
    overlapped, _ = play("daso-fixed", 4)
    assert [report.hidden_comm_s for report in blocking.workers] == [0.0] * 4
    for report in overlapped.workers:
        assert 0 < report.hidden_comm_s < report.compute_s


def test_slow_worker_delays_barriers_only(play):
    slow = {"virtual": {"slowdown": {1: 4.0}}, "epochs": 4}
    barrier, _ = play("epoch_average", 4, **slow)
    free, _ = play("epoch_async", 4, **slow)
    slow_s = free.workers[1].epochs[-1].elapsed_s
    others = [0, 2, 3]
    for rank in others:
        assert free.workers[rank].epochs[-1].elapsed_s < 0.5 * slow_s
        assert barrier.workers[rank].wait_s > 0.5 * barrier.workers[rank].train_s


def test_synchronisations_and_bytes_follow_the_rule(play):
    expected = {"allreduce": 6 * 3, "epoch_average": 3, "serial": 0}
    for strategy, syncs in expected.items():
        workers = 1 if strategy == "serial" else 2
        outcome, weights = play(strategy, workers, epochs=3)
        assert len(outcome.workers) == workers
        nbytes = weights["final"].numel() * 8
        for report in outcome.workers:
            assert report.syncs == syncs
            assert report.bytes_sent == syncs * nbytes
            assert sum(epoch.syncs for epoch in report.epochs) == syncs


def test_engine_of_a_study_charges_its_collectives(play, machine):
    """gloo with 1 ms more per operation: 12 allreduces, and the rest as on mpi."""
    entries = [
        entry.model_copy(
            update={
                "alpha_s": entry.alpha_s + 1e-3,
                "points": [
                    (nbytes, seconds + 1e-3) for nbytes, seconds in entry.points
                ],
            }
        )
        if entry.engine == "gloo"
        else entry
        for entry in machine.engines.entries
    ]
    place = replace(
        machine, engines=machine.engines.model_copy(update={"entries": entries})
    )
    seconds = {
        engine: play("allreduce", 2, virtual={"engine": engine}, machine=place)[
            0
        ].workers[0]
        for engine in ("auto", "mpi", "gloo")
    }
    assert seconds["auto"].train_s == seconds["mpi"].train_s
    assert seconds["gloo"].syncs == 12
    assert seconds["gloo"].train_s - seconds["mpi"].train_s == pytest.approx(12e-3)


def test_moved_rows_are_charged(play):
    fixed, _ = play("epoch_average", 4, epochs=3, shuffle="in_block")
    moving, _ = play("epoch_average", 4, epochs=3, shuffle="global")
    assert sum(r.bytes_sent for r in moving.workers) > sum(
        r.bytes_sent for r in fixed.workers
    )


def test_dropout_does_not_depend_on_the_interleaving(play, tmp_path):
    source = tmp_path / "net.py"
    source.write_text(
        "from torch import nn\n"
        "def build(input_shape, outputs):\n"
        "    return nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Linear(16, outputs))\n"
    )
    model = f"{source}:build"
    _, plain = play("epoch_average", 3, model=model)
    _, slowed = play("epoch_average", 3, model=model, virtual={"slowdown": {0: 3.0}})
    assert torch.equal(plain["final"], slowed["final"])


DRAWING = """
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, inputs, outputs, late):
        super().__init__()
        self.net, self.calls, self.late = nn.Linear(inputs, outputs), 0, late

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls > 5 * self.late:
            x = x + 0.1 * random.random() + 0.1 * float(np.random.normal())
        return self.net(x)


def build(input_shape, outputs, late=False):
    return Net(input_shape[0], outputs, late)
"""


@pytest.mark.parametrize("late", [False, True])
def test_numbers_of_python_and_numpy_are_each_worker_s_own(play, tmp_path, late):
    (tmp_path / "net.py").write_text(DRAWING)
    model = {f"{tmp_path / 'net.py'}:build": {"late": late}}
    _, plain = play("epoch_average", 3, model=model)
    random.seed(17)
    np.random.seed(18)
    _, slowed = play("epoch_average", 3, model=model, virtual={"slowdown": {0: 3.0}})
    assert torch.equal(plain["final"], slowed["final"])


NOISY = """
import random
from typing import ClassVar

import numpy as np
import torch

from scalebench.strategies.base import Strategy


class Noisy(Strategy):
    name: ClassVar[str] = "noisy"
    summary: ClassVar[str] = "noise after each epoch"
    source: ClassVar[str] = "an example"

    def train_epoch(self, worker, epoch):
        for batch in worker.batches(epoch):
            worker.local_step(batch)
        noise = random.random() + float(np.random.normal()) + float(torch.rand(()))
        worker.parameters.add_(0.01 * noise)
        worker.comm.allreduce_(worker.parameters, "mean")
        worker.parameters.add_(0.01 * float(torch.rand(())))
        worker.comm.allreduce_(worker.parameters, "mean")
"""


def test_numbers_that_a_strategy_draws_are_each_worker_s_own(play, tmp_path):
    (tmp_path / "own.py").write_text(NOISY)
    strategy = f"{tmp_path / 'own.py'}:Noisy"
    _, plain = play(strategy, 3)
    _, slowed = play(strategy, 3, virtual={"slowdown": {0: 3.0}})
    assert torch.equal(plain["final"], slowed["final"])


def test_a_strategy_that_changes_its_samples_in_place_fails_in_one_line(
    make_run, blobs, machine, tmp_path
):
    source = NOISY.replace(
        "            worker.local_step(batch)",
        "            worker.local_step(batch)\n            batch.x.add_(1)",
    )
    (tmp_path / "own.py").write_text(source)
    outcome, _ = simulate(make_run(f"{tmp_path / 'own.py'}:Noisy", 2), blobs, machine)
    assert (outcome.status, "\n" in outcome.error) == ("failed", False)
    assert together(outcome.error, "training samples", "changed")


def test_a_consensus_that_changes_the_weights_in_place_fails_in_one_line(
    make_run, blobs, machine, tmp_path
):
    lines = NOISY.splitlines()
    begin = next(at for at, line in enumerate(lines) if "noise =" in line)
    source = "\n".join(lines[:begin]) + (
        "\n\n    def consensus(self, worker):\n"
        "        worker.parameters.mul_(1)\n"
        "        return worker.parameters.clone()\n"
    )
    (tmp_path / "own.py").write_text(source)
    strategy = f"{tmp_path / 'own.py'}:Noisy"
    outcome, _ = simulate(make_run(strategy, 4, evaluate_every=1), blobs, machine)
    assert (outcome.status, "\n" in outcome.error) == ("failed", False)
    assert together(outcome.error, "consensus", "in place", "copy")


def test_rows_of_workers_are_kept_until_the_last_has_ended_the_epoch_only(
    make_run, blobs, machine, monkeypatch
):
    kept = {}

    def watched(self, replica):
        def evaluated():
            vectors = [each.vector for each in replica.snapshots]
            kept[replica.rank] = [vector is not None for vector in vectors]
            return ordinary(self, replica)()

        return evaluated

    ordinary = Simulation._evaluation
    monkeypatch.setattr(Simulation, "_evaluation", watched)
    run = make_run("gossip", 4, epochs=3, evaluate_every=1)
    outcome, _ = simulate(run, blobs, machine)
    assert outcome.facts.arithmetic == "batched"
    assert kept == {rank: [rank == 0] * 3 for rank in range(4)}
    assert [each.epoch for each in outcome.evaluations] == [0, 1, 2]


@pytest.mark.parametrize(
    ("strategy", "workers"), [("serial", 1), ("epoch_async", 3), ("asp", 2)]
)
def test_infinite_last_update_is_a_diverged_run(
    make_run, blobs, machine, strategy, workers
):
    """One batch, with the loss of the initial weights."""
    from scalebench.virtual.engine import simulate

    explosive = {
        "optimizer": {"sgd": {"weight_decay": 1e30}},
        "lr": 1e30,
        "dtype": "float32",
    }
    run = make_run(strategy, workers, epochs=1, batch_global=96, **explosive)
    outcome, weights = simulate(run, blobs, machine)
    assert (outcome.status, weights) == ("diverged", {})
    assert "the weights are not finite" in outcome.error


def test_infinite_weights_are_detected_at_the_end_of_the_epoch(
    make_run, blobs, machine
):
    """Replicas in agreement detect it before the loss of the second epoch."""
    from scalebench.virtual.engine import simulate

    explosive = {
        "optimizer": {"sgd": {"weight_decay": 1e30}},
        "lr": 1e30,
        "dtype": "float32",
    }
    run = make_run("epoch_average", 3, epochs=2, batch_global=96, **explosive)
    outcome, _ = simulate(run, blobs, machine)
    assert (outcome.status, outcome.error) == (
        "diverged",
        "the weights are not finite after epoch 1",
    )


def test_infinite_loss_is_a_diverged_run(make_run, blobs, machine):
    from scalebench.virtual.engine import simulate

    outcome, weights = simulate(
        make_run("allreduce", 2, lr=1e30, dtype="float32", epochs=3), blobs, machine
    )
    assert outcome.status == "diverged"
    assert "training loss is" in outcome.error
    assert weights == {}


def test_time_limit_ends_a_run(make_run, blobs, machine):
    from scalebench.virtual.engine import simulate

    outcome, _ = simulate(make_run("allreduce", 2, time_limit_s=1e-6), blobs, machine)
    assert outcome.status == "timeout"


@pytest.mark.parametrize(
    ("strategy", "engine"), [("horovod", "horovod"), ("ddp", "gloo")]
)
def test_single_worker_is_charged_for_its_engine(play, machine, strategy, engine):
    alone = 2e-4
    entries = [
        entry.model_copy(update={"alone_s": alone}) if entry.engine == engine else entry
        for entry in machine.engines.entries
    ]
    place = replace(
        machine, engines=machine.engines.model_copy(update={"entries": entries})
    )
    plain, _ = play("serial")
    own, _ = play(strategy, 1, machine=place)
    steps = plain.workers[0].optimizer_steps
    assert own.workers[0].train_s - plain.workers[0].train_s == pytest.approx(
        steps * alone
    )


def test_gradients_are_released_as_at_the_batch_size_of_the_run(play, machine):
    (table,) = machine.tables
    (batch,) = table.batches
    early = batch.model_copy(update={"release": [0.5] * 4})
    late = batch.model_copy(update={"samples": 32, "release": [1.0] * 4})
    place = replace(
        machine, tables=[table.model_copy(update={"batches": [early, late]})]
    )
    small, large = (
        play("ddp", 2, batch_per_worker=size, machine=place)[0] for size in (8, 32)
    )
    assert small.workers[0].hidden_comm_s > 0
    assert large.workers[0].hidden_comm_s == 0
