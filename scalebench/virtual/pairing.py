"""Merging in pairs, then pairs of pairs: lg K exchanges, in each of which the two that are 2^i apart meet.

Partners end with the same vector, so that the K/2 merges of level i make only K/2^(i+1) different results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

Lap = tuple[float, float]  # when an exchange ends, and how long was waited in it


def merge_pairs_(vectors: Sequence[Tensor], merge: Callable[[Tensor, Tensor], None]) -> None:
    """The merge of all in place of each; every different merge is made once."""
    stride = 1
    while stride < len(vectors):
        for rank in range(0, len(vectors), 2 * stride):
            merge(vectors[rank], vectors[rank + stride])
        stride *= 2
    torch._foreach_copy_(list(vectors[1:]), [vectors[0]] * (len(vectors) - 1))


def exchange_laps(
    starts: Sequence[float], seconds: Callable[[int, int], float], merging: float = 0.0
) -> list[list[Lap]]:
    """The exchanges of each rank that comes at `starts`: a message to the higher of two, and its answer.

    `seconds(a, b)` is how long a message takes from rank a to b, `merging` how long the higher one merges before it
    answers.
    """
    now = list(starts)
    laps: list[list[Lap]] = [[] for _ in now]
    for low, high in _partners(len(now)):
        for source, rank in ((low, high), (high, low)):
            until = max(now[rank], now[source] + seconds(source, rank)) + (merging if rank == high else 0.0)
            laps[rank].append((until, max(0.0, now[source] - now[rank])))  # the way is no waiting
            now[rank] = until
    return laps


def _partners(size: int) -> Iterator[tuple[int, int]]:
    stride = 1
    while stride < size:
        yield from ((low, low | stride) for low in range(size) if not low & stride)
        stride *= 2
