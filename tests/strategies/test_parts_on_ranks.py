"""Real ranks that hold parts of a model train as virtual workers and as whole models do."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from scalebench.pricing.machine import Choice
from scalebench.study.spec import Component
from scalebench.virtual import engine as virtual_engine
from scalebench.virtual.engine import simulate
from tests.conftest import some
from tests.strategies.parts_case import images, trained_alone
from tests.strategies.test_adaptive import MLPS, OTHERS, UNEVEN, WIDE
from tests.strategies.test_native_equality import launched, native_runs
from tests.strategies.test_parts_of_models import (
    ALONE,
    CASES,
    DIVIDED,
    EXACT,
    MODELS,
    WITHIN,
    balanced,
)

ON_RANKS = {  # by place in CASES
    "mlp": [1, 2, 5, 10, 21],
    "convolutional": [3, 6, 8, 13, 14, 15, 19],
    "transformer": [2, 8, 11, 17, 20],
}

WHOLE = {  # one worker holds each replica, by run: strategy, ranks
    f"whole-{place}-{ranks}": (strategy, ranks)
    for place, strategy in enumerate(ALONE + DIVIDED)
    for ranks in ((1, 2) if strategy in ALONE else (1,))
}

# Torch's own ways to divide a model, by run.
PIPELINES = {  # model, options of torch_pipeline, ranks, replicas, micro-batches, batch
    "pipeline-0": ("mlp", {}, 2, 1, 4, 8),
    "pipeline-1": ("mlp", {"schedule": "interleaved"}, 4, 2, 4, 8),
    "pipeline-2": ("convolutional", {"schedule": "gpipe", "stages": 3}, 3, 1, 4, 8),
    "pipeline-3": (
        "convolutional",
        {"schedule": "interleaved"},
        2,
        1,
        4,
        10,
    ),  # of 9 and 10, in pieces of 2 and 3
    "pipeline-4": ("transformer", {"stages": 4}, 4, 1, 4, 10),
    "pipeline-5": ("convolutional", {"schedule": "zbv"}, 2, 1, 4, 10),
    "pipeline-6": ("transformer", {"schedule": "zbv"}, 4, 2, 4, 8),
    "pipeline-7": (
        "deep",
        {"schedule": "zbv", "stages": 4, "micro_batches": 8},
        4,
        1,
        8,
        16,
    ),
}
SHARDS = {  # model, ranks, shard
    "shards-0": ("mlp", 2, 3),
    "shards-1": ("convolutional", 3, 2),
    "shards-2": ("transformer", 4, 3),
}
STYLES = {  # model, ranks, degree
    "styles-0": ("mlp", 2, 2),
    "styles-1": ("transformer", 2, 2),
    "styles-2": ("transformer", 4, 2),
    "styles-3": ("transformer", 4, 4),
}
OURS = {  # model, strategy, replicas and micro-batches on four ranks
    "ours-0": ("deep", {"pipeline": {"stages": 4, "micro_batches": 8}}, 1, 8),
    "ours-1": ("mlp", {"tensor": {"degree": 2}}, 2, 1),
    "ours-2": ("mlp", {"hybrid": {"pipeline": 2, "tensor": 2}}, 1, 4),
    "ours-3": ("mlp", {"fsdp": {"shard": 3}}, 4, 1),
}
# Of torch's own ways a run of each schedule, of pieces of unequal sizes, of each way
# to share a model.
ALWAYS = {f"pipeline-{place}" for place in (1, 2, 4, 5)}
ALWAYS |= {"styles-0", "styles-2", "shards-0", "shards-1"}
ALWAYS |= WHOLE.keys() | OURS.keys()

ON_EIGHT = [  # model, strategy, replicas, micro-batches
    ("mlp", {"model_parallel": {"stages": 4}}, 2, 1),
    ("convolutional", {"pipeline": {"stages": 4}}, 2, 4),
    (
        "transformer",
        {"pipeline": {"stages": 4, "schedule": "gpipe", "micro_batches": 2}},
        2,
        2,
    ),
    ("deep", {"pipeline": {"stages": 4, "schedule": "interleaved"}}, 2, 4),
    ("deep", {"pipeline": {"stages": 8, "micro_batches": 8}}, 1, 8),
    ("mlp", {"tensor": {"degree": 4}}, 2, 1),
    ("convolutional", "tensor", 4, 1),
    ("transformer", {"tensor": {"degree": 4, "recompute": "all"}}, 2, 1),
    ("mlp", {"hybrid": {"pipeline": 4, "tensor": 2}}, 1, 4),
    (
        "convolutional",
        {"hybrid": {"data": 2, "tensor": 2, "schedule": "gpipe", "micro_batches": 2}},
        2,
        2,
    ),
    ("transformer", {"hybrid": {"data": 2, "tensor": 2, "micro_batches": 2}}, 2, 2),
    ("mlp", {"fsdp": {"shard": 3}}, 8, 1),
    ("convolutional", {"fsdp": {"shard": 2}}, 8, 1),
    ("transformer", {"fsdp": {"shard": 1}}, 8, 1),
    ("transformer", {"adaptive": {"layout": "least", "again": False}}, 8, 1),
]
TORCHS_ON_EIGHT = [
    ("deep", {"torch_pipeline": {"stages": 4, "schedule": "zbv"}}, 2, 4),
    ("convolutional", {"torch_pipeline": {"stages": 4}}, 2, 4),
    ("transformer", {"torch_tensor": {"degree": 4}}, 2, 1),
    ("convolutional", {"torch_fsdp": {"shard": 3}}, 8, 1),
]


@pytest.fixture(scope="module")
def patterns():
    return images()


@pytest.fixture(autouse=True)
def _no_replica_computes_for_others(monkeypatch):
    monkeypatch.setattr(virtual_engine, "choose", lambda *_: Choice())


def small(make_run, engine, name, strategy, workers, model, batch=8):
    (run,) = native_runs(
        engine, {name: strategy}, make_run, counts=(workers,), model=MODELS[model]
    )
    return run.model_copy(update={"batch_per_worker": batch, "epochs": 2})


@pytest.fixture(scope="module")
def on_gloo(make_run, patterns, tmp_path_factory):
    """Function: a run, and what its ranks ended with; all that run with every change are one launch, the others too."""
    runs = {
        name: small(
            make_run, "gloo", name, {"torch_pipeline": options}, workers, model, batch
        )
        for name, (model, options, workers, _, _, batch) in PIPELINES.items()
    }
    # styles first: their groups end, and must not be those of shards on the same ranks
    for name, (model, workers, degree) in STYLES.items():
        runs[name] = small(
            make_run, "gloo", name, {"torch_tensor": {"degree": degree}}, workers, model
        )
    for name, (model, workers, shard) in SHARDS.items():
        runs[name] = small(
            make_run, "gloo", name, {"torch_fsdp": {"shard": shard}}, workers, model
        )
    for name, (strategy, workers) in WHOLE.items():
        runs[name] = small(make_run, "gloo", name, strategy, workers, "convolutional")
    for name, (model, strategy, _, _) in OURS.items():
        runs[name] = small(make_run, "gloo", name, strategy, 4, model)

    @cache
    def trained(always):
        wanted = [run for name, run in runs.items() if (name in ALWAYS) == always]
        folder = tmp_path_factory.mktemp("on_gloo")
        return launched("gloo", wanted, [], patterns, folder)

    return lambda name: (runs[name], trained(name in ALWAYS)[runs[name].run_id])


def check_twin(run, native, patterns, machine):
    """Check weights and metrics of real ranks against those of virtual workers; return what the latter counted."""
    twin = run.model_copy(update={"execution": "virtual", "engine": "virtual"})
    outcome, weights = simulate(twin, patterns, machine)
    np.testing.assert_allclose(
        native["final"], weights["final"].numpy(), **EXACT, err_msg=run.run_id
    )
    metrics = [
        evaluation.metric
        for evaluation in sorted(outcome.evaluations, key=lambda each: each.epoch)
    ]
    assert native["metrics"].tolist() == metrics, run.run_id
    return np.array([[report.syncs, report.bytes_sent] for report in outcome.workers])


def check_whole(run, native, patterns, replicas, pieces=1):
    """Check the weights of real ranks against those of `replicas` whole models."""
    alone = trained_alone(run, patterns, replicas, pieces)
    np.testing.assert_allclose(
        native["final"], alone.numpy(), **EXACT, err_msg=run.run_id
    )


def check_all(runs, found, expected, patterns, machine):
    """Check `runs`; `expected` has the replicas and micro-batches of those whose weights are those of whole models."""
    for run in runs:
        native = found[run.run_id]
        if run.run_id in expected:
            check_whole(run, native, patterns, *expected[run.run_id])
        counted = check_twin(run, native, patterns, machine)
        # which fills shards up
        alike = slice(1) if run.strategy.name == "torch_fsdp" else slice(2)
        assert native["counted"][:, alike].tolist() == counted[:, alike].tolist(), (
            run.run_id
        )


def divided_runs(make_run, engine):
    """Return runs on 2, 3 and 4 ranks, and replicas and micro-batches of those that end as whole models do."""
    runs, expected = [], {}
    for model, places in ON_RANKS.items():
        for place in places:
            strategy, workers, replicas, pieces = CASES[place]
            runs.append(
                small(
                    make_run,
                    engine,
                    f"{model}-{place}",
                    balanced(strategy, model),
                    workers,
                    model,
                )
            )
            expected[runs[-1].run_id] = replicas, pieces
    local = {"hybrid": {"micro_batches": 2, "within": WITHIN[1]}}
    runs += native_runs(engine, {"local": local}, make_run, model=MODELS["mlp"])
    for model, workers, shard in (
        ("mlp", 2, 3),
        ("convolutional", 3, 2),
        ("transformer", 4, 3),
        ("transformer", 2, 1),
    ):
        fsdp = {"fsdp": {"shard": shard}}
        runs.append(
            small(make_run, engine, f"{model}-shards-{shard}", fsdp, workers, model)
        )
        expected[runs[-1].run_id] = workers, 1
    return runs, expected


def adaptive_runs(make_run, engine):
    """Return runs whose layers are shared by stated degrees, and some whose degrees follow from what was measured."""
    stated = [
        small(
            make_run,
            engine,
            f"adaptive-{model}",
            {"adaptive": {"layout": degrees, "again": False}},
            workers,
            model,
            batch=7,
        )
        for model, workers, degrees in (*MLPS[:2], *OTHERS)
    ]
    measured = native_runs(
        engine, {"measured": "adaptive"}, make_run, counts=(2, 4), model=WIDE, **UNEVEN
    )
    return stated, measured


@pytest.fixture(scope="module")
def on_four(make_run, patterns, tmp_path_factory):
    """Function: what four ranks of an engine ended with in all runs, of one launch."""

    @cache
    def trained(engine):
        divided, _ = divided_runs(make_run, engine)
        stated, measured = adaptive_runs(make_run, engine)
        folder = tmp_path_factory.mktemp(engine)
        return launched(engine, [*divided, *stated, *measured], [], patterns, folder)

    return trained


@pytest.mark.parametrize("engine", some(["mpi", "gloo"], "mpi"))
def test_real_ranks_train_as_virtual_workers_and_whole_models_do(
    make_run, patterns, machine, on_four, engine
):
    """On 2, 3 and 4 ranks: weights, bytes and metrics."""
    runs, expected = divided_runs(make_run, engine)
    assert {run.workers for run in runs} == {2, 3, 4}
    check_all(runs, on_four(engine), expected, patterns, machine)


@pytest.mark.parametrize("engine", some(["mpi", "gloo"], "mpi"))
def test_layers_shared_by_degrees_of_their_own_train_as_virtual_workers_do(
    make_run, patterns, machine, on_four, engine
):
    """Weights, bytes and metrics of stated layouts, with running statistics and after warm-up steps."""
    stated, measured = adaptive_runs(make_run, engine)
    expected = {run.run_id: (run.workers, 1) for run in stated}
    check_all(stated, on_four(engine), expected, patterns, machine)
    for run in measured:
        check_whole(run, on_four(engine)[run.run_id], patterns, run.workers)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["mpi", "gloo"])
def test_eight_real_ranks_train_as_virtual_workers_and_whole_models_do(
    make_run, patterns, machine, tmp_path, engine
):
    runs, expected = [], {}
    for model, strategy, replicas, pieces in ON_EIGHT + (
        TORCHS_ON_EIGHT if engine == "gloo" else []
    ):
        runs.append(small(make_run, engine, f"{len(runs)}-{model}", strategy, 8, model))
        expected[runs[-1].run_id] = replicas, pieces
    local = {"hybrid": {"tensor": 2, "micro_batches": 2, "within": WITHIN[1]}}
    runs += native_runs(
        engine, {"local": local}, make_run, counts=(8,), model=MODELS["mlp"]
    )
    found = launched(engine, runs, [], patterns, tmp_path, ranks=8)
    check_all(runs, found, expected, patterns, machine)


@pytest.mark.parametrize("name", OURS)
def test_parts_on_ranks_of_gloo_train_as_whole_models_do(
    on_gloo, patterns, machine, name
):
    run, native = on_gloo(name)
    _, _, replicas, pieces = OURS[name]
    expected = {run.run_id: (replicas, pieces)}
    check_all([run], {run.run_id: native}, expected, patterns, machine)


@pytest.mark.parametrize("name", WHOLE)
def test_one_rank_a_replica_is_serial_bit_for_bit(on_gloo, patterns, machine, name):
    """Of two replicas allreduce."""
    run, native = on_gloo(name)
    whole = run.model_copy(
        update={
            "execution": "virtual",
            "engine": "virtual",
            "strategy": Component(name="serial" if run.workers == 1 else "allreduce"),
        }
    )
    outcome, weights = simulate(whole, patterns, machine)
    assert native["final"].tolist() == weights["final"].tolist()
    assert native["metrics"].tolist() == [each.metric for each in outcome.evaluations]


@pytest.mark.parametrize("name", some(list(PIPELINES), *ALWAYS))
def test_torchs_own_pipelines_train_as_ours(on_gloo, patterns, machine, name):
    """Weights, metrics and bytes; torch fills unequal micro-batches up, and so sends more."""
    run, native = on_gloo(name)
    _, _, _, replicas, pieces, batch = PIPELINES[name]
    check_whole(run, native, patterns, replicas, pieces)
    counted = check_twin(run, native, patterns, machine)
    assert native["counted"].tolist() == counted.tolist() or batch == 10
    assert (native["counted"] >= counted).all()


@pytest.mark.parametrize("name", some(list(SHARDS), *ALWAYS))
def test_torchs_own_shards_train_as_ours(on_gloo, patterns, machine, name):
    """Weights and metrics, with running statistics and after warm-up steps, which are undone."""
    run, native = on_gloo(name)
    check_whole(run, native, patterns, run.workers)
    counted = check_twin(run, native, patterns, machine)
    assert native["counted"][:, 0].tolist() == counted[:, 0].tolist()


@pytest.mark.parametrize("name", some(list(STYLES), *ALWAYS))
def test_torchs_own_styles_train_as_ours(on_gloo, patterns, machine, name):
    """Weights, metrics and bytes, after warm-up steps, which are undone."""
    run, native = on_gloo(name)
    check_whole(run, native, patterns, run.workers // run.strategy.options["degree"])
    counted = check_twin(run, native, patterns, machine)
    assert native["counted"].tolist() == counted.tolist()
