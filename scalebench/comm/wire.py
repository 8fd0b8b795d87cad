"""Conversion of tensors for the wire: weighted copies in another dtype, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
HALVES = (torch.float16, torch.bfloat16)
_EXACT = (torch.float32, torch.float64)  # with exact inverses of powers of two
_BYTES = 8  # of a weight in float64


def pack(
    tensor: Tensor,
    weight: float | None,
    wire: str | None,
    *,
    places: int = 0,
    place: int = 0,
) -> Tensor:
    """Return `tensor` without weight and wire, else a copy times `weight` in the dtype `wire`.

    With `places`, the ranks of a weighted mean, the result is flat and followed by the
    weight, so that one allreduce sums both. Weights in float32 are exact up to 2^24
    samples. In half precision every rank has a place of 8 numbers for the bytes of its
    weight in float64, with zeros in the places of the others, as bytes are exact in
    float16 and bfloat16.

    Raises:
        ValueError: unknown `wire`.
    """
    if wire is not None and wire not in WIRES:
        raise ValueError(f"wire {wire!r}: expected one of {', '.join(WIRES)}")
    dtype = tensor.dtype if wire is None else WIRES[wire]
    if weight is None:
        return tensor.to(dtype)
    if not places:
        return (tensor * weight).to(dtype)
    # A weight in half precision would be rounded: its bytes travel as small whole
    # numbers, which are exact.
    behind = _BYTES * places if dtype in HALVES else 1
    message = tensor.new_zeros(tensor.numel() + behind, dtype=dtype)
    if dtype == tensor.dtype:
        torch.mul(tensor.reshape(-1), weight, out=message[:-behind])
    else:
        message[:-behind] = tensor.reshape(-1) * weight
    if dtype in HALVES:
        digits = torch.tensor([weight], dtype=torch.float64).view(torch.uint8)
        message[tensor.numel() + _BYTES * place :][:_BYTES] = digits.to(message.device)
    else:
        message[-1] = weight
    return message


def unpack(packed: Tensor, target: Tensor, divisor: float | None) -> None:
    """Set `target` to `packed` divided by `divisor`, or by the packed sum of weights; undivided without either."""
    if packed.numel() > target.numel():
        # The weights came behind the elements.
        divisor = divisor or sum_of_weights(packed, target)
        packed = packed[: target.numel()].view_as(target)
    if packed is not target:
        target.copy_(packed)
    if divisor is not None:
        divide_(target, divisor)


def divide_(tensor: Tensor, divisor: float) -> None:
    """Divide `tensor` in place; for powers of two multiply by the inverse, which is exact and takes half the time.

    The factor is a cached tensor, as torch takes longer to convert a Python number than
    to multiply some 10,000.
    """
    if tensor.dtype in _EXACT and math.frexp(divisor)[0] == 0.5:
        tensor.mul_(_inverse(divisor, tensor.dtype))
    else:
        tensor.div_(divisor)


@lru_cache
def _inverse(power_of_two: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(1 / power_of_two, dtype=dtype)


def sum_of_weights(packed: Tensor, target: Tensor) -> float:
    """Return the sum of the weights of all ranks, which follow the elements for `target`."""
    behind = packed[target.numel() :]
    if behind.dtype not in HALVES:
        return float(behind)
    return float(behind.to("cpu", torch.uint8).view(torch.float64).sum())


def concatenated(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Return the tensors concatenated along the first axis, and their numbers of rows."""
    return torch.cat(list(tensors)), [len(tensor) for tensor in tensors]


def wire_bytes(tensor: Tensor, wire: str | None) -> int:
    """Bytes of `tensor` as it travels: two per element in half precision."""
    return tensor.numel() * 2 if wire in ("float16", "bfloat16") else tensor.nbytes


def there_and_back(tensor: Tensor, wire: str) -> None:
    """Cast like a real communicator: `tensor` to the dtype of the `wire`, and the sum back."""
    unpack(pack(tensor, None, wire), torch.empty_like(tensor), tensor.element_size())
