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
    if _is_count(blocks):
        blocks = (blocks, 1)
    if isinstance(blocks, tuple):
        if len(blocks) != 2 or not all(map(_is_count, blocks)):
            raise _no_blocks(blocks)
        grid = (int(blocks[0]), int(blocks[1]))
        return _cut_evenly(length, grid), grid
    sizes = _sizes(blocks)
    if sizes.min() < 0:
        raise DataError(f"a block of {sizes.min()} rows; sizes are 0 or more")
    if (total := sum(sizes.tolist())) != length:
        raise DataError(f"block sizes add up to {total}, expected the {length} rows")
    return sizes, (len(sizes), 1)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _sizes(blocks: Any) -> Ints:
    try:
        sizes = np.asarray(blocks)
    except (ValueError, TypeError, RuntimeError):
        raise _no_blocks(blocks) from None
    if sizes.ndim != 1 or len(sizes) == 0 or sizes.dtype.kind not in "iu":
        raise _no_blocks(blocks)
    return sizes.astype(np.int64)


def _no_blocks(blocks: Any) -> DataError:
    got = " ".join(reprlib.repr(blocks).split())
    return DataError(f"blocks: expected a count, a grid (rows, columns) or a list of sizes, got {got}")


def _cut_evenly(length: int, grid: Grid) -> Ints:
    parts = grid[0] * grid[1]
    if min(grid) < 1:
        raise DataError(f"cannot cut into {grid[0]}x{grid[1]} blocks; at least one is needed")
    if length == 0:
        raise DataError("there are no rows to cut into blocks; give rows, or sizes of 0 such as [0]")
    if parts > length:
        raise DataError(f"{parts} blocks but {length} samples; give at most one block per sample")
    return cut(length, parts)
