"""Measurement of kernels of random sizes on this machine, as the rows that a kernel model is trained on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional

from scalebench.cluster.device import Device
from scalebench.formatting import counted
from scalebench.pricing import kernel_model

_MOST_FLOPS = 2e9  # of a measured product
_LARGEST = 24  # log2 of the elements of a measured tensor
_REPEATS = 4
_LEAST = 25  # kernels of each kind, whatever the time
# function, arguments, sizes
Kernel = tuple[Callable[..., Tensor], list[Tensor], tuple[int, ...]]


def measure_kernel_model(
    seconds: float = 60.0, seed: int = 0
) -> kernel_model.KernelModel:
    """Return a kernel model of this machine in float32, measured for about `seconds` with torch's number of threads."""
    nets: dict[tuple[str, str], kernel_model.KernelNet] = {}
    for kind, (sizes, times) in measure_kernels(seconds, seed).items():
        for column, part in enumerate(kernel_model.PASSES):
            nets[kind, part] = kernel_model.fit_net(sizes, times[:, column], seed)
    machine = f"{platform.node()}, {counted(torch.get_num_threads(), 'thread')}"
    return kernel_model.KernelModel(machine, "float32", nets, measure_device())


def measure_kernels(
    seconds: float, seed: int = 0
) -> dict[str, tuple[kernel_model.Array, kernel_model.Array]]:
    """Return (sizes, seconds of the forward and the backward pass) of random kernels by kind.

    A time is the least of a few, as other programs only add to it; of one thread it is
    processor time.
    """
    random = np.random.default_rng(seed)
    rows: dict[str, list[tuple[tuple[int, ...], tuple[float, float]]]] = {
        kind: [] for kind in _KERNELS
    }
    until = time.perf_counter() + seconds
    turn = [
        *["conv"] * 4,
        *["gemm"] * 2,
        *_KERNELS,
    ]  # products have more sizes to learn
    while due := [
        kind for kind in turn if len(rows[kind]) < _LEAST or time.perf_counter() < until
    ]:
        for kind in due:
            function, arguments, sizes = _KERNELS[kind](random)
            rows[kind].append((sizes, _passes(function, arguments)))
    return {
        kind: (
            np.array([sizes for sizes, _ in own], dtype=np.float64),
            np.array([times for _, times in own]),
        )
        for kind, own in rows.items()
    }


def measure_device() -> Device:
    """Return this machine as a device: reached in a large product, in a copy, and by an operation on one number."""
    side, length = 2048, 1 << 25
    a, b = torch.rand(side, side), torch.rand(side, side)
    source, target = torch.rand(length), torch.empty(length)
    one = torch.ones(1)
    product = _least(lambda: torch.mm(a, b))
    copy = _least(lambda: target.copy_(source))
    launch = _least(lambda: [one.add(1) for _ in range(100)]) / 100
    return Device(
        name="this-machine",
        kind="cpu",
        peak_flops_per_s={"float32": 2 * side**3 / product},
        # A copy reads and writes.
        memory_bandwidth_bytes_per_s=2 * source.nbytes / copy,
        launch_overhead_s=launch,
        memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        source=f"measured with torch {torch.__version__} on {torch.get_num_threads()} threads",
    )


def _least(operation: Callable[[], object]) -> float:
    """Return the least seconds of an operation."""
    now, times = _clock(), []
    for _ in range(_REPEATS + 1):
        began = now()
        operation()
        times.append(now() - began)
    return min(times)


