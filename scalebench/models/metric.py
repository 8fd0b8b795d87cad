"""Losses and metrics of tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scalebench.errors import RunError
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def loss_for(task: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return loss(outputs, targets): mean cross entropy for classification, mean squared error for regression."""
    from torch.nn import functional

    return functional.cross_entropy if task == "classification" else functional.mse_loss


def logits_of(outputs: Any) -> Any:
    """Return the outputs themselves of a model that wraps them, as those of transformers do: `outputs.logits`."""
    return getattr(outputs, "logits", outputs)


def takes_labels(model: nn.Module, task: str) -> bool:
    """Return True if `forward` takes `labels`, from which it computes a loss of its own, as in transformers.

    In regression it gets none: transformers takes several targets for independent
    classes.
    """
    return (
        task == "classification"
        and "labels" in inspect.signature(model.forward).parameters
    )


def own_loss(
    outputs: Any, targets: Tensor, otherwise: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return `outputs.loss` where a model gives one, else `otherwise` of its logits."""
    loss: Tensor | None = getattr(outputs, "loss", None)
    return otherwise(logits_of(outputs), targets) if loss is None else loss


def metric(task: str, outputs: Tensor, targets: Tensor) -> float:
    """Return accuracy, or R2 = 1 - sum (t - o)^2 / sum (t - mean t)^2 averaged over columns, in float64.

    A column with equal targets has R2 = 1 if predicted exactly and 0 otherwise, as in
    scikit-learn.
    """
    if task == "classification":
        return float((outputs.argmax(dim=1) == targets).double().mean())
    # Sums of squares of a thousand samples lose digits in float32.
    outputs, targets = outputs.double(), targets.double()
    residual = (targets - outputs).square().sum(dim=0)
    total = (targets - targets.mean(dim=0)).square().sum(dim=0)
    constant = total == 0
    score = 1 - residual / torch.where(constant, 1.0, total)
    return float(torch.where(constant, (residual == 0).double(), score).mean())


def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, task: str, batch: int = 1024
) -> float:
    """Return `metric` of `model` on `x`, `y`, in batches without gradients; restores the mode of the model."""
    # torch counts the changes of a tensor in place.
    before = x._version
    # Module by module: a model may keep some in evaluation mode, as frozen statistics.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            pieces = [x[start : start + batch] for start in range(0, len(x), batch)]
            outputs = torch.cat([logits_of(model(piece)) for piece in pieces])
    finally:
        for module, was_training in modes:
            module.training = was_training
    if x._version != before:
        raise RunError(
            "the model changes its input in place: held-out samples would be others at the next evaluation"
        )
    return metric(task, outputs, y)
