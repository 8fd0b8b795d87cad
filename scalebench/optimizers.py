"""Optimizers by name, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from scalebench.errors import StudyError, nearest
from scalebench.study.spec import Component, Training


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    weight_decay: float = Field(0.0, ge=0)


class SgdOptions(_Options):
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SgdOptions:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class AdamOptions(_Options):
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)


def _sgd(parameters: Iterable[Tensor], lr: float, options: Any, **flags: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, **options.model_dump(), **flags)


def _adam(cls: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    def build(parameters: Iterable[Tensor], lr: float, options: Any, **flags: Any) -> torch.optim.Optimizer:
        betas = (options.beta1, options.beta2)
        return cls(parameters, lr=lr, betas=betas, eps=options.eps, weight_decay=options.weight_decay, **flags)  # type: ignore[call-arg]

    return build


_OPTIMIZERS: dict[str, tuple[type[_Options], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (SgdOptions, _sgd),
    "adam": (AdamOptions, _adam(torch.optim.Adam)),
    "adamw": (AdamOptions, _adam(torch.optim.AdamW)),
}


def build_optimizer(
    component: Component, parameters: Iterable[Tensor], lr: float, **flags: Any
) -> torch.optim.Optimizer:
    """The optimizer `component` over `parameters`; `flags` go to torch (`foreach=False` for one flat tensor)."""
    return _OPTIMIZERS[component.name][1](parameters, lr, check_optimizer(component), **flags)


def check_optimizer(component: Component) -> BaseModel:
    """The options of the optimizer `component`.

    Raises:
        StudyError: unknown optimizer or option, with the nearest name, or a value out of its range.
    """
    if component.name not in _OPTIMIZERS:
        raise StudyError(f"unknown optimizer {component.name!r}; {nearest(component.name, _OPTIMIZERS)}")
    options = _OPTIMIZERS[component.name][0]
    try:
        return options(**component.options)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        hint = f"; {nearest(name, options.model_fields)}" if name not in options.model_fields else ""
        raise StudyError(f"optimizer {component.name}: option {name!r}: {first['msg']}{hint}") from None


def learning_rate(training: Training, workers: int, epochs_done: float) -> float:
    """The learning rate at a moment of training, in epochs.

    `constant`: lr. `linear` (Goyal et al., 2017, arXiv 1706.02677): lr * workers, reached linearly from lr over
    the first `lr_warmup_epochs` epochs.
    """
    if training.lr_policy == "constant":
        return training.lr
    target = training.lr * workers
    if epochs_done >= training.lr_warmup_epochs:
        return target
    return training.lr + (target - training.lr) * epochs_done / training.lr_warmup_epochs
