"""Predicted times against priced schedules of whole trainings, and against the event engine for queues."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from scalebench.calibration.calibration_file import Calibration, read_calibration
from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.errors import ModelError, StudyError
from scalebench.models.layer_counting import count_model
from scalebench.models.layers import Layer, LayerTable
from scalebench.models.registry import build_model
from scalebench.models.zoo.layers import load_layers
from scalebench.pricing.charges import Charges
from scalebench.pricing.devices import MeasuredSteps, Stated, step_table
from scalebench.pricing.machine import Machine, OperationTime, StepTimes, Trained
from scalebench.pricing.memory import memory_of
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.price import price
from scalebench.pricing.program import EvenPlan
from scalebench.pricing.recording import record, record_each
from scalebench.pricing.uncertainty import outside
from scalebench.pricing.workload import Workload
from scalebench.strategies import registry
from scalebench.study.spec import Component
from scalebench.system.clock import Task
from scalebench.virtual.engine import model_time
from tests.facts import naming, together

WORKERS, EPOCHS, STEPS, BATCH = 16, 20, 48, 4
QUEUES = (
    "asp",
    "ssp",
    "dssp",
    "bsp",
    "bsp_backup",
    "elastic_bsp",
    "epoch_async",
    "dislib-compat-async",
    "ad_psgd",
)
TRAITS = {name: registry.create(name, {}).traits for name in registry.names()}
# models
WHOLE = [
    name
    for name, traits in TRAITS.items()
    if not traits.cuts_model(4) and not traits.sharded
]
LOCK_STEP = [name for name in WHOLE if name not in (*QUEUES, "serial")]


def layers() -> LayerTable:
    sizes = (200_000, 50_000, 10_000)
    return LayerTable(
        "small",
        tuple(Layer(f"layer{n}", "gemm", n, 2 * n, 100, 100, 100) for n in sizes),
        "test",
        (100,),
    )


def predictor(**workload) -> Predictor:
    platform = Platform(load_cluster("juwels-booster"), Stated(1e-3, BATCH))
    settings = {
        "samples": WORKERS * STEPS * BATCH,
        "epochs": EPOCHS,
        "batch": BATCH,
    } | workload
    return Predictor(Workload(layers(), **settings), platform)


@pytest.mark.parametrize(
    "strategy",
    [*LOCK_STEP, "allreduce: {collective: hierarchical}", "post_local_sgd: {start: 3, subgroup: 0}",
     "epoch_average: {every: 3}", "local_sgd: {steps: 5}", "allreduce: {accumulate: 4}",
     "allreduce: {accumulate: 7}", "easgd: {steps: 13}", "torch_local_sgd: {warmup: 20, period: 7}",
     "daso-fixed: {global_skip: 5, local_skip: 3, warm_up_epochs: 6}",
     "hierarchical_local_sgd: {groups: {4: 3, 64: 10}}",
     "epoch_average: {every: 3, aggregation: master}", "post_local_sgd: {start: 61, first: 13}"],
)  # fmt: skip
def test_prediction_is_the_price_of_the_whole_training(strategy):
    """An excerpt of few steps on equal workers, against every step of all workers."""
    component = Component.model_validate(yaml.safe_load(strategy))
    own = predictor()
    case = Case(own.platform, BATCH)
    found = own.times(component, WORKERS, [case])
    program = own.strategy(component)
    run = own._run(component, WORKERS, EPOCHS)
    schedules = record(run, program, EvenPlan(WORKERS, STEPS, BATCH), own._model, 4)
    table = step_table(own.platform.device, own.workload.layers, [BATCH])
    costs = own._costs_on(own.platform, program.engines[0], WORKERS)
    charges = Charges(costs, [StepTimes(table, seed=0, repetition=0)], np.ones(WORKERS))
    (whole,) = price(schedules, charges)
    if strategy in (
        "gossip",
        "noloco",
    ):  # a pair's second message follows its first; predicted is each worker's own
        assert found.time[0] == pytest.approx(whole.train_s, rel=0.06)
        return
    rel = {"horovod": 5e-3}.get(strategy, 1e-9)  # its cycle drifts against the steps
    assert found.time[0] == pytest.approx(whole.train_s, rel=rel)
    # of a pair that merges, one worker is done before the other
    if rel == 1e-9 and strategy != "adasum":
        assert found.comm[0] == pytest.approx(
            whole.end.seconds.mean(axis=1)[Task.COMM], rel=1e-8
        )
        assert found.transfer[0] == pytest.approx(whole.end.transfer.mean(), rel=1e-8)


@pytest.mark.parametrize("step_s", [1e-6, 1e-2], ids=["busy", "idle"])
@pytest.mark.parametrize("strategy", QUEUES)
def test_queue_is_near_the_event_engine(make_run, blobs, strategy, step_s):
    """A server or shared model that is busy all the time, or hardly ever, priced by its steady state."""
    platform = Platform(load_cluster("ethernet-10g"), Stated(step_s, 2))
    workers, epochs = 8, 6
    own = Predictor(Workload(layers(), blobs.n_train, epochs, 2), platform)
    found = own.times(Component(name=strategy), workers, [Case(platform, 2)])
    optimizer = {"sgd": {"momentum": 0.9}}
    run = make_run(
        strategy,
        workers,
        epochs=epochs,
        batch_per_worker=2,
        dtype="float32",
        optimizer=optimizer,
    )
    machine = Machine(
        platform.cluster,
        EngineCosts(),
        [step_table(platform.device, own.workload.layers, [2])],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scalebench.virtual.lock_step.meta_model", lambda *_: own._model)
        outcome = model_time(
            run.model_copy(update={"execution": "modelled"}), blobs, machine
        )
    assert outcome.status == "completed", outcome.error
    took = max(worker.train_s for worker in outcome.workers)
    # Backups spare the last push, and who meets whom by chance is not known: 7 % and 15
    # %.
    rel = {"bsp_backup": 0.07, "ad_psgd": 0.15}.get(strategy, 0.01)
    assert found.time[0] == pytest.approx(took, rel=rel)


def rounds_of_tasks() -> list[EngineCost]:
    points = {1: [(0, 1e-3), (4096, 2e-3)], 2: [(0, 2e-3), (4096, 5e-3)]}
    return [
        EngineCost(engine="tasks", ranks=n, alpha_s=1e-3, points=own, source="test")
        for n, own in points.items()
    ]


@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        *(
            (name, "auto")
            for name in LOCK_STEP
            if name not in ("gossip", "noloco", "horovod")
        ),
        ("epoch_average", "tasks"),
        ("epoch_average", "gloo"),
        ("diloco", "nccl"),
    ],
)
def test_prediction_by_a_calibration_is_the_virtual_time_of_that_study(
    make_run, blobs, machine, tmp_path, strategy, engine
):
    """One file charges both: steps, shuffles, engines and operations of the strategy, without jitter."""
    operation = OperationTime(seconds=2e-4, per_member_s=1e-5)
    run = make_run(
        strategy,
        4,
        epochs=12,
        batch_per_worker=8,
        virtual={"jitter": "none", "engine": engine},
    )
    schedule = record(
        run,
        registry.create(strategy, {}, "virtual"),
        EvenPlan(4, 3, 8),
        _meta(run, blobs),
        2,
    )[0]
    names = {
        event.name for event in schedule.events if event.kind in ("other", "merge")
    }
    trained = Trained(model=run.model, optimizer=run.optimizer, dataset="blobs", samples=96, input_shape=(2,),
                      outputs=3, task="classification")  # fmt: skip
    tables = [
        table.model_copy(update={"shuffle_s_per_sample": 1e-6})
        for table in machine.tables
    ]
    Calibration(
        key="test", trained=trained, tables=tables,
        engines=EngineCosts(entries=[*machine.engines.entries, *rounds_of_tasks()]),
        operations={strategy: dict.fromkeys(names, operation)},
    ).save(tmp_path / "machine.json")  # fmt: skip
    read = read_calibration(tmp_path / "machine.json")
    charged = Machine(machine.cluster, read.engines, read.tables, read.operations)
    outcome = model_time(
        run.model_copy(update={"execution": "modelled"}), blobs, charged
    )
    assert outcome.status == "completed", outcome.error
    platform = Platform(
        charged.cluster,
        MeasuredSteps(tuple(read.tables)),
        read.engines,
        engine,
        read.operations,
    )
    layers = count_model(lambda _: _meta(run, blobs), "mlp", (2,))
    own = Predictor(
        Workload(layers, 96, 12, 8, False, run.optimizer, run.dtype, read.trained),
        platform,
    )
    found = own.times(Component(name=strategy), 4, [Case(platform, 8)])
    assert found.time[0] == pytest.approx(
        max(worker.train_s for worker in outcome.workers), rel=1e-9
    )
    for column in ("compute", "data", "other"):
        seconds = np.mean(
            [getattr(worker, f"{column}_s") for worker in outcome.workers]
        )
        assert getattr(found, column)[0] == pytest.approx(
            seconds, rel=1e-9, abs=1e-15
        ), column


def _meta(run, data):
    dtype = getattr(torch, run.dtype)
    return build_model(
        run.model, data.input_shape, data.outputs, data.task, dtype, run.seed
    ).to("meta")


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (2, ()),
        (4, ("mpi measured among 2 ranks",)),
        (8, ("mpi measured on 1 node, its links are modelled beyond",)),
    ],
)
def test_collectives_that_were_not_measured_are_told(workers, said):
    cost = EngineCost(
        engine="mpi", ranks=2, alpha_s=1e-5, points=[(4, 1e-5)], source="a test"
    )
    own = predictor()
    known = replace(
        own.platform,
        engines=EngineCosts(entries=[cost]),
        operations={"allreduce": {}, "ddp": {}},
    )
    measured = Predictor(own.workload, known)
    assert outside(measured, Component(name="allreduce"), workers) == said
    assert outside(measured, Component(name="ddp"), workers) == (), (
        "of gloo nothing was measured"
    )
    for name in ("epoch_average", "torch_fsdp"):
        (operations, *_) = outside(measured, Component(name=name), workers)
        assert together(operations, name, "not measured")


def test_shared_models_take_memory_of_their_hosts_only():
    """Every worker of ad_psgd can reach the models of all others, and holds its own."""
    own, name = predictor(), Component(name="ad_psgd")
    assert memory_of(own, name, 64).strategy == memory_of(own, name, 4).strategy


def cuttable(batches: int = WORKERS * STEPS) -> Predictor:
    """Of six products, each followed by what works element by element; on that many batches of samples."""
    rows = []
    for place, width in enumerate((64, 128, 256, 128, 64, 32)):
        before = rows[-1].activations if rows else 32
        size = before * width + width
        rows.append(
            Layer(
                f"{place}",
                "gemm",
                size,
                2 * before * width,
                before,
                width,
                width,
                1,
                1,
                width,
                before,
            )
        )
        rows.append(Layer(f"act{place}.relu", "relu", 0, 0, width, width, width))
    table = LayerTable("stack", tuple(rows), "test", (32,))
    platform = Platform(load_cluster("juwels-booster"), Stated(1e-3, 16))
    return Predictor(Workload(table, batches * 16, 6, 16), platform)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("model_parallel", 8),
        ("pipeline: {stages: 4, micro_batches: 8}", 16),
        ("pipeline: {schedule: gpipe, balance: [2, 4], recompute: all}", 2),
        ("tensor: {degree: 4}", 8),
        (
            "hybrid: {tensor: 2, micro_batches: 2, recompute: layer, within: {local_sgd: {steps: 4}}}",
            8,
        ),
        ("fsdp: {shard: 1}", 4),
        ("fsdp", 16),
        ("adaptive: {layout: least}", 4),
    ],
)
def test_parts_of_a_model_are_predicted_as_every_step_is_priced(strategy, workers):
    """An excerpt of one replica, against all steps of all workers."""
    component = Component.model_validate(yaml.safe_load(strategy))
    # 12 steps of each replica
    own = cuttable(12 * cuttable().mesh(component, workers).data)
    found = own.times(component, workers, [Case(own.platform, 16)])
    program, mesh, pieces = (
        own.strategy(component),
        own.mesh(component, workers),
        own.micro_batches(component, workers),
    )
    steps, batch = own.batches(component, workers)
    assert batch == 16
    run = own._run(component, workers, 6)
    plan = EvenPlan(mesh.data, steps, 16)
    schedules = list(
        record_each(run, program, plan, own._model, 4, cut=own.cut(16 / pieces))
    )
    table = step_table(
        own.platform.device, own.workload.layers, sorted({16, 16 // pieces})
    )
    charges = Charges(
        own._costs_on(own.platform, "mpi"),
        [StepTimes(table, repetition=None)],
        np.ones(workers),
    )
    (whole,) = price(schedules, charges)
    assert found.time[0] == pytest.approx(whole.train_s, rel=1e-9)
    if mesh.data == 1 or mesh.pipeline == 1:  # of equal replicas one stands for all
        assert found.bubble[0] == pytest.approx(
            whole.end.bubble.mean(), rel=1e-8, abs=1e-12
        )
    assert (found.bubble[0] > 0) == (mesh.pipeline > 1)


@pytest.mark.parametrize(
    ("strategy", "ours", "workers"),
    [
        ("torch_fsdp", "fsdp", 4),
        ("torch_tensor: {degree: 2}", "tensor: {degree: 2}", 4),
        ("fsdp: {shard: 1}", "fsdp: {shard: 1}", 2),
        ("tensor: {degree: 2}", "tensor: {degree: 2}", 4),
        ("adaptive: {layout: least}", "adaptive: {layout: least}", 2),
    ],
)
def test_overhead_of_shared_layers_is_added_to_each_step(strategy, ours, workers):
    component, plain = (
        Component.model_validate(yaml.safe_load(each)) for each in (strategy, ours)
    )
    own = cuttable()
    measured = {str(component): {"step_overhead": OperationTime(seconds=1e-3)}}
    platform = replace(own.platform, operations=measured)
    slower, uncharged, faster = (
        own.times(each, workers, [Case(place, 16)]).time[0]
        for each, place in (
            (component, platform),
            (component, own.platform),
            (plain, own.platform),
        )
    )
    assert uncharged == faster
    steps, _ = own.batches(component, workers)
    assert slower - faster == pytest.approx(6 * steps * 1e-3, rel=1e-9)


def test_bubbles_shrink_with_micro_batches_and_layers_that_cannot_be_cut_are_refused():
    own = cuttable()
    shares = []
    for pieces in (2, 4, 16):
        component = Component(
            name="pipeline", options={"micro_batches": pieces, "balance": [3, 3]}
        )
        found = own.times(component, 2, [Case(own.platform, 16)])
        shares.append(found.bubble[0] / found.time[0])
    assert shares == sorted(shares, reverse=True)
    with pytest.raises(StudyError, match="at most 6 stages"):
        own.times(
            Component(name="pipeline", options={"stages": 8, "micro_batches": 8}),
            8,
            [Case(own.platform, 16)],
        )
    with pytest.raises(StudyError, match="5 are no multiple of 2"):
        own.times(Component(name="pipeline"), 5, [Case(own.platform, 16)])
    with pytest.raises(
        ModelError,
        match=naming("3 workers", "3", "width 64"),
    ):
        own.times(
            Component(name="tensor", options={"degree": 3}), 3, [Case(own.platform, 16)]
        )


def test_a_cut_by_times_shortens_a_step():
    """Six products with work in 1 : 4 : 16 : 16 : 4 : 1, the two largest of which an even cut places on one stage."""
    own = cuttable()
    found = {}
    for balance in ("even", "times"):
        component = Component(
            name="pipeline",
            options={"stages": 3, "micro_batches": 8, "balance": balance},
        )
        found[balance] = float(
            own.times(component, 3, [Case(own.platform, 16)]).time[0]
        )
    assert [each.part.stage.last for each in own.schedules(component, 3)] == [3, 4, 6]
    assert found["times"] < 0.8 * found["even"]


def test_recomputation_takes_another_forward_pass_and_keeps_less():
    own, compute, memory = cuttable(), [], []
    for recompute in ("none", "layer", "all"):
        component = Component(
            name="pipeline", options={"schedule": "gpipe", "recompute": recompute}
        )
        compute.append(
            float(own.times(component, 2, [Case(own.platform, 16)]).compute[0])
        )
        memory.append(memory_of(own, component, 2))
    none, *again = compute  # a third of a step is the forward pass
    assert again == pytest.approx([none * 4 / 3] * 2, rel=1e-12)
    # Elements of samples: of the first stage 2 (64 + 128 + 256) are kept; of the second
    # one its inputs 256 + 128 + 64 and 2 x 128 of a layer, or its input 256 and 2 (128
    # + 64 + 32).
    kept = [16 * 896, 16 * 448 + 4 * 256, 16 * 256 + 4 * 448]
    assert [each.activations for each in memory] == [4 * elements for elements in kept]
    assert (
        max(each.parameters for each in memory)
        - min(each.parameters for each in memory)
        == 4 * 224
    )


def test_attention_in_a_table_is_divided_by_heads():
    platform = Platform(load_cluster("juwels-booster"), Stated(1e-3, 16))
    own = Predictor(Workload(load_layers("vit_b16"), 1600, 1, 16), platform)
    own.times(Component(name="tensor", options={"degree": 4}), 4, [Case(platform, 16)])
    with pytest.raises(
        ModelError,
        match=naming("blocks.0.attention.bmm", "8 workers", "heads 12"),
    ):
        own.times(
            Component(name="tensor", options={"degree": 8}), 8, [Case(platform, 16)]
        )


def test_memory_of_parts_is_that_of_the_fullest_worker():
    own = cuttable()
    whole = memory_of(own, Component(name="allreduce"), 4)

    def of(name, workers=4, **options):
        return memory_of(own, Component(name=name, options=options), workers)

    held = [
        schedule.part.parameters
        for schedule in own.schedules(Component(name="pipeline"), 2)
    ]
    assert 4 * sum(held) == whole.parameters
    assert of("pipeline", 2).parameters == of("pipeline", 2).gradients == 4 * max(held)
    some, all_of = (
        of("pipeline", 2, micro_batches=8),
        of("pipeline", 2, micro_batches=8, schedule="gpipe"),
    )
    assert some.activations < all_of.activations <= whole.activations
    assert of("tensor", degree=4).parameters == pytest.approx(
        whole.parameters / 4, rel=0.01
    )
    shards = [of("fsdp", shard=shard) for shard in (1, 2, 3)]
    assert [each.optimizer for each in shards] == pytest.approx(
        [whole.optimizer / 4] * 3, abs=96
    )
    assert [each.total for each in shards] == sorted(
        (each.total for each in shards), reverse=True
    )
    assert shards[1].gradients < shards[0].gradients
    assert shards[2].parameters < shards[1].parameters
