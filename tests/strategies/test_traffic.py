"""Virtual runs count what their program records, worker by worker, for every strategy."""

from __future__ import annotations

import pytest

from scalebench.errors import StudyError
from scalebench.strategies import registry
from tests.conftest import setting, some

EPOCHS = 3
VARIANTS = {
    "allreduce": [
        {"accumulate": 2}, {"compression": "fp16"}, {"compression": "topk", "keep": 0.1}, {"collective": "tree"},
        {"compression": "powersgd", "rank": 1, "start": 4}, {"collective": "hierarchical"},
    ],
    "ddp": [{"compression": "bf16"}, {"compression": "powersgd"}, {"accumulate": 4},
            {"accumulate": 2, "compression": "powersgd"}],
    "horovod": [{"compression": "fp16"}, {"accumulate": 5, "compression": "fp16"}],
    "epoch_average": [{"every": 2}, {"every": 2, "aggregation": "master"}],
    "epoch_async": [{"every": 2}],
    "local_sgd": [{"steps": 5}, {"steps": 5, "first": 2}, {"steps": 4, "first": 9, "optimizer_state": "average"}],
    "post_local_sgd": [{"start": 5, "steps": 2}, {"start": 4, "steps": 3, "subgroup": 2}, {"start": 99},
                       {"start": 3, "subgroup": 0}],
    "hierarchical_local_sgd": [{"groups": {2: 2, 4: 3}}],
    "torch_local_sgd": [{"period": 3, "warmup": 2}],
    "torch_hierarchical_local_sgd": [{"groups": {2: 17, 4: 18}}],
    "torch_post_local_sgd": [{"start": 5, "period": 2}],
    "model_parallel": [{"balance": [1, 2]}],
    "pipeline": [{"schedule": "gpipe"}, {"micro_batches": 2, "balance": [2, 1]}],
    "tensor": [{"degree": 4}],
    "adaptive": [{"layout": [1, 2], "again": False}, {"layout": [2, 1], "again": False}],
    "fsdp": [{"shard": 1}, {"shard": 2}],
    "hybrid": [{"tensor": 2}, {"within": {"local_sgd": {"steps": 3}}}],
    "daso-heat": [{"devices_per_node": 1, "warm_up_epochs": 1, "cool_down_epochs": 1}],
    "daso-fixed": [
        {"devices_per_node": 2, "local_skip": 2}, {"devices_per_node": 1, "wait": 3},
        {"devices_per_node": 2, "global_skip": 3, "wait": 2, "cool_down_epochs": 1}, {"devices_per_node": 1, "wait": 0},
    ],
    "gossip": [{"every": 2}, {"peers": "pair"}],
    "ad_psgd": [{"every": 3}, {"neighbours": "ring", "trailing": "leave"}],
    "fedavg": [{"local_epochs": 2, "fraction": 0.5}],
    "easgd": [{"steps": 5}],
    "sparse_loco": [{"steps": 5, "bits": 32, "keep": 0.5}, {"steps": 4, "bits": 4, "tile": 4, "first": 2}],
    "noloco": [{"steps": 5}, {"steps": 4, "first": 3, "trailing": "leave"}],
    "demo": [{"k": 2, "tile": 6}, {"accumulate": 2}],
    "sparta": [{"share": 0.2, "trailing": "leave"}],
    "streaming_diloco": [{"steps": 6, "fragments": 3, "bits": 4}, {"steps": 4, "fragments": 1, "delay": 2, "bits": 8},
                         {"steps": 2, "delay": 0, "trailing": "leave"}],
}  # fmt: skip
DEFAULTS = {
    "adaptive": {"again": False},
    "daso-heat": {"devices_per_node": 1},
    "daso-fixed": {"devices_per_node": 1},
    "torch_hierarchical_local_sgd": {"groups": {2: 2, 4: 6}},
}
CASES = [
    (name, options)
    for name in registry.names()
    for options in [DEFAULTS.get(name, {}), *VARIANTS.get(name, [])]
    if name != "bsp_backup"  # which pushes come too late depends on timing
]


