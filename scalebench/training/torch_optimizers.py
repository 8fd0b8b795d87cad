"""Optimizers in place of torch's: SGD over one flat tensor, and Muon for matrices with AdamW for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_OF_MUON_ALONE = "ns_steps"  # an option that groups of AdamW do not have


class FlatSgd(torch.optim.SGD):
    """v <- m v + (g + d w), w <- w - eta v; with `nesterov` w <- w - eta (g + d w + m v). v starts as the first change.

    Options, groups and state are those of `torch.optim.SGD`; `parameters` is one tensor
    with a dense gradient. Step hooks and closures are not supported. v is stored in
    `room` if given.
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
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": 0,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
        }
        # as if unpickled, since torch's constructor loads the compiler
        groups = [{"params": [parameter], **options}]
        self.__setstate__(
            {"defaults": options, "state": defaultdict(dict), "param_groups": groups}
        )  # type: ignore[no-untyped-call]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (parameter,) = group["params"]
        with torch.no_grad():
            parameter.add_(self._change(group, parameter), alpha=-group["lr"])

    def step_onto(self, weights: Tensor) -> None:
        """Set the parameter to `weights` and the move of a step from where it is, in three passes over the numbers."""
        (group,) = self.param_groups
        (parameter,) = group["params"]
        with torch.no_grad():
            change = self._change(group, parameter)
            moved = torch.add(parameter, change, alpha=-group["lr"])
            torch.add(moved.sub_(parameter), weights, out=parameter)

    def _change(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Return what is subtracted, times eta, after adding the gradient to the velocity."""
        change = parameter.grad
        assert change is not None
        if group["weight_decay"]:
            change = change.add(parameter, alpha=group["weight_decay"])
        if not group["momentum"]:
            return change
        state = self.state[parameter]
        # The first change is the velocity, without damping, as in torch.
        velocity: Tensor | None = state.get("momentum_buffer")
        if velocity is None:
            velocity = self._room_like(parameter).copy_(change)
            state["momentum_buffer"] = velocity
        else:
            velocity.mul_(group["momentum"]).add_(change)
        if group["nesterov"]:
            return change.add(velocity, alpha=group["momentum"])
        return velocity

    def begin(self) -> None:
        """Create the state before the first step, v = 0."""
        (group,) = self.param_groups
        (parameter,) = group["params"]
        if group["momentum"]:
            self.state[parameter]["momentum_buffer"] = self._room_like(
                parameter
            ).zero_()

    def _room_like(self, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter) if self.room is None else self.room

    step.hooked = True  # type: ignore[attr-defined]  # or torch wraps it in a profiler's record


def step_onto(
    optimizer: torch.optim.Optimizer, parameters: Tensor, weights: Tensor
) -> None:
    """Take the step of `optimizer` from where `parameters` are, but end as far from `weights`."""
    if isinstance(optimizer, FlatSgd):
        optimizer.step_onto(weights)
        return
    present = parameters.clone()
    optimizer.step()
    parameters.sub_(present).add_(weights)


class Muon(torch.optim.Optimizer):
    """B <- m B + g, W <- (1 - eta d) W - 0.2 eta sqrt(max(rows, columns)) NS(g + m B) of each matrix W.

    NS are Newton-Schulz iterations, in bfloat16, which bring the singular values near
    1; the factor gives the change the root mean square of AdamW's, so that rates and
    decays tuned for AdamW hold (`match_rms_adamw`; Liu et al., 2025, arXiv 2502.16982).
    Jordan et al., 2024, https://kellerjordan.github.io/posts/muon. Biases, norms and
    convolutions, which are no matrices, get AdamW at the same rate and decay.

    The steps are those of `torch.optim.Muon` and `torch.optim.AdamW` on the groups and
    the state of this optimizer. `parameters` may be the groups of another one, which
    wrappers such as Horovod's hand over.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        groups: list[dict[str, Any]] = []
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for given in parameters:
            if isinstance(given, dict):
                groups.append(given)
            else:
                (matrices if given.dim() == 2 else others).append(given)
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn="match_rms_adamw",
            )
            groups += muon.param_groups
        if others:
            adamw = torch.optim.AdamW(
                others, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
            )
            groups += adamw.param_groups
        super().__init__(groups, {"lr": lr})
        # Muon and AdamW step on the groups and the state of this one, which wrappers
        # and averages see.
        self._of_groups = [_optimizer_of(group) for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of each group; closures are not supported."""
        for own, group in zip(self._of_groups, self.param_groups, strict=True):
            own.param_groups, own.state = [group], self.state
            own.step()


def _optimizer_of(group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the torch optimizer whose options `group` has."""
    kind = torch.optim.Muon if _OF_MUON_ALONE in group else torch.optim.AdamW
    return kind([dict(group)])
