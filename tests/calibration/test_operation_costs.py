"""Operations of strategies besides steps: measurement in a run and charges at each call."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from scalebench.calibration import operation_costs
from scalebench.calibration.operation_costs import measure_operations
from scalebench.pricing.machine import OperationTime, StepTimes, name_of
from scalebench.system.clock import Task

TOPK = {"allreduce": {"compression": "topk"}}
WIDE = {"mlp": {"hidden": [16, 16]}}
OPERATIONS = {
    "adasum": ({"Merging", "Tensor.sub_", "Tensor.add_"}, {}),
    "slowmo": ({"BlockMomentum._restart"}, {"steps": 2}),
    "bmuf": ({"BlockMomentum._restart"}, {"steps": 2}),
    "diloco": ({"BlockMomentum._restart"}, {"steps": 2}),
    "streaming_diloco": ({"Fragment._step"}, {"steps": 2, "fragments": 1}),
    "sparse_loco": (
        {"Unsent.message", "Unsent.mean", "SparseLoCo._restart"},
        {"steps": 2},
    ),
    "noloco": ({"NoLoCo._step"}, {"steps": 2}),
    "demo": ({"Cosines.message", "Cosines.sign"}, {}),
    "sparta": ({"Sparta._draw", "Tensor.index_select", "Sparta._put_back"}, {}),
    "easgd": ({"Easgd._draw", "Easgd._follow"}, {}),
    "epoch_async": ({"EpochAsync._merge"}, {}),
    "ad_psgd": ({"_meet", "AdPsgd._write"}, {}),
    "asp": ({"ParameterServer"}, {}),
    "fedprox": ({"FedProx._hold"}, {}),
    "local_sgd": (set(), {"steps": 2}),
    "epoch_average": (set(), {}),
    "allreduce": (set(), {}),
    "ddp": (set(), {}),
}


@pytest.fixture
def seconds(monkeypatch):
    """Every operation takes 1 ms, and 2 ms with twice the messages, independent of the machine."""

    def measured(operation):
        doubled = name_of(operation) == "TopK._mean" and len(operation.args[0]) > 2
        return operation(), 2e-3 if doubled else 1e-3

    monkeypatch.setattr(operation_costs, "_timed", measured)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_each_strategy_are_measured(
    make_run, blobs, machine, seconds, name
):
    expected, options = OPERATIONS[name]
    run = make_run({name: options}, 2, epochs=4)
    found = measure_operations([run], {2: blobs}, machine)
    assert {
        name.replace("TensorBase", "Tensor") for name in found[str(run.strategy)]
    } == expected
    assert all(
        time == OperationTime(seconds=1e-3)
        for time in found[str(run.strategy)].values()
    )


def test_operations_on_parts_of_a_model_are_measured(make_run, blobs, machine, seconds):
    run = make_run(
        {"hybrid": {"micro_batches": 2, "within": {"slowmo": {"steps": 2}}}},
        4,
        epochs=4,
    )
    found = measure_operations([run], {4: blobs}, machine)
    assert found[str(run.strategy)] == {
        "BlockMomentum._restart": OperationTime(seconds=1e-3)
    }


SHARING = [  # workers that share layers
    ("torch_fsdp", 2),
    ({"torch_tensor": {"degree": 2}}, 2),
    ("torch_fsdp", 4),
    ("fsdp", 2),
    ("tensor", 2),
    ("adaptive", 2),
]


@pytest.mark.parametrize(("strategy", "workers"), SHARING, ids=str)
def test_overhead_of_a_worker_is_what_its_steps_take_beyond_their_shares(
    make_run, blobs, machine, monkeypatch, strategy, workers
):
    """A worker's pass takes 5 ms for half of one that takes 4 ms, in turn with it: 1.5 times its charge too long."""
    passes = (Task.FORWARD, 16)
    of_turns = cycle([({passes: 5e-3}, {passes: 0.5}), ({passes: 4e-3}, {passes: 1.0})])

    def of(clock, step):
        step()
        return next(of_turns)

    monkeypatch.setattr(operation_costs._StepClock, "of", of)
    run = make_run(strategy, workers)
    found = measure_operations([run], {workers: blobs}, machine)
    time = found[str(run.strategy)]["step_overhead"]
    whole_s = StepTimes(machine.table_for(workers), repetition=None).task_seconds(
        *passes
    )
    assert time.seconds == pytest.approx(1.5 * 0.5 * whole_s)
    assert whole_s > 0
    # no rank was started
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("strategy", ["torch_tensor", "tensor", "fsdp"])
def test_a_worker_takes_longer_than_its_share_of_small_layers(
    make_run, blobs, machine, strategy
):
    run = make_run(strategy, 2, model=WIDE)
    assert np.median(operation_costs.step_overheads(run, blobs, machine, 0.5)) > 0


def test_steps_of_whole_layers_have_no_overhead(make_run, blobs, machine, seconds):
    run = make_run({"pipeline": {"micro_batches": 2}}, 2, model=WIDE)
    (found,) = measure_operations([run], {2: blobs}, machine).values()
    assert "step_overhead" not in found


