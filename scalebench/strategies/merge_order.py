"""Order of the merges into a shared model, and each worker's weight in the final model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def merge_order(positions: Sequence[Iterable[int]]) -> list[int]:
    """The worker of each merge, first to last, from each worker's 0-based `positions` among all merges."""
    merged = sorted((position, worker) for worker, own in enumerate(positions) for position in own)
    return [worker for _, worker in merged]


def final_weights(
    order: Sequence[int],
    workers: int,
    epochs: int,
    every: int,
    shares: float | Sequence[float],
    samples: Sequence[int] | None = None,
) -> list[float]:
    """(workers,) weight of each worker's training in the final model; 1/K in a plain average.

    A worker's training between two merges is an increment to its weights. Merging, g <- g + a_j (w_j - g), w_j <- g,
    and the mean in the end (by `samples`; default: plain) are linear: the final model is the initial one plus the sum
    of all increments, each times a factor. A worker's weight is the mean of its factors over its epochs. They sum to 1
    in synchronous averaging, and to less here by what merging discards: only a_j (`shares`) of an increment gets into
    the shared model. A merge takes up to `every` epochs: the last one of a training may take fewer.
    """
    share = np.broadcast_to(shares, workers)
    held = np.zeros((workers, workers))  # of replica i, the factor of worker j's training, 1 for all its epochs
    shared = np.zeros(workers)
    left = np.full(workers, epochs)
    for worker in order:
        taken = min(every, left[worker])
        left[worker] -= taken
        held[worker, worker] += taken / epochs
        shared += share[worker] * (held[worker] - shared)
        held[worker] = shared
    held[np.arange(workers), np.arange(workers)] += left / epochs
    factors: list[float] = np.average(held, axis=0, weights=samples).tolist()
    return factors