def _clock() -> Callable[[], float]:
    """Return processor time for one thread, to which other programs add little, else wall time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _passes(
    function: Callable[..., Tensor], arguments: list[Tensor]
) -> tuple[float, float]:
    """Return the least seconds of a forward and of a backward pass, the first of each left out."""
    needing = [argument.requires_grad_() for argument in arguments]
    now = _clock()
    forward = []
    backward = []
    for _ in range(_REPEATS):
        began = now()
        made = function(*needing)
        forward.append(now() - began)
        # Untimed: in a step it comes from the layer behind.
        gradient = torch.ones_like(made)
        began = now()
        torch.autograd.grad(made, needing, gradient)
        backward.append(now() - began)
    return min(forward[1:]), min(backward[1:])


def _draw(random: Generator, low: float, high: float) -> int:
    """Return a whole number, log-uniform between 2^low and 2^high."""
    return int(2 ** random.uniform(low, high))


def _conv(random: Generator) -> Kernel:
    while True:
        batch = _draw(random, 0, 6)
        before = _draw(random, 1.5, 11)
        after = _draw(random, 4, 11)
        side = _draw(random, 2.5, 8)
        size = int(random.choice([1, 3, 5, 7]))
        stride = int(random.choice([1, 1, 2]))
        m, k = batch * ((side - 1) // stride + 1) ** 2, before * size**2
        inputs = batch * before * side**2
        if (
            2 * m * after * k <= _MOST_FLOPS
            and max(inputs, m * after, after * k) < 2**_LARGEST
        ):
            break
    x = torch.rand(batch, before, side, side)
    weight = torch.rand(after, before, size, size)
    return (
        lambda x, w: functional.conv2d(x, w, None, stride, size // 2),
        [x, weight],
        (m, after, k, inputs),
    )


def _gemm(random: Generator) -> Kernel:
    m, n, k = _sizes(random, (0, 14), (2, 14), (2, 14))
    return functional.linear, [torch.rand(m, k), torch.rand(n, k)], (m, n, k)


def _bmm(random: Generator) -> Kernel:
    count, m, n, k = _sizes(random, (0, 9), (4, 11), (4, 11), (4, 11))
    return (
        torch.bmm,
        [torch.rand(count, m, k), torch.rand(count, k, n)],
        (count, m, n, k),
    )


def _sizes(random: Generator, *ranges: tuple[float, float]) -> list[int]:
    """Return sizes (..., m, n, k) of a product that is not too long to measure."""
    while True:
        sizes = [_draw(random, low, high) for low, high in ranges]
        m, n, k = sizes[-3:]
        if (
            2 * float(np.prod(sizes)) <= _MOST_FLOPS
            and max(m * n, m * k, n * k) * np.prod(sizes[:-3]) < 2**_LARGEST
        ):
            return sizes


def _streamed(
    function: Callable[..., Tensor], arguments: int = 1
) -> Callable[[Generator], Kernel]:
    """Return the maker of kernels on `arguments` tensors (rows, 512), as a row of words or attention has."""

    def make(random: Generator) -> Kernel:
        rows = _draw(random, 0, _LARGEST - 9)
        return (
            function,
            [torch.rand(rows, 512) for _ in range(arguments)],
            ((arguments + 1) * rows * 512,),
        )

    return make


def _on_images(
    function: Callable[..., Tensor], written: int = 1
) -> Callable[[Generator], Kernel]:
    """Return the maker of kernels on images that write `written` elements for each input one."""

    def make(random: Generator) -> Kernel:
        while True:
            batch = _draw(random, 0, 6)
            planes = _draw(random, 4, 11)
            side = _draw(random, 2.5, 7)
            if batch * side**2 >= 4 and batch * planes * side**2 < 2**_LARGEST:
                x = torch.rand(batch, planes, side, side)
                return (
                    function,
                    [x],
                    (x.numel() + written * function(x[:1]).numel() * batch,),
                )

    return make


_KERNELS: dict[str, Callable[[Generator], Kernel]] = {
    "conv": _conv,
    "gemm": _gemm,
    "bmm": _bmm,
    "relu": _streamed(torch.relu),
    "add": _streamed(torch.add, 2),
    "gelu": _streamed(functional.gelu),
    "softmax": _streamed(lambda x: torch.softmax(x, -1)),
    "layernorm": _streamed(lambda x: functional.layer_norm(x, x.shape[-1:])),
    "batchnorm2d": _on_images(
        lambda x: functional.batch_norm(x, None, None, training=True)
    ),
    "maxpool2d": _on_images(
        lambda x: functional.max_pool2d(x, 3, 2, 1), written=3
    ),  # a value and an index of 8 bytes
}
