"""Learned kernels: held-out error, hull, fallback to the roofline, files without pickle."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from scalebench.calibration.kernel_timing import measure_device, measure_kernels
from scalebench.cluster.device import load_device
from scalebench.errors import ClusterError, UsageError
from scalebench.models.zoo.layers import read_layers
from scalebench.pricing.devices import Roofline, step_table
from scalebench.pricing.kernel_model import (
    PASSES,
    KernelModel,
    Learned,
    fit_net,
    kernel_sizes,
    load_kernel_model,
)
from tests.facts import together

ROOFLINE = Roofline(load_device("epyc-7742"))


def made_up(kind, random, rows=150):
    """Kernels of a machine that reaches half of 1 Tflop/s, less in thin products, and 5 us more."""
    sizes = 2 ** random.uniform(2, 12, (rows, 3 if kind == "gemm" else 1))
    if kind != "gemm":
        return sizes, 5e-6 + sizes[:, 0] * 4 / 1e10
    return sizes, 5e-6 + 2 * sizes.prod(axis=1) / 5e11 * (1 + 16 / sizes[:, 1])


@pytest.fixture(scope="module")
def model():
    random = np.random.default_rng(0)
    nets = {}
    for kind in ("gemm", "relu"):
        sizes, seconds = made_up(kind, random)
        for factor, part in zip((1, 2), PASSES, strict=True):
            nets[kind, part] = fit_net(sizes, factor * seconds)
    return KernelModel("made up", "float32", nets, ROOFLINE.device)


TABLE = (
    "name,kind,parameters,flops,inputs,activations,kept,count,m,n,k\n"
    "a,gemm,2048,{0},64,32,32,1,1,32,64\n"
    "b,tanh,0,0,32,32,32,0,0,0,0\n"
    "c,gemm,{2},{1},32,{3},32,1,1,{3},32\n"
)


def table(last):
    return read_layers(
        TABLE.format(2 * 32 * 64, 2 * last * 32, 32 * last, last), "toy", "toy"
    )


def test_network_has_learned_kernels_it_has_not_seen(model):
    assert model.nets["gemm", "forward"].error < 0.05
    sizes, seconds = made_up("gemm", np.random.default_rng(1))
    inside = model.nets["gemm", "forward"].covers(sizes)
    assert 0.5 < inside.mean() < 1
    found = model.nets["gemm", "forward"].seconds(sizes[inside])
    # 12 powers of two in each size, 120 kernels
    assert np.median(np.abs(found / seconds[inside] - 1)) < 0.05


def test_layers_inside_the_hull_are_learned_and_others_are_the_rooflines(model):
    learned, batch = Learned(model, ROOFLINE), 16
    inside, outside = table(128), table(65536)
    times, bound = learned.times(inside, batch), ROOFLINE.times(inside, batch)
    sizes = kernel_sizes(inside, "gemm", batch)[[0, 2]]
    expected = 5e-6 + 2 * sizes.prod(axis=1) / 5e11 * (1 + 16 / sizes[:, 1])
    assert times.forward[[0, 2]] == pytest.approx(expected, rel=0.15)
    # no gradient of the input
    assert times.backward[[0, 2]] == pytest.approx(expected * [1, 2], rel=0.15)
    # tanh as relu
    assert times.forward[1] == pytest.approx(5e-6 + 64 * batch * 4 / 1e10, rel=0.15)
    assert times.update_s == bound.update_s
    assert learned.outside(inside, batch, 1) == []
    assert (
        learned.times(outside, batch).forward[2]
        == ROOFLINE.times(outside, batch).forward[2]
    )
    (said,) = learned.outside(outside, batch, 1)
    assert re.match(
        r"1 of 3 layers .*made up: .*roofline of epyc-7742 in float32", said
    )


def test_step_table_of_learned_times(model):
    steps = step_table(Learned(model, ROOFLINE), table(128), [16, 64])
    assert steps.source == "kernel model of made up in float32"
    assert steps.release_at(64)[0] == 1.0


def test_kinds_that_were_not_measured_are_counted(model):
    layers = read_layers(
        TABLE.replace("a,gemm", "a,conv").format(2 * 32 * 64, 2 * 32, 32, 1),
        "toy",
        "toy",
    )
    (said,) = Learned(model, ROOFLINE).outside(layers, 16, 1)
    assert re.match(r"2 of 3 layers", said)  # c has n = 1


def test_file_holds_the_model(model, tmp_path):
    path = tmp_path / "kernels.json"
    model.save(path)
    read = load_kernel_model(path)
    assert (read.machine, read.dtype, read.nets.keys()) == (
        model.machine,
        model.dtype,
        model.nets.keys(),
    )
    times, again = (
        Learned(each, ROOFLINE).times(table(128), 8) for each in (model, read)
    )
    assert np.array_equal(times.forward, again.forward)
    assert np.array_equal(times.backward, again.backward)


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.pop("nets"),
        lambda read: read["nets"]["relu/forward"].pop("hull"),
        lambda read: read["nets"]["relu/forward"].update(mean=[1.0, 2.0]),
        lambda read: read["nets"]["relu/forward"].update(weights=[[["a"]]]),
        lambda read: read["nets"]["relu/forward"].update(
            biases=[[float("nan")] * 32, [0.0] * 32, [0.0]]
        ),
        lambda read: read.update(nets=[]),
        lambda read: read["device"].update(memory_gib=0),
        lambda read: read["nets"].update(
            {"relu/sideways": read["nets"]["relu/forward"]}
        ),
    ],
)
def test_other_files_are_refused(model, tmp_path, change):
    path = tmp_path / "kernels.json"
    model.save(path)
    read = json.loads(path.read_text())
    change(read)
    path.write_text(json.dumps(read))
    with pytest.raises(ClusterError, match="is not a kernel model"):
        load_kernel_model(path)


def test_missing_file_and_text(tmp_path):
    with pytest.raises(ClusterError, match=r"cannot read .*none\.json: No such file"):
        load_kernel_model(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(ClusterError, match="is not a kernel model"):
        load_kernel_model(tmp_path / "text.json")


def test_another_dtype_is_refused(model):
    with pytest.raises(ClusterError, match=r"float32, .*float64; ask for float32"):
        Learned(model, Roofline(load_device("epyc-7742"), "float64"))


def test_too_few_or_equal_kernels_are_refused():
    with pytest.raises(ClusterError, match=r"19 kernels .*20"):
        fit_net(np.ones((19, 3)), np.ones(19))
    with pytest.raises(ClusterError, match="differ in too few sizes"):
        fit_net(np.full((40, 3), 8.0), np.ones(40))


@pytest.mark.thorough
def test_kernels_of_this_machine():
    """Larger kernels take longer, whatever else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        device, rows = measure_device(), measure_kernels(1.0)
    finally:
        torch.set_num_threads(threads)
    assert device.peak("float32") > 1e9
    for kind, (sizes, seconds) in rows.items():
        assert len(sizes) >= 25
        assert (seconds > 0).all()
        order = np.argsort(sizes.prod(axis=1))
        third = len(order) // 3
        assert np.median(seconds[order[-third:]]) > np.median(seconds[order[:third]]), (
            kind
        )


def test_measured_kernels_are_a_device_of_predict(model, tmp_path, invoke, monkeypatch):
    path = tmp_path / "kernels.json"
    monkeypatch.setattr(
        "scalebench.calibration.kernel_timing.measure_kernel_model",
        lambda seconds: model,
    )
    assert "made up; 4 networks" in invoke("calibrate", "--kernels", path, "--quick")
    assert "--kernels: measures no study" in invoke(
        "calibrate", "--kernels", path, "--model", "mlp", code=2
    )
    said = invoke(
        "predict",
        "vgg16",
        "--cluster",
        "juwels-booster",
        "--device",
        path,
        "--workers",
        "1,4",
    )
    assert "kernel model of made up in float32" in said
    assert together(said, "layers", "kernels", "made up")


def test_faster_kernels_take_less_time(model):
    learned = Learned(model, ROOFLINE)
    before, after = (
        each.times(table(128), 8).step_s
        for each in (learned, learned.changed("compute", 2.0))
    )
    assert after == pytest.approx(before / 2)
    with pytest.raises(UsageError, match=r"memory bandwidth: .*kernel model"):
        learned.changed("memory bandwidth", 2.0)