def refusal(strategy, workers):
    """Why the strategy refuses `workers`, two a node; empty: it does not."""
    try:
        strategy.check(setting(workers, epochs=EPOCHS))
    except StudyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("workers", some([2, 3, 4, 5], 4))
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_runs_count_what_their_program_records(play, recorded, name, options, workers):
    strategy = registry.create(name, options, "virtual")
    if (
        max(
            strategy.model_dump().get("devices_per_node") or 1,
            strategy.model_dump().get("subgroup") or 1,
        )
        >= workers
    ):
        pytest.skip("not applicable: the node, or the subgroup, would hold all workers")
    parts = strategy.traits.pipeline * strategy.traits.tensor
    if (workers % 2 or workers % parts) and refusal(strategy, workers):
        pytest.skip(
            "not applicable: nodes and groups of two, or replicas of several workers, cannot be filled"
        )
    workers = workers if strategy.requires else 1
    values = {
        "epochs": EPOCHS,
        "model": {"mlp": {"hidden": [12, 12]}},
        "batch_per_worker": 4,
    }
    values["optimizer"] = {"sgd": {"momentum": 0.9}}
    outcome, _ = play({name: options}, workers, **values)
    schedules = recorded({name: options}, workers, **values)
    counted = [(worker.syncs, worker.bytes_sent) for worker in outcome.workers]
    assert counted == [(schedule.syncs, schedule.bytes_sent) for schedule in schedules]
    compute = [
        sum(event.kind == "backward" for event in schedule.events)
        for schedule in schedules
    ]
    chosen = name not in (
        "fedavg",
        "fedprox",
    )  # clients that sit out a round compute nothing
    steps = EPOCHS * outcome.facts.steps_per_epoch * strategy.traits.micro_batches
    traits = strategy.traits
    # a pass between two exchanges
    if traits.tensor > 1 or traits.sharded or traits.mixed:
        assert all(passes % steps == 0 for passes in compute)
    else:
        assert not chosen or set(compute) == {steps} or name.startswith("dislib")


def test_a_schedule_holds_what_a_worker_does_in_order(recorded):
    events = recorded({"local_sgd": {"steps": 2}}, 2, epochs=1, batch_per_worker=24)[
        0
    ].events
    step = ["data", "forward", "backward", "update"]
    assert [event.kind for event in events] == [
        "shuffle",
        *step,
        *step,
        "allreduce",
        "epoch",
    ]
    assert list(events[-2].operation.members) == [0, 1]


def test_a_sum_in_flight_is_not_blocking_and_is_waited_for(recorded):
    events = recorded(
        {"daso-fixed": {"devices_per_node": 1}}, 2, epochs=1, batch_per_worker=2
    )[0].events
    waits = [event for event in events if event.kind == "wait"]
    assert waits
    assert all(
        events[wait.amount].kind == "allreduce" and not events[wait.amount].blocking
        for wait in waits
    )


@pytest.mark.parametrize(
    ("strategy", "optimizer", "vectors"),
    [
        ("allreduce", "sgd", 3),
        ("allreduce", {"sgd": {"momentum": 0.9}}, 4),
        ("local_sgd", "adam", 5),
        ("slowmo", "sgd", 5),
        ("easgd", "sgd", 4),
        ({"allreduce": {"compression": "topk"}}, "sgd", 4),
    ],
    ids=str,
)
def test_recorded_memory_counts_model_optimizer_and_the_strategys_own_tensors(
    recorded, strategy, optimizer, vectors
):
    """Parameters, gradients and initial weights; momentum or moments; anchor and slow momentum, centre, residual."""
    schedule = recorded(strategy, 2, optimizer=optimizer, lr=0.01)[0]
    of_parameters = (2 * 6 + 6 + 6 * 3 + 3) * 8
    assert (
        vectors * of_parameters <= schedule.memory_bytes < (vectors + 1) * of_parameters
    )
