"""Workers that hold parts of a model train as one that holds it all, in the same micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from scalebench.cluster.mesh import Mesh
from scalebench.errors import ModelError, StudyError
from scalebench.models.parts import facts_of, layers_of
from scalebench.models.registry import build_model
from scalebench.models.sharding import held_by
from scalebench.pricing.machine import Choice
from scalebench.records.rows import rows_of
from scalebench.strategies import registry
from scalebench.strategies.parts import placed
from scalebench.study.spec import Component
from scalebench.training.replica import Replica
from scalebench.training.stage import sizes_of
from scalebench.virtual import engine as virtual_engine
from scalebench.virtual.engine import simulate
from tests.conftest import setting
from tests.strategies.parts_case import images, trained_alone

FOLDER = Path(__file__).parent / "models"
MODELS = {
    "mlp": {"mlp": {"hidden": [8, 12, 4]}},
    "convolutional": f"{FOLDER / 'convolutional.py'}:build",
    "transformer": f"{FOLDER / 'vision_transformer.py'}:build",
    "deep": {"mlp": {"hidden": [8] * 7}},
}
EXACT = {"atol": 1e-12, "rtol": 0}  # float64, weights of order 1

# strategy, workers, replicas, micro-batches
CASES = [
    ("model_parallel", 2, 1, 1),
    ({"model_parallel": {"stages": 3}}, 3, 1, 1),
    ("pipeline", 2, 1, 4),
    ("pipeline", 4, 2, 4),
    ({"pipeline": {"schedule": "gpipe", "micro_batches": 2}}, 6, 3, 2),
    ({"pipeline": {"stages": 3, "micro_batches": 4, "balance": [2, 1, 1]}}, 3, 1, 4),
    ({"pipeline": {"stages": 4, "micro_batches": 8}}, 4, 1, 8),
    ({"pipeline": {"stages": 4, "micro_batches": 4, "schedule": "gpipe"}}, 8, 2, 4),
    ("tensor", 2, 1, 1),
    ("tensor", 6, 3, 1),
    ({"tensor": {"degree": 4}}, 4, 1, 1),
    ({"hybrid": {"tensor": 2}}, 4, 1, 4),
    (
        {"hybrid": {"data": 2, "tensor": 2, "schedule": "gpipe", "micro_batches": 2}},
        8,
        2,
        2,
    ),
    ({"hybrid": {"data": 2, "pipeline": 1, "tensor": 2}}, 4, 2, 1),
    ({"pipeline": {"stages": 3, "balance": "times"}}, 3, 1, 4),
    ({"pipeline": {"schedule": "gpipe", "recompute": "layer"}}, 2, 1, 4),
    ({"pipeline": {"stages": 3, "recompute": "all"}}, 6, 2, 4),
    ({"hybrid": {"tensor": 2, "micro_batches": 2, "recompute": "layer"}}, 4, 1, 2),
    ({"tensor": {"recompute": "all"}}, 2, 1, 1),
    ({"pipeline": {"schedule": "interleaved"}}, 2, 1, 4),
    (
        {
            "pipeline": {
                "schedule": "interleaved",
                "micro_batches": 2,
                "recompute": "layer",
            }
        },
        4,
        2,
        2,
    ),
    ({"hybrid": {"tensor": 2, "schedule": "interleaved", "micro_batches": 2}}, 4, 1, 2),
]
ALONE = [  # one worker holds each replica
    {"model_parallel": {"stages": 1}},
    {"pipeline": {"stages": 1}},
    {"tensor": {"degree": 1}},
    {"hybrid": {"pipeline": 1}},
    {"torch_pipeline": {"stages": 1}},
    {"torch_tensor": {"degree": 1}},
]
DIVIDED = [  # among all workers, of which there may be one
    {"fsdp": {"shard": 1}},
    {"fsdp": {"shard": 3}},
    "adaptive",
    "torch_fsdp",
]
WITHIN = [
    "allreduce",
    {"local_sgd": {"steps": 3, "optimizer_state": "average"}},
    {"slowmo": {"steps": 4}},
]
WITHIN += [
    {"diloco": {"steps": 4}},
    {"daso-heat": {"devices_per_node": 1, "warm_up_epochs": 1, "cool_down_epochs": 0}},
]


@pytest.fixture(scope="module")
def patterns():
    return images()


def balanced(strategy, model):
    """Return the strategy for a model of five layers, where it states a balance of four."""
    if isinstance(strategy, str) or model == "mlp":
        return strategy
    ((name, options),) = strategy.items()
    return (
        {name: {**options, "balance": [1, 1, 3]}}
        if isinstance(options.get("balance"), list)
        else strategy
    )


CUTS = [  # the first convolution of one plane has no partner in a chunk of its own
    (model, *case)
    for case in CASES
    for model in ("mlp", "convolutional", "transformer")
    if model != "convolutional"
    or "interleaved" not in str(case)
    or "tensor" not in str(case)
]


@pytest.mark.parametrize(
    ("model", "strategy", "workers", "replicas", "pieces"), CUTS, ids=str
)
def test_parts_train_as_whole_models_in_the_same_micro_batches(
    play, make_run, patterns, model, strategy, workers, replicas, pieces
):
    values = {"model": MODELS[model], "optimizer": {"sgd": {"momentum": 0.9}}}
    outcome, weights = play(balanced(strategy, model), workers, data=patterns, **values)
    expected = trained_alone(make_run(**values), patterns, replicas, pieces)
    torch.testing.assert_close(weights["final"], expected, **EXACT)
    assert [len(worker.epochs) for worker in outcome.workers] == [2] * workers
    assert outcome.facts.parameters == len(expected)


@pytest.mark.parametrize("model", ["mlp", "convolutional", "transformer"])
@pytest.mark.parametrize("strategy", ALONE + DIVIDED, ids=str)
def test_one_worker_a_replica_is_serial_bit_for_bit(play, patterns, strategy, model):
    """Weights, and metrics by running statistics; of two replicas those of allreduce."""
    values = {"model": MODELS[model], "optimizer": {"sgd": {"momentum": 0.9}}}

    def trained(strategy, workers):
        outcome, weights = play(strategy, workers, data=patterns, **values)
        return weights["final"], [each.metric for each in outcome.evaluations]

    pairs = [("serial", 1)] + [("allreduce", 2)] * (strategy in ALONE)
    for whole, workers in pairs:
        (expected, metrics), (found, own) = (
            trained(each, workers) for each in (whole, strategy)
        )
        assert torch.equal(found, expected)
        assert own == metrics


def drawing(input_shape, outputs):
    """Statistics of batches, and dropout, which draws numbers."""
    first = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(
        first, nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, outputs)
    )


@pytest.mark.parametrize("recompute", ["layer", "all"])
def test_what_is_computed_again_draws_the_same_numbers_and_counts_once(
    play, patterns, recompute
):
    """Weights and metrics, of running statistics, bit for bit."""
    found = []
    for kept in ("none", recompute):
        options = {"micro_batches": 2, "recompute": kept, "schedule": "gpipe"}
        outcome, weights = play(
            {"pipeline": options},
            2,
            data=patterns,
            model=f"{__file__}:drawing",
            epochs=3,
        )
        found.append((weights["final"], [each.metric for each in outcome.evaluations]))
    (kept, metrics), (again, metrics_again) = found
    assert torch.equal(kept, again)
    assert metrics == metrics_again


def test_the_last_batch_may_have_fewer_samples_than_micro_batches(
    play, make_run, patterns
):
    values = {"batch_per_worker": 95, "optimizer": "sgd"}
    _, weights = play({"pipeline": {"micro_batches": 95}}, 2, data=patterns, **values)
    torch.testing.assert_close(
        weights["final"], trained_alone(make_run(**values), patterns, 1, 95), **EXACT
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("shard", "workers"), [(1, 2), (2, 3), (3, 2), (3, 4)])
def test_shards_train_as_whole_models_do(
    monkeypatch, play, make_run, patterns, model, shard, workers
):
    # no replica computes for others
    monkeypatch.setattr(virtual_engine, "choose", lambda *_: Choice())
    # adam divides by rounding errors
    optimizer = {"adam": {}} if model == "mlp" else {"sgd": {"momentum": 0.9}}
    values = {"model": MODELS[model], "optimizer": optimizer, "lr": 0.02}
    _, weights = play({"fsdp": {"shard": shard}}, workers, data=patterns, **values)
    expected = trained_alone(make_run(**values), patterns, workers)
    torch.testing.assert_close(weights["final"], expected, **EXACT)


def test_shards_are_all_that_a_worker_keeps_between_steps(
    monkeypatch, play, recorded, patterns
):
    made = []

    class Noted(Replica):
        def epoch_done(self, epoch, agreed):
            made.append(self)
            super().epoch_done(epoch, agreed)

    monkeypatch.setattr(virtual_engine, "choose", lambda *_: Choice())
    monkeypatch.setattr(virtual_engine, "Replica", Noted)
    values = {"model": {"mlp": {"hidden": [64, 64]}}, "epochs": 1, "evaluate_every": 0}
    memory = [recorded("allreduce", 4, data=patterns, **values)[0].memory_bytes]
    for shard in (1, 2, 3):
        made.clear()
        play({"fsdp": {"shard": shard}}, 4, data=patterns, **values)
        memory.append(
            recorded({"fsdp": {"shard": shard}}, 4, data=patterns, **values)[
                0
            ].memory_bytes
        )
        whole = sum(unit.numbers for unit in made[0].division.units)
        kept = [0, 0]
        for unit in made[0].division.units:
            kept[0] += unit.whole.untyped_storage().nbytes() // 8
            kept[1] += unit.gradients.untyped_storage().nbytes() // 8
        assert [number >= whole for number in kept] == [shard < 3, shard < 2]
        assert [number == 0 for number in kept] == [shard == 3, shard > 1]
        assert (
            len(made[0].parameters)
            == len(made[0].gradients)
            == pytest.approx(whole / 4, abs=3)
        )
    assert memory == sorted(memory, reverse=True)
    assert memory[-1] < memory[0] / 2


def test_shards_need_layers_and_optimizers_without_norms(play):
    with pytest.raises(StudyError, match="optimizer lars needs whole layers"):
        registry.create("fsdp", {}).check(setting(2, optimizer="lars"))
    with pytest.raises(StudyError, match="option 'shard'"):
        registry.create("fsdp", {"shard": 4})


@pytest.mark.parametrize("within", WITHIN, ids=str)
def test_replicas_in_parts_agree_as_whole_ones_do(play, patterns, within):
    values = {
        "data": patterns,
        "model": MODELS["mlp"],
        "optimizer": {"sgd": {"momentum": 0.9}},
        "epochs": 3,
    }
    _, whole = play(within, 2, **values)
    _, parts = play(
        {"hybrid": {"tensor": 2, "micro_batches": 2, "within": within}}, 8, **values
    )
    torch.testing.assert_close(parts["final"], whole["final"], **EXACT)
    assert (parts["final"] - parts["initial"]).abs().max() > 0.01


def moves(strategy, stage, stages, pieces):
    """Moves in words; a letter follows for the chunk of layers where there are several."""
    created = registry.create(*strategy)
    letters = "abcdefgh" if created.groups() > stages else [""]
    order = created.order(stage, stages, pieces)
    return " ".join(
        f"{'F' if move.forward else 'B'}{move.micro_batch}{letters[move.chunk]}"
        for move in order
    )


def test_1f1b_keeps_as_many_forwards_ahead_as_stages_follow():
    pipeline = "pipeline", {"stages": 3, "micro_batches": 4}
    assert moves(pipeline, 0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert moves(pipeline, 1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert moves(pipeline, 2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.data())
def test_a_cut_by_times_has_the_fastest_slowest_stage(work, data):
    stages = data.draw(st.integers(2, len(work)))
    cuts = [
        [0, *inner, len(work)]
        for inner in combinations(range(1, len(work)), stages - 1)
    ]
    least = min(
        max(sum(work[first:last]) for first, last in pairwise(cut)) for cut in cuts
    )
    options = {"stages": stages, "micro_batches": stages, "balance": "times"}
    sizes = registry.create("pipeline", options).place(work, stages)
    assert (len(sizes), sum(sizes), min(sizes) > 0) == (stages, len(work), True)
    ends = [0, *accumulate(sizes)]
    assert max(sum(work[first:last]) for first, last in pairwise(ends)) == least


def test_gpipe_makes_all_forwards_first():
    gpipe = "pipeline", {"micro_batches": 3, "schedule": "gpipe"}
    assert moves(gpipe, 0, 2, 3) == moves(gpipe, 1, 2, 3) == "F0 F1 F2 B0 B1 B2"


def test_interleaved_sends_groups_of_micro_batches_through_all_chunks():
    """The order of Megatron-LM, and of torch's ScheduleInterleaved1F1B."""
    two = "pipeline", {"micro_batches": 4, "schedule": "interleaved"}
    assert (
        moves(two, 0, 2, 4)
        == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    )
    assert (
        moves(two, 1, 2, 4)
        == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    )