def test_cost_of_further_messages_is_measured_with_twice_as_many(
    make_run, blobs, machine, seconds
):
    runs = [make_run(TOPK, workers) for workers in (1, 4, 2)]
    times = measure_operations(runs, {1: blobs, 2: blobs, 4: blobs}, machine)[
        str(runs[0].strategy)
    ]
    assert times["TopK._select"] == OperationTime(seconds=1e-3)
    assert times["TopK._mean"] == OperationTime(seconds=1e-3, per_member_s=0.5e-3)
    assert times["TopK._mean"].among(6) == pytest.approx(3e-3)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_compression_is_charged_at_every_step_without_changing_results(
    play, machine, workers
):
    """12 steps at two workers: 3 ms to choose, 1 ms to add two messages, and 0.5 ms for each further one."""
    times = {
        "TopK._select": OperationTime(seconds=3e-3),
        "TopK._mean": OperationTime(seconds=1e-3, per_member_s=0.5e-3),
    }
    priced = replace(machine, operations={"allreduce(compression=topk)": times})
    free, weights = play(TOPK, workers)
    charged, same = play(TOPK, workers, machine=priced)
    steps = free.workers[0].optimizer_steps
    each = 0.0 if workers == 1 else 4e-3 + 0.5e-3 * (workers - 2)
    for before, after in zip(free.workers, charged.workers, strict=True):
        assert after.train_s - before.train_s == pytest.approx(steps * each)
        assert after.other_s - before.other_s == pytest.approx(steps * each)
    assert (weights["final"] == same["final"]).all()
    again, _ = play(TOPK, workers, machine=priced)
    assert [worker.train_s for worker in again.workers] == [
        worker.train_s for worker in charged.workers
    ]


@pytest.mark.parametrize(
    ("strategy", "workers", "operation", "calls"),
    [
        ({"allreduce": {"compression": "fp16"}}, 2, "there_and_back", 12),
        ({"allreduce": {"compression": "powersgd"}}, 2, "PowerSgd._read_first", 12 - 2),
        ({"ddp": {"compression": "powersgd"}}, 2, "PowerSgd._settle", 12 - 2),
        ("adasum", 4, "Merging", 2 * 6),  # lg 4 levels a step
        ({"slowmo": {"steps": 4}}, 2, "BlockMomentum._restart", 3),
        ({"easgd": {"steps": 4}}, 2, "Easgd._draw", 3),
        ("epoch_async", 1, "EpochAsync._merge", 2),
        ({"fedprox": {"local_epochs": 2}}, 2, "FedProx._hold", 12),
        ("torch_fsdp", 2, "step_overhead", 12),
        ("torch_fsdp", 1, "step_overhead", 0),
        ({"torch_tensor": {"degree": 2}}, 4, "step_overhead", 12),
        ({"torch_tensor": {"degree": 1}}, 2, "step_overhead", 0),
        ("fsdp", 4, "step_overhead", 6),
        ({"fsdp": {"shard": 1}}, 2, "step_overhead", 12),
        ("tensor", 2, "step_overhead", 24),
        ({"hybrid": {"pipeline": 1, "tensor": 2}}, 2, "step_overhead", 24),
        ("adaptive", 2, "step_overhead", 12),
        ({"pipeline": {"micro_batches": 2}}, 2, "step_overhead", 0),
    ],
    ids=str,
)
def test_each_call_is_charged_once(
    play, make_run, machine, strategy, workers, operation, calls
):
    key = str(make_run(strategy, workers).strategy)
    priced = replace(
        machine, operations={key: {operation: OperationTime(seconds=1e-3)}}
    )
    plain, slowed = (
        play(strategy, workers, model=WIDE, machine=place)[0]
        for place in (machine, priced)
    )
    added = [
        after.train_s - before.train_s
        for before, after in zip(plain.workers, slowed.workers, strict=True)
    ]
    assert added == pytest.approx([calls * 1e-3] * workers)


def test_slow_worker_compresses_slowly(play, machine):
    priced = replace(
        machine,
        operations={
            "allreduce(compression=topk)": {"TopK._select": OperationTime(seconds=1e-3)}
        },
    )
    slow = {"virtual": {"slowdown": {1: 3.0}}}
    free, charged = (
        play(TOPK, 2, machine=place, **slow)[0] for place in (machine, priced)
    )
    assert charged.workers[0].train_s - free.workers[0].train_s == pytest.approx(
        12 * 3e-3
    )


def test_server_is_busy_at_least_for_its_rule(play, machine):
    """One worker: a push is answered after its update of 0.05 ms."""
    priced = replace(
        machine, operations={"asp": {"ParameterServer": OperationTime(seconds=1e-3)}}
    )
    free, charged = (
        play("asp", 1, machine=place)[0].workers[0] for place in (machine, priced)
    )
    assert charged.train_s - free.train_s == pytest.approx(
        free.optimizer_steps * (1e-3 - 5e-5)
    )


def test_measure_counts_processor_time():
    import time

    result, taken = operation_costs._timed(lambda: time.sleep(0.05) or 7)
    assert result == 7
    assert taken < 0.02
