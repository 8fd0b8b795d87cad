"""Intervals of predicted times, and the choice that they carry or do not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.device import load_device
from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.models.layers import Layer, LayerTable
from scalebench.models.zoo.layers import layer_table_names, load_layers
from scalebench.pricing import uncertainty
from scalebench.pricing.advice import answer, choose, knee, seconds_span
from scalebench.pricing.devices import (
    MeasuredSteps,
    Roofline,
    Scaled,
    Stated,
    step_table,
)
from scalebench.pricing.grid import predict
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Predictor
from scalebench.pricing.published_steps import published_step, published_steps
from scalebench.pricing.uncertainty import LEAST_SHARE, uncertainty_of
from scalebench.pricing.workload import PRECISIONS, Workload
from scalebench.study.spec import Component
from scalebench.validation.held_out import predict_published
from scalebench.validation.measurements import read_published
from tests.facts import together

PUBLISHED = Path(__file__).parents[2] / "experiments" / "published" / "scaling.csv"
DDP, AVERAGE = Component(name="ddp"), Component(name="epoch_average")


def predictor(cluster="ethernet-10g", device=None, **changed) -> Predictor:
    layers = LayerTable(
        "small",
        (Layer("only", "gemm", 10_000_000, 10**9, 100, 100, 100),),
        "test",
        (100,),
    )
    platform = Platform(load_cluster(cluster), device or Stated(0.05, 32), **changed)
    return Predictor(Workload(layers, 64_000, 2, 32), platform)


def test_terms_are_those_fitted_to_published_base_rows():
    _, fitted = predict_published(read_published(PUBLISHED)[0])
    assert pytest.approx(fitted.least_share, abs=5e-3) == LEAST_SHARE
    assert pytest.approx(fitted.jitter_range, abs=5e-4) == uncertainty.JITTER
    assert (
        pytest.approx(fitted.quantile * fitted.per_doubling, abs=5e-4)
        == uncertainty.PER_DOUBLING
    )


def test_interval_of_a_roofline_is_that_of_docs():
    """One worker: devices reached 29 to 142 %, and nothing travels."""
    (point,) = predict(
        predictor(device=Roofline(load_device("v100-16gb"))), [DDP], [1]
    ).points
    assert point.time.low == pytest.approx(point.train_s / 1.42, rel=1e-3)
    assert point.time.high == pytest.approx(point.train_s / 0.29, rel=1e-3)


def test_stated_step_leaves_the_links_and_the_distance():
    one, two, many = predict(predictor(), [DDP], [1, 2, 64]).points
    assert one.time.low == one.time.high == one.train_s
    assert two.time.high / two.train_s < many.time.high / many.train_s
    assert many.time.low == pytest.approx(many.train_s / many.known.margin)
    assert many.known.margin == pytest.approx(
        math.exp(uncertainty.PER_DOUBLING * math.sqrt(6))
    )


def test_batch_far_from_the_stated_one_widens_the_interval():
    own = predictor()
    error = own.platform.device.error(8)
    assert (error.low, error.high) == (1.0, 2.0)
    assert own.platform.device.error(128)[:2] == (0.5, 1.0)
    assert "batch 8 taken as proportional to 32" in error.why


def test_jitter_that_is_stated_has_no_interval():
    assumed = predict(
        predictor(jitter=0.03, jitter_range=(0.003, 0.1)), [DDP], [64]
    ).points[0]
    stated = predict(predictor(jitter=0.03), [DDP], [64]).points[0]
    assert stated.train_s == assumed.train_s
    assert stated.time.high < assumed.time.high


def test_measured_collectives_are_uncertain_beyond_their_ranks_only():
    cost = EngineCost(
        engine="gloo", ranks=4, alpha_s=1e-5, points=[(4, 1e-5)], source="a test"
    )
    own = predictor("this-machine", engines=EngineCosts(entries=[cost]))
    beyond = {
        workers: uncertainty_of(own, DDP, workers).doublings for workers in (2, 4)
    }
    nodes = -(-4 // own.platform.cluster.node.workers_per_node)
    assert beyond == {2: 0.0, 4: math.log2(nodes)}
    assert uncertainty_of(own, DDP, 4).least_share == 1.0


def test_slower_device_takes_longer_in_every_task():
    layers = load_layers("resnet50")
    roofline = Roofline(load_device("v100-16gb"))
    measured = MeasuredSteps((step_table(roofline, layers, [32]),))
    for device in (
        Stated(0.1, 32),
        roofline,
        measured,
        Scaled(measured, roofline, roofline),
    ):
        once, twice = device.times(layers, 32), device.slower(2.0).times(layers, 32)
        assert twice.step_s == pytest.approx(2 * once.step_s)
        assert twice.update_s == pytest.approx(2 * once.update_s)


def test_choice_keeps_gradient_averaging_where_little_is_saved():
    """epoch_average saves 1 % of a long step and 90 % of a short one; in between only one end of the links tells."""
    device = Stated(10.0, 32)
    long = predict(predictor(device=device), [DDP, AVERAGE], [16])
    choice = choose(long.points, {})
    assert (choice.point.strategy, choice.changes) == (DDP, {})
    assert choice.fastest.strategy == AVERAGE
    said = answer(long.points, choice, {}, device)
    assert said.startswith("16 workers: epoch_average ")
    assert said.endswith(": no difference worth the accuracy.")
    short = predict(predictor(device=Stated(1e-3, 32)), [DDP, AVERAGE], [16])
    choice = choose(short.points, {})
    assert (choice.point.strategy, choice.changes) == (AVERAGE, {})
    assert together(answer(short.points, choice, {}, device), "interval", "accuracy")
    between = predict(predictor(device=Stated(1.0, 32)), [DDP, AVERAGE], [16])
    choice = choose(between.points, {})
    assert choice.point.strategy == DDP
    assert {str(point.strategy) for point in choice.changes.values()} == {
        "epoch_average"
    }
    assert set(choice.changes) == set(uncertainty.ENDS[2:])


def test_choice_takes_no_more_workers_than_shorten_the_training_clearly():
    one, two, four = predict(predictor(), [DDP], [1, 2, 4]).points
    for seconds, workers in ((0.95, 2), (0.8, 4)):
        scale = {four: seconds * two.train_s / four.train_s}
        assert choose([one, two, four], scale).point.workers == workers


def test_choice_keeps_to_the_hours():
    grid = predict(predictor(), [DDP], [1, 4, 16])
    cheapest = grid.points[0]
    assert choose(grid.points, {}, cheapest.worker_hours * 1.001).point is cheapest
    assert choose(grid.points, {}, cheapest.worker_hours / 2) is None


def test_knee_lies_inside_the_range():
    (point,) = predict(predictor(), [DDP], [1]).points
    counts = (1, 2, 4, 8, 16)

    def bend(*speedups: float) -> int | None:
        points = [
            replace(point, workers=n, speedup=found)
            for n, found in zip(counts, speedups, strict=True)
        ]
        found = knee(points)
        return found and found.workers

    assert bend(1, 1.9, 3.4, 4.5, 4.6) == 4
    assert bend(1, 2, 4, 8, 16) is None, "the last of the range"
    assert bend(1, 0.3, 0.3, 0.3, 0.3) is None, "the first"
    assert bend(0.1, 0.2, 0.3, 0.56, 0.6) is None, "at 7 % efficiency"


def test_interval_is_written_in_the_unit_of_the_time():
    assert seconds_span(276.0 * 60, 186.0 * 60, 540.0 * 60) == "276 min (186 to 540)"
    assert seconds_span(4.6 * 3600, 3.1 * 3600, 9 * 3600) == "276 min (186 to 540)"
    assert seconds_span(0.0046, 0.0031, 0.009) == "4.6 ms (3.1 to 9.0)"


@pytest.mark.parametrize(
    "row", published_steps(), ids=lambda row: f"{row.model}-{row.device}-{row.dtype}"
)
def test_published_step_is_of_a_shipped_model_device_and_dtype(row):
    assert row.model in layer_table_names()
    assert row.dtype in PRECISIONS
    found = published_step(row.model, load_device(row.device), row.dtype)
    assert found.batch / found.times(
        load_layers(row.model), row.batch
    ).step_s == pytest.approx(row.samples_per_s)
    dtype = PRECISIONS[row.dtype][1]
    roofline = Roofline(load_device(row.device), dtype, stored="float32")
    modelled = roofline.times(load_layers(row.model), row.batch)
    assert 0.29 < modelled.step_s / found.step_s < 1.42, "the interval of a roofline"


def test_mixed_precision_keeps_parameters_in_float32():
    layers, device = load_layers("resnet50"), load_device("a100-80gb")
    half, mixed = (
        Roofline(device, "bfloat16"),
        Roofline(device, "bfloat16", stored="float32"),
    )
    assert mixed.times(layers, 8).forward == pytest.approx(
        half.times(layers, 8).forward
    )
    launch = device.launch_overhead_s
    assert mixed.times(layers, 8).update_s - launch == pytest.approx(
        2 * (half.times(layers, 8).update_s - launch)
    )
    workload = replace(predictor().workload, products="bfloat16")
    assert workload.precision == "bf16-mixed"
