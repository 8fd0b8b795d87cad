"""A model whose parameters, and their gradients, are views of one flat buffer each.

One buffer makes averaging one collective, the optimizer one kernel and a snapshot one copy.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def flatten(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Move every trainable parameter of `model` into one buffer; return it and the buffer of the gradients.

    Both are (n,) in the order of `model.parameters()`; parameters keep their shapes and values.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = trainable[0]
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in trainable])
    gradients = torch.zeros_like(flat, device=first.device)
    for parameter, value, gradient in zip(trainable, views(trainable, flat), views(trainable, gradients), strict=True):
        parameter.data = value
        parameter.grad = gradient
    return flat, gradients


def views(parameters: list[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """The pieces of `flat` that have the shapes of `parameters`, in their order."""
    ends = [0]
    for parameter in parameters:
        ends.append(ends[-1] + parameter.numel())
    return [
        flat[start:end].view_as(parameter) for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True)
    ]


def is_finite(vector: Tensor) -> bool:
    """Whether no element is NaN or infinite; one pass, nothing allocated."""
    low, high = torch.aminmax(vector)
    return bool(torch.isfinite(low) & torch.isfinite(high))