@pytest.mark.parametrize(
    ("stages", "chunks", "pieces"), [(2, 2, 4), (4, 3, 8), (3, 2, 3)]
)
def test_interleaved_is_the_order_of_torch(stages, chunks, pieces):
    options = {
        "stages": stages,
        "chunks": chunks,
        "micro_batches": pieces,
        "schedule": "interleaved",
    }
    own = registry.create("pipeline", options)
    theirs = object.__new__(ScheduleInterleaved1F1B)  # of no process group
    facts = {
        "pp_group_size": stages,
        "n_local_stages": chunks,
        "_n_microbatches": pieces,
    }
    vars(theirs).update(facts, microbatches_per_round=stages)
    for stage in range(stages):
        actions = [
            each
            for each in theirs._calculate_single_rank_operations(stage)
            if each is not None
        ]
        expected = [
            (
                each.computation_type.name == "FORWARD",
                each.microbatch_index,
                each.stage_index,
            )
            for each in actions
        ]
        moves = own.order(stage, stages, pieces)
        assert len(expected) == 2 * chunks * pieces
        assert [
            (move.forward, move.micro_batch, move.chunk * stages + stage)
            for move in moves
        ] == expected


@pytest.mark.parametrize(("stages", "pieces"), [(2, 4), (4, 2), (4, 8), (3, 7)])
def test_zbv_is_the_order_of_torch(stages, pieces):
    """With fewer micro-batches than 2 m - 1, too."""
    own = registry.create(
        "torch_pipeline",
        {"stages": stages, "micro_batches": pieces, "schedule": "zbv"},
        "virtual",
    )
    theirs = object.__new__(ScheduleZBVZeroBubble)  # of no process group
    vars(theirs).update(
        pp_group_size=stages, num_stages=2 * stages, _n_microbatches=pieces
    )
    names = {"inputs": "BACKWARD_INPUT", "weights": "BACKWARD_WEIGHT"}
    for stage in range(stages):
        actions = [
            each
            for each in theirs._calculate_single_rank_operations(stage)
            if each is not None
        ]
        expected = [
            (each.computation_type.name, each.microbatch_index, each.stage_index)
            for each in actions
        ]
        assert len(expected) == 3 * 2 * pieces
        groups = Mesh(pipeline=stages, folded=True).groups_of(stage, 2 * stages)
        found = own.order(stage, stages, pieces)
        assert expected == [
            (
                "FORWARD" if move.forward else names[move.half],
                move.micro_batch,
                groups[move.chunk],
            )
            for move in found
        ]


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 13))
def test_no_stage_waits_for_ever(stages, chunks, pieces):
    """In any number of micro-batches, as the last batch of an epoch may have fewer samples."""
    own = registry.create(
        "pipeline",
        {
            "stages": stages,
            "chunks": chunks,
            "micro_batches": stages,
            "schedule": "interleaved",
        },
    )
    left = [list(own.order(stage, stages, pieces)) for stage in range(stages)]
    assert all(len(set(each)) == len(each) == 2 * chunks * pieces for each in left)
    last, done = stages * chunks - 1, set()

    def is_ready(move, group):
        if move.forward:
            return group == 0 or (True, move.micro_batch, group - 1) in done
        return (True, move.micro_batch, group) in done and (
            group == last or (False, move.micro_batch, group + 1) in done
        )

    while any(left):
        before = len(done)
        for stage, own_left in enumerate(left):
            while own_left and is_ready(
                own_left[0], own_left[0].chunk * stages + stage
            ):
                move = own_left.pop(0)
                done.add((move.forward, move.micro_batch, move.chunk * stages + stage))
        assert len(done) > before


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_do_the_work_of_the_whole_model(model, chunks):
    """Floating-point operations of both passes, of the first layer too, which needs no gradient of its input."""
    whole = build_model(
        Component.model_validate(MODELS[model]),
        (1, 8, 8),
        3,
        "classification",
        torch.float64,
        0,
    )
    layers, sample, mesh = (
        layers_of(whole, model),
        torch.zeros(2, 1, 8, 8, dtype=torch.float64),
        Mesh(pipeline=2),
    )
    facts = facts_of(layers, sample)
    sizes = placed([1.0] * len(layers), 2 * chunks, "even")
    segments = [
        segment
        for part in range(2)
        for _, found in sizes_of(
            facts, held_by(layers, sizes, mesh, part, model), sizes, mesh, part, sample
        )
        for segment in found
    ]
    assert sum(segment.forward for segment in segments) == pytest.approx(1, rel=1e-12)
    assert sum(segment.backward for segment in segments) == pytest.approx(1, rel=1e-12)


