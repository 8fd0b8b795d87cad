"""The reference step: one training step of a fixed small network, the unit of measured costs.

The speed of a shared machine changes by a third within minutes. Costs measured at
different moments are therefore divided by the time of this step at the same moment, and
converted to seconds by one measured time of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

import torch

from scalebench.models.flat import side_by_side
from scalebench.study.spec import Component
from scalebench.system.disturbance import Stopwatch, typical
from scalebench.training.optimizers import build_optimizer

Step = Callable[[], None]
_STEPS, _WINDOWS = 4, 6  # steps of a window, and windows of one measurement
_MEASUREMENTS = 30  # about a quarter of a second


def reference_network() -> torch.nn.Module:
    """Return two layers with four tensors: 96 inputs, 96 hidden units, 16 outputs."""
    return torch.nn.Sequential(
        torch.nn.Linear(96, 96), torch.nn.ReLU(), torch.nn.Linear(96, 16)
    )


def reference_step() -> Step:
    """Return a step on 8 samples like that of a replica: SGD with momentum on one flat buffer."""
    net = reference_network()
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    flat, gradients, _ = side_by_side(net)
    parameter = torch.nn.Parameter(flat)
    parameter.grad = gradients
    optimizer = build_optimizer(
        Component(name="sgd", options={"momentum": 0.9}), [parameter], 1e-6, flat=True
    )

    def step() -> None:
        gradients.zero_()
        net(x).sum().backward()
        optimizer.step()

    return step


class Gauge:
    """Repeated measurement of the reference step, a few milliseconds each time."""

    def __init__(self) -> None:
        self._step = reference_step()
        self._stopwatch = Stopwatch()
        # Warm: the first steps allocate memory and fill the caches.
        for _ in range(20):
            self._step()

    def steps(self, count: int) -> float:
        """Return mean seconds of `count` steps, disturbed or not."""
        began = time.perf_counter()
        for _ in range(count):
            self._step()
        return (time.perf_counter() - began) / count

    def seconds(self) -> float:
        """Return the median step of undisturbed windows in seconds.

        Where other programs disturbed every window, it is the median of the thread's
        processor time, which leaves out the time that it waited for a core.
        """
        undisturbed: list[float] = []
        processor: list[float] = []
        for _ in range(_WINDOWS):
            self._stopwatch.start()
            # reading the counters, and whatever ran before, evicts caches
            self.steps(_STEPS)
            computed = time.thread_time()
            seconds = self.steps(_STEPS)
            processor.append((time.thread_time() - computed) / _STEPS)
            if self._stopwatch.stop().undisturbed:
                undisturbed.append(seconds)
        return typical(undisturbed or processor).value


def reference_step_of_now() -> float:
    """Return the mean of some measurements of the reference step in seconds: the speed of a core, now."""
    gauge = Gauge()
    return fmean(gauge.seconds() for _ in range(_MEASUREMENTS))
