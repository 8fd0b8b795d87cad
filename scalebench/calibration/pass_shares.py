"""How the passes of a step divide: shares of each layer in both, and when each gradient is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from scalebench.calibration.step_windows import bounded
from scalebench.errors import ModelError
from scalebench.models.parts import layers_of, through
from scalebench.pricing.step_times import LayerShare
from scalebench.training.stage import run_backward

if TYPE_CHECKING:
    import torch

_PASSES = (5, 50)  # least and most that are timed
_PASSES_S = 0.5


def layer_shares(replica: Any) -> list[LayerShare]:
    """Return the shares of each layer in the forward and the backward pass, the median over some steps.

    Layers run one after the other, each backward pass from the gradient of the layer behind it, the last from ones. On
    a CPU the thread's processor time counts, which other programs on its core leave as it is. No shares if the model
    cannot be cut.
    """
    try:
        layers = layers_of(replica.model, str(replica.run.model))
    except ModelError:
        return []
    now, between = _moments(replica.device, time.thread_time)
    x = next(iter(replica.batches(0))).x
    shares = []
    for _ in bounded(*_PASSES, _PASSES_S):
        passes, taken, moments = [], x, [now()]
        for place, layer in enumerate(layers):
            leaf = taken.detach().requires_grad_(place > 0)
            made = through(layer, leaf)
            passes.append((leaf, made))
            taken = made
            moments.append(now())
        gradient = taken.new_ones(taken.shape)
        moments.append(now())
        for leaf, made in reversed(passes):
            run_backward((made,), (gradient,))
            gradient = leaf.grad if leaf.grad is not None else leaf
            moments.append(now())
        count = len(layers)
        forward = [between(moments[place], moments[place + 1]) for place in range(count)]
        backward = [between(moments[-place - 2], moments[-place - 1]) for place in range(count)]
        shares.append([forward, backward])
    middle = np.median(np.array(shares), axis=0)
    middle /= middle.sum(axis=1, keepdims=True)
    return [
        LayerShare(name=layer.name, forward=forward, backward=backward)
        for layer, (forward, backward) in zip(layers, middle.T.tolist(), strict=True)
    ]


def release_shares(replica: Any) -> list[float]:
    """Return the share of the backward pass after which each gradient is complete, the median over some steps."""

    trainable = [parameter for parameter in replica.model.parameters() if parameter.requires_grad]
    now, between = _moments(replica.device, time.perf_counter)
    moments: dict[int, Any] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: moments.__setitem__(index, now()))
        for index, parameter in enumerate(trainable)
    ]
    shares = []
    batch = next(iter(replica.batches(0)))
    for _ in bounded(*_PASSES, _PASSES_S):
        value = replica.batch_loss(batch)
        begin = now()
        value.backward()
        end = now()
        whole = between(begin, end)
        shares.append([between(begin, moments.get(index, end)) / whole for index in range(len(trainable))])
    for handle in handles:
        handle.remove()
    return [float(share) for share in np.median(np.array(shares), axis=0)]


def _moments(device: torch.device, clock: Callable[[], float]) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return what marks a moment of the work on `device`, and what gives the time between two, in any unit.

    On a CPU `clock` is read.
    """
    if device.type == "cpu":
        return clock, lambda begin, end: end - begin
    import torch

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end))

    return mark, between
