"""Step times from layer tables: stated, roofline, scaled, with the release of gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.cluster.cluster_file import load_cluster
from scalebench.cluster.device import Device, load_device
from scalebench.errors import ClusterError
from scalebench.models.zoo.layers import load_layers, read_layers
from scalebench.pricing.devices import (
    MeasuredSteps,
    Roofline,
    Scaled,
    Stated,
    gradients_of,
    step_table,
)
from scalebench.pricing.machine import LayerShare, OperationTime
from scalebench.pricing.platform import Platform

DEVICE = Device(
    name="toy",
    peak_flops_per_s={"float32": 1e12, "float16": 4e12},
    memory_bandwidth_bytes_per_s=1e10,
    launch_overhead_s=1e-6,
    memory_gib=1,
    source="made up",
)
TOY = read_layers(
    "name,kind,parameters,flops,inputs,activations,kept,count,m,n,k\n"
    "a,gemm,1010,2000000,1000,1000,1000,1,1000,10,100\n"
    "b,relu,0,0,1000,1000,1000,0,0,0,0\n"
    "c,gemm,110,20000,100,100,100,1,100,10,10\n",
    "toy",
    "toy",
)


def test_roofline_by_hand():
    batch = 4
    flops = np.array([2e6, 0, 2e4]) * batch
    moved = np.array([2000 * batch + 1000, 2000 * batch, 200 * batch + 100]) * 4
    kernel = np.maximum(flops / 1e12, moved / 1e10) + 1e-6
    times = Roofline(DEVICE).times(TOY, batch)
    assert times.forward == pytest.approx(kernel)
    written = np.array([1010, 0, 110]) * 4 / 1e10
    assert times.backward == pytest.approx(kernel * [1, 1, 2] + written)
    # reads p, g, m and writes p, m
    assert times.update_s == pytest.approx(5 * 1120 * 4 / 1e10 + 1e-6)
    adam = Roofline(DEVICE, optimizer_states=2).times(TOY, batch)
    assert adam.update_s == pytest.approx(7 * 1120 * 4 / 1e10 + 1e-6)


def test_half_precision_moves_half_the_bytes():
    whole, half = (
        Roofline(DEVICE, dtype).times(TOY, 512) for dtype in ("float32", "float16")
    )
    assert half.forward[1] - 1e-6 == pytest.approx((whole.forward[1] - 1e-6) / 2)


@given(st.sampled_from(["resnet50", "bert_base", "vgg16"]), st.integers(1, 512))
def test_roofline_is_a_lower_bound_of_its_own_terms(name, batch):
    """No step is shorter than its arithmetic at peak, and none per sample gets longer with the batch."""
    layers, device = load_layers(name), load_device("v100-16gb")
    step = Roofline(device).times(layers, batch).step_s
    assert step >= batch * (
        layers.column("flops") * (1 + layers.backward_products)
    ).sum() / device.peak("float32")
    assert Roofline(device).times(layers, 2 * batch).step_s <= 2 * step


def test_stated_time_is_split_and_proportional():
    table = step_table(Stated(0.03, 32), load_layers("resnet50"), [32, 64])
    first, second = table.batches
    assert (first.forward_s[0], first.backward_s[0]) == pytest.approx((0.01, 0.02))
    assert second.forward_s[0] == pytest.approx(0.02)
    assert table.source == "stated: 0.03 s a step of 32 samples"


@pytest.mark.parametrize(
    "model", [Stated(0.03, 32), Roofline(load_device("v100-16gb"))]
)
@pytest.mark.parametrize("name", ["resnet50", "gpt2", "alexnet"])
def test_gradients_are_released_last_layer_first(model, name):
    layers = load_layers(name)
    table = step_table(model, layers, [8, 32])
    release = table.release_at(32)
    gradients = gradients_of(layers, release)
    assert sum(gradient.nbytes for gradient in gradients) == 4 * layers.parameters
    assert release[0] == 1.0  # the first layer's gradient completes the pass
    assert release == sorted(release, reverse=True)
    assert 0 <= release[-1] < 0.3  # GPT-2 words make a quarter of its flops


def test_large_late_layers_are_released_early():
    """Nine tenths of VGG16's parameters are in the fully connected layers, whose gradients come first."""
    layers = load_layers("vgg16")
    release = step_table(Roofline(load_device("v100-16gb")), layers, [32]).release_at(
        32
    )
    early = [g.nbytes for g in gradients_of(layers, release) if g.release < 0.1]
    assert sum(early) > 0.85 * 4 * layers.parameters


