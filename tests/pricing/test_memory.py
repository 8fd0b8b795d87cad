"""Memory of workers: parts, recorded buffers of strategies, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalebench.cluster.device import load_device
from scalebench.models.layers import Layer, LayerTable
from scalebench.models.zoo.layers import load_layers
from scalebench.pricing.memory import worker_memory


def test_parts_of_resnet50():
    memory = worker_memory(load_layers("resnet50"), 64)
    assert memory.parameters == memory.gradients == memory.optimizer == 4 * 25_557_032
    assert memory.total == load_layers("resnet50").memory_bytes(64, 1)
    assert memory.strategy == 0


@pytest.mark.parametrize(
    ("strategy", "optimizer", "states", "own"),
    [
        # vectors beyond the initial weights that every worker keeps
        ("allreduce", {"sgd": {"momentum": 0.9}}, 1, 0),
        ("allreduce", {"sgd": {"momentum": 0.0}}, 0, 0),
        ("allreduce", {"adam": {}}, 2, 0),
        ("slowmo", {"sgd": {"momentum": 0.9}}, 1, 2),  # last average and slow momentum
    ],
)
def test_buffers_of_strategies_are_the_recorded_ones(
    recorded, make_run, strategy, optimizer, states, own
):
    run = make_run(strategy, 2, optimizer=optimizer)
    schedule = recorded(run)[0]
    vector = (
        recorded(make_run("serial", 1, optimizer={"sgd": {"momentum": 0.0}}))[
            0
        ].memory_bytes
        // 3
    )
    layers = LayerTable("toy", (Layer("a", "layer", vector // 4, 8, 1, 1, 1),))
    memory = worker_memory(layers, 1, optimizer_states=states, schedule=schedule)
    # counters of steps
    assert memory.strategy == pytest.approx((1 + own) * vector, abs=64)
    assert memory.total == schedule.memory_bytes + memory.activations


@given(
    st.sampled_from(["resnet50", "vgg16", "bert_base"]),
    st.integers(1, 2048),
    st.sampled_from(["k80", "a100-40gb"]),
)
def test_largest_batch_is_the_last_that_fits(name, batch, where):
    layers, device = load_layers(name), load_device(where)
    largest = worker_memory(layers, batch).largest_batch(device.memory_gib)
    assert largest == 0 or not worker_memory(layers, largest).lacking(
        device.memory_gib, where
    )
    assert worker_memory(layers, largest + 1).lacking(device.memory_gib, where)


def test_what_does_not_fit_is_one_line():
    memory = worker_memory(load_layers("resnet50"), 256)
    assert memory.lacking(16.0, "v100-16gb") == (
        "resnet50 at batch 256 needs 20.6 GiB a worker, 4.65 GiB more than v100-16gb has (16.0); "
        "activations take 20.4 GiB; batch 197 fits"
    )
    assert worker_memory(load_layers("resnet50"), 197).lacking(16.0, "v100-16gb") == ""


def test_a_model_whose_parameters_alone_do_not_fit():
    layers = LayerTable("huge", (Layer("a", "layer", 10**10, 8, 1, 1, 1),))
    assert (
        worker_memory(layers, 8)
        .lacking(80.0, "h100-sxm")
        .endswith(
            "parameters take 37.3 GiB; no batch fits, as 112 GiB do not depend on it"
        )
    )
