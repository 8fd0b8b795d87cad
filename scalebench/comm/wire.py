"""What travels of a tensor: itself, or a weighted copy in the dtype of the wire; and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def pack(tensor: Tensor, weight: float | None, wire: str | None) -> Tensor:
    """`tensor` itself if nothing is asked, else a copy times `weight` in the dtype `wire`.

    Raises:
        ValueError: there is no such wire.
    """
    if wire is not None and wire not in WIRES:
        raise ValueError(f"wire {wire!r}: expected one of {', '.join(WIRES)}")
    packed = tensor if weight is None else tensor * weight
    return packed if wire is None else packed.to(WIRES[wire])


def unpack(packed: Tensor, target: Tensor, total: float | None) -> None:
    """`target` <- `packed`, divided by `total` if there is one."""
    if packed is not target:
        target.copy_(packed)
    if total is not None:
        target.div_(total)


def concatenated(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The tensors as one along the first axis, and how many rows each brought."""
    return torch.cat(list(tensors)), [len(tensor) for tensor in tensors]
