"""Shuffles between epochs: permutations of the rows of an index array in blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scalebench.data.exchange import Ints

SHUFFLES = ("none", "in_block", "rotate_blocks", "pairwise", "global")
MOVING = ("rotate_blocks", "pairwise", "global")  # rows change workers
_ROUNDS_KEPT = 4  # asynchronous workers may be a few epochs apart


def mix_in_groups(rows: Ints, group: Ints, rng: np.random.Generator) -> Ints:
    """Permute `rows` (n,) among the places of the same `group` (n,)."""
    mixed = np.empty_like(rows)
    mixed[np.argsort(group, kind="stable")] = rows[np.lexsort((rng.random(len(rows)), group))]
    return mixed


def mix_pairs(rows: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Concatenate, permute and split random pairs of blocks; an odd block is permuted alone.

    `sizes` (blocks,) are kept. A round is dislib's total shuffle; Vazquez-Novoa et al., WACCPD 2025.
    """
    pair = np.empty(len(sizes), dtype=np.int64)
    pair[rng.permutation(len(sizes))] = np.arange(len(sizes)) // 2
    return mix_in_groups(rows, np.repeat(pair, sizes), rng)


def shuffled(how: str, rows: Ints, sizes: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Apply the shuffle `how` to `rows` (n,) in blocks of `sizes` (blocks,); return rows and block sizes."""
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    if how == "rotate_blocks":
        order = rng.permutation(len(sizes))
        starts = np.cumsum(sizes) - sizes
        rows = np.concatenate([rows[starts[k] : starts[k] + sizes[k]] for k in order])
        sizes = sizes[order]
        blocks = np.repeat(np.arange(len(sizes)), sizes)
    if how in ("in_block", "rotate_blocks"):
        return mix_in_groups(rows, blocks, rng), sizes
    if how == "pairwise":
        return mix_pairs(rows, sizes, rng), sizes
    return (rng.permutation(rows) if how == "global" else rows), sizes


class PairwiseRounds:
    """Rows after each of successive rounds of `mix_pairs`.

    A pure function of the round: `rng` gives the generator of a round, and rounds that are not cached are recomputed.
    """

    def __init__(self, rows: Ints, sizes: Ints, rng: Callable[[int], np.random.Generator]) -> None:
        self._sizes, self._rng = sizes, rng
        self._kept: dict[int, Ints] = {-1: rows}

    def rows_after(self, round_: int) -> Ints:
        """Return the rows (n,) after rounds 0 to `round_`."""
        done = max(known for known in self._kept if known <= round_)
        rows = self._kept[done]
        for number in range(done + 1, round_ + 1):
            rows = self._kept[number] = mix_pairs(rows, self._sizes, self._rng(number))
            for old in sorted(self._kept)[1:-_ROUNDS_KEPT]:
                del self._kept[old]
        return rows
