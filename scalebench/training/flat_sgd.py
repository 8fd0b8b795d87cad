"""SGD over one flat tensor: bit for bit torch's, without its overhead for each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class FlatSgd(torch.optim.SGD):
    """v <- m v + (g + d w), w <- w - eta v; with `nesterov` w <- w - eta (g + d w + m v). v starts as the first change.

    Options, groups and state are those of `torch.optim.SGD`; `parameters` is one tensor with a dense gradient. Step
    hooks and closures are not supported. v is stored in `room` if given.
    """

    room: Tensor | None = None  # not copied

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        (parameter,) = parameters
        options = {"lr": lr, "momentum": momentum, "dampening": 0, "nesterov": nesterov, "weight_decay": weight_decay}
        # as if unpickled, since torch's constructor loads the compiler
        groups = [{"params": [parameter], **options}]
        self.__setstate__({"defaults": options, "state": defaultdict(dict), "param_groups": groups})  # type: ignore[no-untyped-call]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (parameter,) = group["params"]
        with torch.no_grad():
            change = parameter.grad
            if group["weight_decay"]:
                change = change.add(parameter, alpha=group["weight_decay"])
            if group["momentum"]:
                state = self.state[parameter]
                velocity = state.get("momentum_buffer")
                if velocity is None:
                    state["momentum_buffer"] = velocity = self._room_like(parameter).copy_(change)
                else:
                    velocity.mul_(group["momentum"]).add_(change)
                change = change.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity
            parameter.add_(change, alpha=-group["lr"])

    def begin(self) -> None:
        """Create the state before the first step, v = 0."""
        (group,) = self.param_groups
        (parameter,) = group["params"]
        if group["momentum"]:
            self.state[parameter]["momentum_buffer"] = self._room_like(parameter).zero_()

    def _room_like(self, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter) if self.room is None else self.room

    step.hooked = True  # type: ignore[attr-defined]  # or torch wraps it in a profiler's record