def test_scaling_from_a_measured_device():
    layers = load_layers("resnet50")
    slow, fast = Roofline(load_device("k80")), Roofline(load_device("p100"))
    # reaches 40 % of its roofline
    measured = MeasuredSteps((step_table(slow, layers, [16, 64]).scaled(2.5),))
    scaled = step_table(Scaled(measured, slow, fast), layers, [64])
    expected = step_table(fast, layers, [64]).scaled(2.5)
    assert scaled.batches[0].blocks() == pytest.approx(expected.batches[0].blocks())
    assert scaled.release_at(64) == pytest.approx(expected.release_at(64))
    assert scaled.source.endswith(
        "scaled by roofline of p100 in float32 over roofline of k80 in float32"
    )


def test_measured_layers_share_a_step_in_place_of_their_operations():
    """Row b without parameters belongs to layer a, whose time follows its operations."""
    (batch,) = step_table(Stated(3.0, 4), TOY, [4]).batches
    layers = [
        LayerShare(name="a", forward=0.25, backward=0.5),
        LayerShare(name="c", forward=0.75, backward=0.5),
    ]
    table = step_table(Stated(3.0, 4), TOY, [4])
    measured, others = (
        MeasuredSteps(
            (
                table.model_copy(
                    update={"batches": [batch.model_copy(update={"layers": found})]}
                ),
            )
        )
        for found in (layers, [layers[0].model_copy(update={"name": "d"})])
    )
    times = measured.times(TOY, 4)
    assert times.forward == pytest.approx([0.25, 0, 0.75])
    assert times.backward == pytest.approx([1.0, 0, 1.0])
    assert measured.of_layers(TOY) == "as measured at batches of 4"
    assert others.times(TOY, 4).forward == pytest.approx([100 / 101, 0, 1 / 101])
    assert "floating-point operations" in others.of_layers(TOY)


def test_operations_of_a_scaled_device_follow_its_memory_bandwidth():
    roofline = Roofline(load_device("v100-16gb"))
    operations = {"slowmo": {"restart": OperationTime(seconds=1.0, per_member_s=0.0)}}
    platform = Platform(
        load_cluster("juwels-booster"),
        Scaled(Stated(0.1, 64), roofline, roofline),
        operations=operations,
    )

    def seconds(component):
        return platform.changed(component, 2.0).operations["slowmo"]["restart"].seconds

    assert (seconds("memory bandwidth"), seconds("compute")) == (0.5, 1.0)
    stated = Platform(platform.cluster, Stated(0.1, 64), operations=operations)
    assert stated.changed("compute", 2.0).operations["slowmo"]["restart"].seconds == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Stated(0.0, 32),
            "step time: expected seconds greater than 0, below 1e9, got 0",
        ),
        (
            lambda: Stated(-1.0, 32),
            "step time: expected seconds greater than 0, below 1e9, got -1",
        ),
        (
            lambda: Stated(math.nan, 32),
            "step time: expected seconds greater than 0, below 1e9, got nan",
        ),
        (
            lambda: Stated(1.0, 0),
            "batch of the step time: expected 1 or more samples, got 0",
        ),
        (
            lambda: Roofline(DEVICE, "bfloat16"),
            "device toy: no peak_flops_per_s in bfloat16",
        ),
        (
            lambda: step_table(Stated(1.0, 1), TOY, [0]),
            "batch: expected 1 or more samples, got 0",
        ),
        (
            lambda: step_table(Stated(1.0, 1), TOY, []),
            "batch: expected 1 or more samples, got none",
        ),
    ],
)
def test_wrong_numbers(make, message):
    with pytest.raises(ClusterError, match=message):
        make()