def test_chunks_shorten_the_bubble(make_run, patterns, machine):
    """GOAL: smaller than that of 1f1b, in the priced schedule; of equal stages 1/v of it."""
    values = {
        "model": {"mlp": {"hidden": [64] * 7}},
        "batch_per_worker": 96,
        "epochs": 1,
        "execution": "modelled",
    }
    found = {}
    for schedule in ("1f1b", "interleaved"):
        run = make_run(
            {"pipeline": {"stages": 4, "micro_batches": 8, "schedule": schedule}},
            4,
            **values,
        )
        found[schedule] = row_of(run, simulate(run, patterns, machine)[0])
    assert found["interleaved"].compute_s == pytest.approx(
        found["1f1b"].compute_s, rel=1e-9
    )
    assert 0 < found["interleaved"].bubble_s < 0.7 * found["1f1b"].bubble_s
    assert found["interleaved"].train_s < found["1f1b"].train_s


def test_halves_of_backward_passes_shorten_the_bubble(make_run, patterns, machine):
    """Of equal layers that of interleaved, with as many chunks, is longer."""
    values = {
        "model": {"mlp": {"hidden": [64] * 7}},
        "batch_per_worker": 96,
        "epochs": 1,
        "execution": "modelled",
    }
    found = {}
    for schedule in ("interleaved", "zbv"):
        options = {"stages": 4, "micro_batches": 8, "schedule": schedule}
        run = make_run({"torch_pipeline": options}, 4, **values)
        found[schedule] = row_of(run, simulate(run, patterns, machine)[0])
    assert found["zbv"].compute_s == pytest.approx(
        found["interleaved"].compute_s, rel=1e-9
    )
    assert 0 < found["zbv"].bubble_s < found["interleaved"].bubble_s


