"""Construction of optimizers by name, and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

from pydantic import Field, ValidationError, model_validator

from scalebench.errors import StudyError, nearest
from scalebench.registry import first_fault
from scalebench.study.spec import ADAMW_DECAY, Component, Training
from scalebench.study.validation import StrictModel
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class _Options(StrictModel):
    weight_decay: float = Field(0.0, ge=0, le=1e38)


class SgdOptions(_Options):
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class AdamOptions(_Options):
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)


class AdamWOptions(AdamOptions):
    weight_decay: float = Field(ADAMW_DECAY, ge=0, le=1e38)


class LarsOptions(SgdOptions):
    momentum: float = Field(0.9, ge=0, lt=1)
    trust_coefficient: float = Field(0.001, gt=0)


class LambOptions(AdamOptions):
    eps: float = Field(1e-6, gt=0)


class MuonOptions(AdamOptions):
    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    ns_steps: int = Field(5, ge=1, lt=100)
    weight_decay: float = Field(0.1, ge=0, le=1e38)


# torch.optim.Muon came with this release.
_FIRST_WITH_MUON = (2, 9)
_OF_PYTORCH_OPTIMIZER = ("lars", "lamb")
_OPTIONS: dict[str, type[_Options]] = {
    "sgd": SgdOptions,
    "adam": AdamOptions,
    "adamw": AdamWOptions,
    "lars": LarsOptions,
    "lamb": LambOptions,
    "muon": MuonOptions,
}


def build_optimizer(
    component: Component, parameters: Iterable[Tensor], lr: float, *, flat: bool = False
) -> Optimizer:
    """Return the optimizer `component` over `parameters`; `flat` if they are one tensor."""
    from scalebench.training.torch_optimizers import FlatSgd, Muon

    options = check_optimizer(component).model_dump()
    if component.name == "sgd":
        return (
            FlatSgd(parameters, lr, **options)
            if flat
            else torch.optim.SGD(parameters, lr=lr, **options)
        )
    if "beta1" in options:
        # Options of a study are single numbers, which tuning can draw.
        options["betas"] = (options.pop("beta1"), options.pop("beta2"))
    if component.name == "muon":
        return Muon(parameters, lr, **options)
    if component.name in _OF_PYTORCH_OPTIMIZER:
        import pytorch_optimizer

        # Without adam_debias its LAMB multiplies the step by 1 / (1 - beta1^t), unlike
        # the paper.
        kept = (
            pytorch_optimizer.LARS
            if component.name == "lars"
            else partial(pytorch_optimizer.Lamb, adam_debias=True)
        )
        made: Optimizer = kept(parameters, lr=lr, **options, foreach=False)
        return made
    kind = torch.optim.Adam if component.name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=lr, **options, foreach=False if flat else None)


def check_optimizer(component: Component) -> _Options:
    """Return the options of the optimizer `component`.

    Raises:
        StudyError: unknown optimizer or option, with the nearest name, a value out of range, or a package
            that is missing or too old.
    """
    if component.name not in _OPTIONS:
        raise StudyError(
            f"unknown optimizer {component.name!r}; {nearest(component.name, _OPTIONS)}"
        )
    if (
        component.name in _OF_PYTORCH_OPTIMIZER
        and find_spec("pytorch_optimizer") is None
    ):
        add = 'pip install "scalebench[optimizers]"'
        raise StudyError(
            f"optimizer {component.name} needs pytorch_optimizer; add it with: {add}"
        )
    if component.name == "muon" and _release("torch") < _FIRST_WITH_MUON:
        raise StudyError(
            f"optimizer muon needs torch 2.9 or later, and torch is {version('torch')} here; update it"
        )
    options = _OPTIONS[component.name]
    try:
        return options(**component.options)
    except ValidationError as error:
        raise StudyError(
            f"optimizer {component.name}: {first_fault(error, options)}"
        ) from None


def _release(package: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, without importing the package."""
    return tuple(int(number) for number in version(package).split(".")[:2])


def learning_rate(
    training: Training, workers: int, epochs_done: float, steps_done: int = 0
) -> float:
    """Return the learning rate at a moment of training, t in epochs of E, after s optimizer steps of this worker.

    `constant`: lr. `linear` (Goyal et al., 2017, arXiv 1706.02677): lr * workers,
    reached linearly from lr over the first `lr_warmup_epochs` epochs. `cosine`
    (Loshchilov and Hutter, 2017, arXiv 1608.03983): lr (1 + cos(pi t / E)) / 2. `step`:
    lr * lr_decay^floor(t / lr_decay_every). `optimizer_steps`: lr * lr_decay^floor(s /
    lr_decay_every), which decays after a number of updates that does not depend on the
    worker count.
    """
    match training.lr_policy:
        case "constant":
            return training.lr
        case "linear":
            target = training.lr * workers
            # Also without a warm-up, of no epochs.
            if epochs_done >= training.lr_warmup_epochs:
                return target
            return (
                training.lr
                + (target - training.lr) * epochs_done / training.lr_warmup_epochs
            )
        case "cosine":
            return (
                training.lr
                * (1 + math.cos(math.pi * min(epochs_done / training.epochs, 1.0)))
                / 2
            )
        case policy:
            assert training.lr_decay_every is not None
            # Whole intervals that have passed, in updates or in epochs.
            passed = steps_done if policy == "optimizer_steps" else epochs_done
            return training.lr * training.lr_decay ** int(
                passed // training.lr_decay_every
            )
