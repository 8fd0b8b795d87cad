"""Layout of rows in blocks: sizes, grid, and the shuffles that permute rows between epochs."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from scalebench.data.exchange import Ints
from scalebench.errors import DataError

Blocks = int | tuple[int, int] | Sequence[int] | Ints
Grid = tuple[int, int]
SHUFFLES = ("none", "in_block", "rotate_blocks", "pairwise", "global")
MOVING = ("rotate_blocks", "pairwise", "global")  # rows change workers
_ROUNDS_KEPT = 4  # asynchronous workers may be a few epochs apart


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
    if (
        isinstance(blocks, tuple)
        or sizes.ndim != 1
        or len(sizes) == 0
        or sizes.dtype.kind not in "iu"
    ):
        got = " ".join(reprlib.repr(blocks).split())
        raise DataError(
            f"blocks: expected a count, a grid (rows, columns) or a list of sizes, got {got}"
        )
    if sizes.min() < 0 or sum(sizes.tolist()) != length:
        raise DataError(
            f"sizes of blocks are 0 or more and add up to the {length} rows; got {reprlib.repr(blocks)}"
        )
    return sizes.astype(np.int64), (len(sizes), 1)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _mix_in_groups(rows: Ints, group: Ints, rng: np.random.Generator) -> Ints:
    """Permute `rows` (n,) among the places of the same `group` (n,)."""
    mixed = np.empty_like(rows)
    # By group, then by a random number: the places of a group get its rows in random
    # order.
    places = np.argsort(group, kind="stable")
    mixed[places] = rows[np.lexsort((rng.random(len(rows)), group))]
    return mixed


def mix_pairs(rows: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Concatenate, permute and split random pairs of blocks; an odd block is permuted alone.

    `sizes` (blocks,) are kept. A round is dislib's total shuffle; Vazquez-Novoa et al.,
    WACCPD 2025.
    """
    pair = np.empty(len(sizes), dtype=np.int64)
    pair[rng.permutation(len(sizes))] = np.arange(len(sizes)) // 2
    return _mix_in_groups(rows, np.repeat(pair, sizes), rng)


def shuffled(
    how: str, rows: Ints, sizes: Ints, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Apply the shuffle `how` to `rows` (n,) in blocks of `sizes` (blocks,); return rows and block sizes."""
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    if how == "rotate_blocks":
        order = rng.permutation(len(sizes))
        starts = np.cumsum(sizes) - sizes
        rows = np.concatenate([rows[starts[k] : starts[k] + sizes[k]] for k in order])
        sizes = sizes[order]
        blocks = np.repeat(np.arange(len(sizes)), sizes)
    if how in ("in_block", "rotate_blocks"):
        return _mix_in_groups(rows, blocks, rng), sizes
    if how == "pairwise":
        return mix_pairs(rows, sizes, rng), sizes
    return (rng.permutation(rows) if how == "global" else rows), sizes


class PairwiseRounds:
    """Rows after each of successive rounds of `mix_pairs`.

    A pure function of the round: `rng` gives the generator of a round, and rounds that
    are not cached are recomputed.
    """

    def __init__(
        self, rows: Ints, sizes: Ints, rng: Callable[[int], np.random.Generator]
    ) -> None:
        self._sizes, self._rng = sizes, rng
        self._kept: dict[int, Ints] = {-1: rows}

    def rows_after(self, round_: int) -> Ints:
        """Return the rows (n,) after rounds 0 to `round_`."""
        done = max(known for known in self._kept if known <= round_)
        rows = self._kept[done]
        for number in range(done + 1, round_ + 1):
            rows = self._kept[number] = mix_pairs(rows, self._sizes, self._rng(number))
            # The first, rows without a round, stays: any round can be computed from it.
            for old in sorted(self._kept)[1:-_ROUNDS_KEPT]:
                del self._kept[old]
        return rows