def test_micro_batches_shorten_a_step_and_placement_does_not(play, patterns):
    values = {
        "data": patterns,
        "model": {"mlp": {"hidden": [32, 32, 32]}},
        "batch_per_worker": 48,
        "epochs": 1,
    }
    times = {"model_parallel": play("model_parallel", 2, **values)[0].train_s}
    for pieces in (2, 8):
        outcome, _ = play({"pipeline": {"micro_batches": pieces}}, 2, **values)
        # the machine of the tests takes equally long for any batch
        times[pieces] = outcome.train_s / pieces
    assert times[8] < times[2] < times["model_parallel"]


def test_bubbles_are_the_time_that_stages_wait_for_each_other(
    make_run, patterns, machine
):
    """Half of the layers' work on each stage, in any number of pieces: a stage idles while the other one works."""
    even = {"mlp": {"hidden": [64, 64, 64]}}
    values = {"model": even, "batch_per_worker": 96, "epochs": 1}
    for strategy, pieces in (
        ("model_parallel", 1),
        ({"pipeline": {"schedule": "gpipe", "micro_batches": 4}}, 4),
    ):
        run = make_run(strategy, 2, **values)
        trained, _ = simulate(run, patterns, machine)
        priced, _ = simulate(
            run.model_copy(update={"execution": "modelled"}), patterns, machine
        )
        rows = [row_of(run, outcome) for outcome in (trained, priced)]
        first, second = rows
        assert first.bubble_s == pytest.approx(second.bubble_s, rel=1e-12)
        assert 0 < first.bubble_s <= first.wait_s
        ideal = 1 / (pieces + 1)  # (m - 1) / (u + m - 1) of equal stages
        assert first.bubble_s / (first.compute_s + first.bubble_s) == pytest.approx(
            ideal, abs=0.12
        )
        division = (
            first.data_parallel,
            first.pipeline_parallel,
            first.tensor_parallel,
            first.micro_batches,
        )
        assert division == (1, 2, 1, pieces)


