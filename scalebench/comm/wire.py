"""What travels of a tensor: itself, or a weighted copy in the dtype of the wire; and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def pack(tensor: Tensor, weight: float | None, wire: str | None, *, for_mean: bool = False) -> Tensor:
    """`tensor` itself if nothing is asked, else a copy times `weight` in the dtype `wire`.

    For a weighted mean the weight lies behind it, flat, so that one collective brings both sums; but not in half
    precision, which would round it. Numbers of samples, and their sums, are exact in float32 up to 2^24.

    Raises:
        ValueError: there is no such wire.
    """
    if wire is not None and wire not in WIRES:
        raise ValueError(f"wire {wire!r}: expected one of {', '.join(WIRES)}")
    if for_mean and weight is not None and wire is None and tensor.dtype in (torch.float32, torch.float64):
        message = tensor.new_empty(tensor.numel() + 1)
        torch.mul(tensor.reshape(-1), weight, out=message[:-1])
        message[-1] = weight
        return message
    packed = tensor if weight is None else tensor * weight
    return packed if wire is None else packed.to(WIRES[wire])


def unpack(packed: Tensor, target: Tensor, total: float | None) -> None:
    """`target` <- `packed`, divided by `total` if there is one, or by the weight that came with it."""
    if brings_weight(packed, target):
        total = float(packed[-1])
        packed = packed[:-1].view_as(target)
    if packed is not target:
        target.copy_(packed)
    if total is not None:
        target.div_(total)


def brings_weight(packed: Tensor, target: Tensor) -> bool:
    """Whether a weight lies behind what `packed` has for `target`."""
    return packed.numel() > target.numel()


def concatenated(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The tensors as one along the first axis, and how many rows each brought."""
    return torch.cat(list(tensors)), [len(tensor) for tensor in tensors]
