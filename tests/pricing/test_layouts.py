"""Layouts of a training: the best of all against pricing every one, memory against recordings, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.device import load_device
from scalebench.errors import UsageError
from scalebench.models.layer_counting import count_model
from scalebench.models.parts import facts_of, layers_of
from scalebench.models.zoo.layers import load_layers
from scalebench.pricing.devices import MeasuredSteps, Roofline, Stated, step_table
from scalebench.pricing.held_parts import cut_of
from scalebench.pricing.layout_costs import Layout
from scalebench.pricing.layouts import Planner
from scalebench.pricing.machine import LayerShare
from scalebench.pricing.memory import memory_of
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.workload import Workload
from scalebench.strategies import registry
from scalebench.strategies.parts import PartsOfModel
from scalebench.study.spec import Component
from tests.conftest import some

_SHARES = (0.5, 0.1, 0.1, 0.1, 0.1, 0.1)  # of six equal layers, as measured


def planner(
    devices=8, batch=64, model="vit_b16", memory_gib=None, cluster="ethernet-10g"
):
    platform = Platform(
        load_cluster(cluster),
        Roofline(load_device("a100-40gb")),
        jitter=0.03,
        stated_gib=memory_gib,
    )
    return Planner(
        Predictor(
            Workload(load_layers(model), 1000 * batch, 90, batch, in_all=True), platform
        ),
        devices,
    )


@pytest.mark.parametrize(
    "cluster", some(["ethernet-10g", "juwels-booster"], "juwels-booster")
)
def test_the_best_is_that_of_pricing_every_layout(cluster):
    own = planner(batch=32, cluster=cluster)
    plan = own.plan()
    assert plan.priced < plan.tried == len(own.layouts)
    every = [own.costs.price(layout) for layout in own.layouts]
    for step in plan.steps:
        assert step.time.value == min(
            each.time.value for each in every if each.layout.kind == step.layout.kind
        )
    assert plan.best.time.value == min(each.time.value for each in every)
    for each in every:
        assert own.costs.least_s(each.layout) <= each.time.value * (1 + 1e-9), (
            each.layout
        )
    assert plan.greedy is not None
    assert plan.greedy.time.value >= plan.best.time.value


@pytest.mark.parametrize(
    ("model", "batch", "cluster", "solver"),
    [
        ("resnet50", 32, "ethernet-10g", "greedy"),
        ("alexnet", 1024, "juwels-booster", "viterbi"),
    ],
)
def test_adaptive_is_the_faster_one_of_both_solvers(model, batch, cluster, solver):
    """The greedy layout moves more bytes, in fewer messages or more."""
    own = planner(devices=4, batch=batch, model=model, cluster=cluster)
    plan, layouts = own.plan(), own.adaptive_layouts
    assert layouts.keys() == {"viterbi", "greedy"}
    assert plan.adaptive.layout == layouts[solver]
    assert plan.adaptive_other.layout in layouts.values()
    assert plan.adaptive.time.value < plan.adaptive_other.time.value


def test_layouts_are_all_meshes_with_their_micro_batches():
    found = planner(devices=4, batch=8).layouts
    whole = {(4, 1, 1, 1, 1), (2, 1, 2, 1, 1), (1, 1, 4, 1, 1)}
    placed = {(2, 2, 1, 1, 1), (1, 4, 1, 1, 1)}
    staged = [
        (2, 2, 1, 2),
        (2, 2, 1, 4),
        (1, 4, 1, 4),
        (1, 4, 1, 8),
        (1, 2, 2, 2),
        (1, 2, 2, 4),
        (1, 2, 2, 8),
    ]
    assert {
        (
            each.mesh.data,
            each.mesh.pipeline,
            each.mesh.tensor,
            each.micro_batches,
            each.chunks,
        )
        for each in found
    } == whole | placed | {(*each, chunks) for each in staged for chunks in (1, 2)}
    assert [each.kind for each in found].count("data") == 1
    # data, three of shards, tensor, placement, gpipe, other pipelines, hybrid, adaptive
    assert len({each.kind for each in found}) == 4 + 6
    orders = [each.strategy.options.get("schedule") for each in found]
    assert orders.count("gpipe") == sum(mesh[2] == 1 for mesh in staged)


def test_memory_without_a_recording_is_that_of_the_recording():
    own = planner(devices=8, batch=32, memory_gib=0.8)
    computed_again = 0
    for layout in own.layouts:
        if layout.mesh.parts > 1:
            recorded = memory_of(own.predictor, layout.strategy, 8)
            assert own.costs.memory(layout) == recorded, layout
            computed_again += "recompute" in layout.strategy.options
    assert computed_again


def test_times_are_those_of_a_prediction():
    """Of a step of many: pipelines of further steps begin where stages are free."""
    own = planner(batch=64)
    long = Predictor(
        replace(own.predictor.workload, samples=64 * 100), own.predictor.platform
    )
    steps = own.plan().steps
    assert (
        {step.layout.kind for step in steps}
        == {layout.kind for layout in own.layouts}
        > {"data", "hybrid"}
    )
    for step in steps:
        times = long.times(step.layout.strategy, 8, [Case(own.predictor.platform, 64)])
        assert step.time.value == pytest.approx(float(times.time[0]) / 100, rel=0.03), (
            step.layout
        )


def test_activations_are_computed_again_where_they_do_not_fit():
    free, scarce = planner(batch=256), planner(batch=256, memory_gib=4)
    assert not any(
        "recompute" in step.layout.strategy.options for step in free.plan().steps
    )
    plan = scarce.plan()
    assert any("recompute" in step.layout.strategy.options for step in plan.steps)
    assert all(step.memory.total <= 4 * 2**30 for step in plan.steps)
    assert plan.unfitting
    assert plan.best.time.value >= free.plan().best.time.value


def test_memory_that_no_layout_fits_into_is_refused_with_the_least_and_its_place():
    with pytest.raises(
        UsageError,
        match=r"no layout on 4 devices fits into 0.1 GiB: the least is 0\.\d+ GiB a worker, by",
    ):
        planner(devices=4, memory_gib=0.1).plan()
    with pytest.raises(UsageError, match="7 devices cannot share a batch of 5"):
        planner(devices=7, batch=5, model="alexnet").plan()


@pytest.mark.parametrize(
    ("chunks", "first", "last"),
    [(1, "patches", "norm"), (2, "patches, blocks.7", "blocks.6, norm")],
)
def test_stages_are_those_of_the_layout(chunks, first, last):
    own = planner()
    four = (
        each
        for each in own.layouts
        if each.mesh.pipeline == 4 and each.mesh.tensor == 1
    )
    layout = next(each for each in four if each.chunks == chunks)
    assert isinstance(layout, Layout)
    stages = own.costs.stages(layout)
    assert sum(stage.layers for stage in stages) == 16
    assert (stages[0].first, stages[-1].last) == (first, last)
    assert (
        sum(stage.memory.parameters for stage in stages)
        == 4 * own.predictor.workload.layers.parameters
    )


def test_stages_have_the_communication_and_the_bubble_of_the_step():
    """Means over the stages are those of the layout; the waiting of a stage is not that of another."""
    own = planner()
    staged = [step for step in own.plan().steps if step.layout.mesh.pipeline > 1]
    assert staged
    for step in staged:
        stages = own.costs.stages(step.layout)
        for name in ("comm_s", "bubble_s"):
            each = [getattr(stage, name) for stage in stages]
            assert min(each) >= 0
            assert sum(each) / len(each) == pytest.approx(getattr(step, name), rel=1e-9)
        assert len({stage.bubble_s for stage in stages}) > 1


def test_gpipe_takes_no_less_memory_and_placement_no_less_time_than_1f1b():
    own = planner(batch=256)
    steps = {step.layout.kind: step for step in own.plan().steps}
    alike = [
        each
        for each in own.layouts
        if each.mesh == steps["gpipe"].layout.mesh
        and each.micro_batches == steps["gpipe"].layout.micro_batches
        and each.chunks == 1
    ]
    gpipe, other = sorted(alike, key=lambda each: each.kind)
    assert (gpipe.kind, other.kind) == ("gpipe", "pipeline")
    assert own.costs.memory(gpipe).total > own.costs.memory(other).total
    assert steps["model_parallel"].time.value > steps["pipeline"].time.value


def test_components_add_up_to_the_communication_and_the_memory_of_the_step():
    """Equal workers wait for nobody: seconds are those of the collectives alone."""
    own = planner(batch=64, model="vgg16", cluster="juwels-booster")
    plan = own.plan()
    assert plan.adaptive is not None
    components = own.costs.components(plan.adaptive.layout)
    assert len(components) > 1
    comm_s = float(
        own.predictor.ledger(plan.adaptive.layout.strategy, 8).transfer.mean()
    )
    assert sum(each.comm_s for each in components) == pytest.approx(comm_s, rel=1e-3)
    for part in ("parameters", "gradients", "optimizer", "activations"):
        each = [getattr(component.memory, part) for component in components]
        whole = getattr(plan.adaptive.memory, part)
        assert sum(each) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("measured", [True, False])
def test_a_run_has_the_stages_that_were_planned(measured):
    """A run takes layers by their operations, a plan by the times of the device, here of one that was measured, too."""
    if measured:
        model = nn.Sequential(*(nn.Linear(16, 16, device="meta") for _ in range(6)))
        layers = count_model(lambda _: model, "six", (16,))
        (batch,) = step_table(Stated(0.01, 64), layers, [64]).batches
        of_each = [
            LayerShare(name=str(place), forward=share, backward=share)
            for place, share in enumerate(_SHARES)
        ]
        table = step_table(Stated(0.01, 64), layers, [64])
        times = MeasuredSteps(
            (
                table.model_copy(
                    update={"batches": [batch.model_copy(update={"layers": of_each})]}
                ),
            )
        )
        platform = Platform(load_cluster("ethernet-10g"), times, jitter=0.03)
        own = Planner(
            Predictor(Workload(layers, 64, 1, 64, in_all=True), platform), 4, model
        )
        work = [
            each.work
            for each in facts_of(
                layers_of(model, "six"), torch.empty(2, 16, device="meta")
            )
        ]
    else:
        own = planner(model="resnet50", batch=256)
        cut = cut_of(Component(name="layers", options={"table": "resnet50"}))
        assert cut is not None
        work = cut.work

    others = 0
    for layout in own.layouts:
        if layout.mesh.pipeline > 1:
            stated, rule = (
                registry.create(each.name, each.options, "virtual")
                for each in (own.stated(layout), layout.strategy)
            )
            assert isinstance(stated, PartsOfModel)
            assert isinstance(rule, PartsOfModel)
            sizes = stated.sizes_of(work)
            stages = layout.mesh.pipeline
            assert [sum(sizes[stage::stages]) for stage in range(stages)] == [
                stage.layers for stage in own.costs.stages(layout)
            ]
            others += list(sizes) != list(rule.sizes_of(work))
    assert others, "the rule alone would have given a run other stages"