def test_workers_without_stages_have_no_bubble(make_run, patterns, machine):
    for strategy, workers, division in (
        ("allreduce", 2, (2, 1, 1, 1)),
        ("tensor", 4, (2, 1, 2, 1)),
    ):
        run = make_run(strategy, workers, epochs=1)
        row = row_of(run, simulate(run, patterns, machine)[0])
        assert row.bubble_s is None
        assert (
            row.data_parallel,
            row.pipeline_parallel,
            row.tensor_parallel,
            row.micro_batches,
        ) == division


def row_of(run, outcome):
    names = (
        "host_hash",
        "git_commit",
        "git_dirty",
        "packages_hash",
        "scheduler_job_id",
        "provenance",
    )
    provenance = dict.fromkeys(names)
    row, _ = rows_of(
        run,
        outcome,
        attempt=1,
        oversubscribed=False,
        started_utc="",
        provenance=provenance,
    )
    return row


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 3}, "3 workers hold a replica"),
        ({"micro_batches": 3}, "micro-batches do not divide"),
        ({"stages": 4, "micro_batches": 4}, "at most 2 stages"),
        ({"balance": [1, 2]}, "add up"),
        ({"schedule": "interleaved"}, "2 stages of 2 chunks for a model of 2 layers"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, said):
    with pytest.raises(StudyError, match=said):
        registry.create("pipeline", options).check(layers(4, 4, 4))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 4, "micro_batches": 2}, "1f1b needs"),
        ({"balance": [1, 1, 1]}, "3 numbers of layers for 2 stages"),
        ({"stages": 0}, "stages"),
        (
            {"schedule": "interleaved", "micro_batches": 3},
            "interleaved needs a multiple",
        ),
        (
            {"schedule": "interleaved", "balance": [1, 1, 1]},
            "3 numbers of layers for 2 stages of 2 chunks",
        ),
        ({"chunks": 2}, "chunks has no effect with schedule 1f1b"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options, said):
    with pytest.raises(StudyError, match=said):
        registry.create("pipeline", options)


