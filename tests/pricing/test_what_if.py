from __future__ import annotations

import numpy as np
import pytest

from scalebench.cluster.cluster_file import load_cluster
from scalebench.errors import UsageError
from scalebench.models.layers import Layer, LayerTable
from scalebench.models.zoo.layers import load_layers
from scalebench.pricing.axes import Axis
from scalebench.pricing.devices import Stated
from scalebench.pricing.grid import predict
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.what_if import what_if
from scalebench.pricing.workload import Workload
from scalebench.study.spec import Component
from tests.facts import naming

ALLREDUCE = Component(name="allreduce")


def predictor() -> Predictor:
    layers = LayerTable(
        "small",
        (Layer("only", "gemm", 10_000_000, 10**9, 100, 100, 100),),
        "test",
        (100,),
    )
    return Predictor(
        Workload(layers, 64_000, 2, 32),
        Platform(load_cluster("ethernet-10g"), Stated(0.05, 32)),
    )


def test_cell_is_the_prediction_with_its_numbers():
    own = predictor()
    plane = what_if(
        own,
        ALLREDUCE,
        16,
        [Axis("network-bandwidth", (5.0, 10.0, 40.0)), Axis("batch", (8.0, 32.0))],
    )
    other = own.platform.between_nodes(4.0)
    assert plane.train_s[2, 0] == pytest.approx(
        float(own.times(ALLREDUCE, 16, [Case(other, 8)]).time[0])
    )
    assert plane.train_s[1, 1] == pytest.approx(
        float(own.times(ALLREDUCE, 16, [Case(own.platform, 32)]).time[0])
    )
    np.testing.assert_allclose(plane.throughput, 2 * 64_000 / plane.train_s)


def test_faster_links_move_the_binding_component_from_network_to_compute():
    plane = what_if(
        predictor(),
        ALLREDUCE,
        16,
        [Axis("network-bandwidth", tuple(np.geomspace(0.1, 1000, 30)))],
    )
    bound = [plane.components[place] for place in plane.bound[:, 0]]
    assert bound == sorted(bound, reverse=True)
    assert {bound[0], bound[-1]} == {"network bandwidth", "compute"}
    assert (np.diff(plane.train_s[:, 0]) < 0).all()


def test_links_between_nodes_and_inside_them_are_axes_of_their_own():
    """In Gbit/s of a card or as factors; 200 Gbit/s and 195 GB/s are those of the cluster."""
    own = Predictor(
        predictor().workload, Platform(load_cluster("juwels-booster"), Stated(0.01, 32))
    )
    base = float(own.times(ALLREDUCE, 16, [Case(own.platform, 32)]).time[0])
    for name, stated in (("network-bandwidth", 200.0), ("node-bandwidth", 1560.0)):
        absolute = what_if(
            own, ALLREDUCE, 16, [Axis(name, (stated / 2, stated))]
        ).train_s[:, 0]
        relative = what_if(own, ALLREDUCE, 16, [Axis.parse(f"{name}=0.5x,1x")]).train_s[
            :, 0
        ]
        np.testing.assert_allclose(absolute, relative)
        assert absolute[1] == pytest.approx(base)
        both = float(
            own.times(
                ALLREDUCE,
                16,
                [Case(own.platform.changed("network bandwidth", 0.5), 32)],
            ).time[0]
        )
        assert base < absolute[0] < both


def test_few_cells_have_the_interval_of_a_prediction():
    own = predictor()
    (point,) = predict(own, [ALLREDUCE], [16]).points
    plane = what_if(own, ALLREDUCE, 16, [Axis("batch", (8.0, 32.0))])
    assert (plane.low[1, 0], plane.high[1, 0]) == pytest.approx(
        (point.time.low, point.time.high)
    )
    assert plane.ends[1, 0] == pytest.approx(point.ends_s)
    assert plane.high[0, 0] / plane.train_s[0, 0] > 1.5, (
        "batch 8 was taken as proportional"
    )
    assert what_if(own, ALLREDUCE, 16, [Axis.parse("batch=1..4096:30")]).ends is None


def test_jitter_and_few_synchronisations():
    own = predictor()
    plane = what_if(
        own,
        Component(name="local_sgd"),
        16,
        [Axis("jitter", (0.0, 0.1)), Axis("interval", (1.0, 8.0))],
    )
    assert (plane.train_s[1] > plane.train_s[0]).all()
    assert (plane.train_s[:, 1] < plane.train_s[:, 0]).all()


def test_axis_without_effect_is_named():
    plane = what_if(
        predictor(),
        ALLREDUCE,
        1,
        [Axis("latency", (0.1, 10.0)), Axis("flops", (1.0, 2.0))],
    )
    assert plane.without_effect() == ["latency"]


@pytest.mark.parametrize(
    ("axes", "strategy", "message"),
    [
        ([("bandwith", (1.0,))], "allreduce", "unknown axis 'bandwith'"),
        ([("latency", (0.0,))], "allreduce", "axis latency"),
        ([("batch", (0.5,))], "allreduce", "of 1 or more"),
        ([("batch", (4.0,)), ("batch", (8.0,))], "allreduce", "twice"),
        ([("interval", (4.0,))], "asp", "no option for it; use .* or local_sgd or"),
        ([("memory-bandwidth", (2.0,))], "allreduce", "--device"),
    ],
)
def test_bad_axis_is_refused(axes, strategy, message):
    with pytest.raises(UsageError, match=message):
        what_if(
            predictor(), Component(name=strategy), 4, [Axis(*axis) for axis in axes]
        )


def test_divisions_of_a_replica_are_axes():
    platform = Platform(load_cluster("juwels-booster"), Stated(0.1, 64))
    own = Predictor(
        Workload(load_layers("vit_b16"), 64_000, 2, 64, in_all=True), platform
    )
    pipeline = Component(name="pipeline", options={"stages": 4, "balance": "times"})
    plane = what_if(own, pipeline, 4, [Axis.parse("micro_batches=4,8,16")])
    for row, pieces in enumerate((4, 8, 16)):
        alike = Component(
            name="pipeline", options={**pipeline.options, "micro_batches": pieces}
        )
        assert plane.train_s[row, 0] == pytest.approx(
            float(own.times(alike, 4, [Case(platform, 64)]).time[0])
        )
    assert (np.diff(plane.train_s[:, 0]) < 0).all()
    hybrid = Component(name="hybrid", options={"micro_batches": 8})
    plane = what_if(
        own, hybrid, 8, [Axis.parse("pipeline=2,4"), Axis.parse("tensor=1,2")]
    )
    alike = Component(
        name="hybrid", options={"micro_batches": 8, "pipeline": 4, "tensor": 2}
    )
    assert plane.train_s[1, 1] == pytest.approx(
        float(own.times(alike, 8, [Case(platform, 64)]).time[0])
    )
    # more stages than the default number of micro-batches
    plane = what_if(
        own,
        Component(name="pipeline"),
        8,
        [Axis.parse("pipeline=2,8"), Axis.parse("micro_batches=8,16")],
    )
    deep = Component(name="pipeline", options={"stages": 8, "micro_batches": 16})
    assert plane.train_s[1, 1] == pytest.approx(
        float(own.times(deep, 8, [Case(platform, 64)]).time[0])
    )
    with pytest.raises(
        UsageError,
        match=naming("axis tensor", "pipeline", "hybrid", "tensor", "torch_tensor"),
    ):
        what_if(own, pipeline, 4, [Axis.parse("tensor=2,4")])
