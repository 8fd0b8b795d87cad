"""Layout of rows in blocks: sizes and grid."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from scalebench.data.exchange import Ints
from scalebench.errors import DataError

Blocks = int | tuple[int, int] | Sequence[int] | Ints
Grid = tuple[int, int]


def cut(length: int, parts: int) -> Ints:
    """Return sizes (parts,) that sum to `length` and differ by at most one, larger ones first."""
    whole, rest = divmod(length, parts)
    sizes = np.full(parts, whole, dtype=np.int64)
    sizes[:rest] += 1
    return sizes


def laid_out(length: int, blocks: Blocks | None, ranks: int) -> tuple[Ints, Grid]:
    """Return block sizes and grid of `length` rows; by default one block for each of `ranks`, at most one per row.

    Raises:
        DataError: `blocks` is neither a count, a grid nor a list of sizes, or does not fit the rows.
    """
    if blocks is None:
        blocks = max(1, min(ranks, length))
    grid: Any = (blocks, 1) if _is_count(blocks) else blocks
    if isinstance(grid, tuple) and len(grid) == 2 and all(map(_is_count, grid)):
        if min(grid) < 1 or grid[0] * grid[1] > length:
            raise DataError(
                f"cannot cut {length} rows into {grid[0]}x{grid[1]} blocks; give each block a row, or a list of sizes"
            )
        return cut(length, grid[0] * grid[1]), (int(grid[0]), int(grid[1]))
    try:
        sizes = np.asarray(blocks)
    except (ValueError, TypeError, RuntimeError):
        sizes = np.empty(0)
    if isinstance(blocks, tuple) or sizes.ndim != 1 or len(sizes) == 0 or sizes.dtype.kind not in "iu":
        got = " ".join(reprlib.repr(blocks).split())
        raise DataError(f"blocks: expected a count, a grid (rows, columns) or a list of sizes, got {got}")
    if sizes.min() < 0 or sum(sizes.tolist()) != length:
        raise DataError(f"sizes of blocks are 0 or more and add up to the {length} rows; got {reprlib.repr(blocks)}")
    return sizes.astype(np.int64), (len(sizes), 1)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