def layers(*widths):
    model = nn.Sequential(
        *(nn.Linear(before, after) for before, after in pairwise(widths))
    )
    return cut_into(layers_of(model, "mine"))


def cut_into(found):
    """Return the setting of a model of these layers, which take equally long."""
    return replace(setting(4), layers=found, layer_work=[1.0] * len(found))


@pytest.mark.parametrize(
    ("strategy", "widths", "said"),
    [
        ({"tensor": {"degree": 4}}, (4, 6, 3), "4 does not divide its width 6"),
        ({"hybrid": {"tensor": 2}}, (3, 6, 3), "2 does not divide its width 3"),
        (
            {"hybrid": {"data": 3}},
            (4, 4, 4),
            "data 3 x pipeline 2 x tensor 1 make 6 workers, not 4",
        ),
        ({"hybrid": {"pipeline": 4}}, (4, 4, 4), "at most 2 stages"),
    ],
    ids=str,
)
def test_shares_and_meshes_that_do_not_fit_are_refused(strategy, widths, said):
    ((name, options),) = strategy.items()
    with pytest.raises((StudyError, ModelError), match=said):
        registry.create(name, options).check(layers(*widths))


def test_norms_of_layers_and_dropout_do_not_go_with_shares():
    lamb = setting(4, optimizer="lamb")
    with pytest.raises(StudyError, match="optimizer lamb needs whole layers"):
        registry.create("tensor", {}).check(lamb)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)
    )
    with pytest.raises(ModelError, match=r"dropout of 0\.1"):
        registry.create("tensor", {}).check(cut_into(layers_of(model, "mine")))


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (
            [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)],
            "no style for a convolution; use strategy tensor",
        ),
        (
            [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)],
            "no style for batch normalisation between two",
        ),
        ([nn.LayerNorm(4), nn.LayerNorm(4)], "no layer can be divided among 2 workers"),
    ],
    ids=str,
)
def test_what_torchs_styles_cannot_divide_is_refused(modules, said):
    with pytest.raises(ModelError, match=said):
        registry.create("torch_tensor", {}).check(
            cut_into(layers_of(nn.Sequential(*modules), "mine"))
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"within": "ssp"}, "no strategy of replicas that agree by collectives"),
        ({"within": "ddp"}, "no strategy of replicas"),
        ({"within": "pipeline"}, "no strategy of replicas"),
        ({"within": {"local_sgd": {"step": 3}}}, "within: .*step"),
        ({"pipeline": 0}, "pipeline"),
    ],
    ids=str,
)
def test_meshes_that_are_none_are_refused(options, said):
    with pytest.raises(StudyError, match=said):
        registry.create("hybrid", options)
