"""Numbers in few bits, with a scale for each row of a matrix, and their places in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_HALF_RANGE = 127  # of 8 bits with a sign
_SMALLEST = -6  # exponent of the smallest E3M0 number beside 0; the largest is 2^0
_SCALE_BYTES = 4  # float32
_COVERED = 6  # standard deviations, by the bins of `by_bins`


class RowScaled:
    """Vectors of n numbers in 8 or 4 bits: x is about s q(x / s), with s the largest magnitude of its row.

        8 bits:  q(y) = round(127 y) / 127
        4 bits:  a sign, three bits of exponent and no mantissa (E3M0): q(y) in 0, 2^-6, 2^-5 ... 1, the nearest

    Rows are those of the matrices of `shapes`, along their first axis; a vector is one
    row. A message is the scales in float32, then the codes: 4 r + ceil(n bits / 8)
    bytes for r rows. 8 bits are as in torchft's quantised allreduce; E3M0 is Streaming
    DiLoCo's, whose text does not state the scale.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], bits: int, like: Tensor
    ) -> None:
        self._rows = [shape[0] if len(shape) > 1 else 1 for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        self._bits, self._dtype = bits, like.dtype

    def encode(self, vector: Tensor) -> Tensor:
        """Return the message (bytes,) that stands for `vector` (n,)."""
        matrices = self._matrices(vector)
        scales = [matrix.abs().amax(1) for matrix in matrices]
        # a row of zeros has scale 0, and stays one
        tiny = torch.finfo(self._dtype).tiny
        ratios = torch.cat(
            [
                (matrix / scale.clamp(min=tiny)[:, None]).view(-1)
                for matrix, scale in zip(matrices, scales, strict=True)
            ]
        )
        codes = self._codes(ratios)
        head = torch.cat(scales).to(torch.float32).view(torch.uint8)
        return torch.cat([head, packed_codes(codes, self._bits)])

    def decode(self, message: Tensor) -> Tensor:
        """Return the vector (n,) for which a message stands."""
        split = _SCALE_BYTES * sum(self._rows)
        scales = message[:split].clone().view(torch.float32).to(self._dtype)
        codes = unpacked_codes(message[split:], self._bits, sum(self._sizes))
        numbers = self._numbers(codes)
        for matrix, scale in zip(
            self._matrices(numbers), torch.split(scales, self._rows), strict=True
        ):
            matrix.mul_(scale[:, None])
        return numbers

    def _matrices(self, vector: Tensor) -> list[Tensor]:
        pieces = vector.split_with_sizes(self._sizes)
        return [
            piece.view(rows, -1) for piece, rows in zip(pieces, self._rows, strict=True)
        ]

    def _codes(self, ratios: Tensor) -> Tensor:
        """Return codes, uint8, of numbers from -1 to 1."""
        if self._bits == 8:
            return (
                ratios.mul(_HALF_RANGE).round_().add_(_HALF_RANGE + 1).to(torch.uint8)
            )
        _, between = _e3m0(ratios.dtype, ratios.device)
        magnitudes = torch.bucketize(ratios.abs(), between, right=True).to(torch.uint8)
        return magnitudes.add_(torch.signbit(ratios).to(torch.uint8), alpha=8)

    def _numbers(self, codes: Tensor) -> Tensor:
        if self._bits == 8:
            return codes.to(self._dtype).sub_(_HALF_RANGE + 1).div_(_HALF_RANGE)
        levels, _ = _e3m0(self._dtype, codes.device)
        return levels.index_select(0, codes.int())


@lru_cache(maxsize=4)
def _e3m0(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the numbers of all 16 codes, and the 7 that lie between two neighbouring magnitudes."""
    magnitudes = torch.tensor(
        [0.0, *(2.0**exponent for exponent in range(_SMALLEST, 1))], dtype=dtype
    )
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    return torch.cat([magnitudes, -magnitudes]).to(device), between.to(device)


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (..., n) below 2^bits, uint8, in ceil(n bits / 8) bytes; the first lies in a byte's lowest bits."""
    each = 8 // bits  # codes in a byte
    if each == 1:
        return codes
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
    filled: Tensor = padded.unflatten(-1, (-1, each))
    together = filled[..., 0].clone()
    for place in range(1, each):
        together.bitwise_or_(filled[..., place] << (place * bits))
    return together


def unpacked_codes(together: Tensor, bits: int, n: int) -> Tensor:
    """Return the first `n` codes (..., n), uint8, of those that `packed_codes` put into bytes (..., b)."""
    each = 8 // bits
    if each == 1:
        return together
    mask = 2**bits - 1
    apart = torch.stack(
        [(together >> (place * bits)) & mask for place in range(each)], -1
    )
    return apart.flatten(-2)[..., :n]


def by_bins(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes (..., n), uint8, of values (..., n), and the table (..., 2^bits) of what they stand for, in float32.

    2^bits bins of equal width cover 6 standard deviations s around the mean m, and
    beyond at both ends: code c = round((x - m) 2^bits / (6 s) + 2^bits / 2), clamped. A
    code stands for the mean of the values that have it. The quantiser of SparseLoCo,
    arXiv 2508.15706.
    """
    bins = 2**bits
    n = values.shape[-1]
    centred = values - values.mean(-1, keepdim=True)
    deviation = centred.norm(dim=-1, keepdim=True) / math.sqrt(max(1, n - 1))
    width = deviation * (_COVERED / bins)
    width = torch.where(width > 0, width, 1.0)  # all values are equal
    codes = (centred / width + bins // 2).round_().clamp_(0, bins - 1).nan_to_num_()
    places = codes.to(torch.int64)
    empty = values.new_zeros(*values.shape[:-1], bins)
    sums = empty.scatter_add(-1, places, values)
    counts = empty.scatter_add(-1, places, torch.ones_like(values))
    return codes.to(torch.uint8), (sums / counts.clamp(min=1.0)).to(torch.float32)
