"""The arithmetic of collectives over tensors that lie in one process, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scalebench.comm.wire import divide_

_ELEMENTWISE = {"max": torch.maximum, "min": torch.minimum}


def reduce_tensors(
    tensors: Sequence[Tensor], op: str, weights: Sequence[float | None], wire: str | None = None
) -> Tensor:
    """sum_i w_i x_i, sum_i w_i x_i / sum_i w_i (`mean`), elementwise `max` or `min`; weights default to 1.

    With `wire` every contribution, and their sum, is rounded to that dtype; sum and quotient are of the tensors' own.
    """
    if op in _ELEMENTWISE:
        result = tensors[0].clone()
        for tensor in tensors[1:]:
            result = _ELEMENTWISE[op](result, tensor)
        return result
    result = _contribution(tensors[0], weights[0], wire).clone()
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        result.add_(_contribution(tensor, weight, wire))
    result = _rounded(result, wire)
    if op == "mean":
        divide_(result, sum(1.0 if weight is None else weight for weight in weights))
    return result


def _contribution(tensor: Tensor, weight: float | None, wire: str | None) -> Tensor:
    return _rounded(tensor if weight is None else tensor * weight, wire)


def _rounded(tensor: Tensor, wire: str | None) -> Tensor:
    return tensor if wire is None else tensor.to(getattr(torch, wire)).to(tensor.dtype)
