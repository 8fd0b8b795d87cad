"""Who merged when into a shared model, and how much of whose training the final model therefore holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def merge_order(positions: Sequence[Iterable[int]]) -> list[int]:
    """The worker of each merge, first to last, from each worker's 0-based `positions` among all merges."""
    merged = sorted((position, worker) for worker, own in enumerate(positions) for position in own)
    return [worker for _, worker in merged]


def final_weights(order: Sequence[int], workers: int, epochs: int, every: int, weight: float) -> list[float]:
    """How much the final model holds of what each worker learned; in a plain average it would be 1/K.

    A worker's training between two merges is an increment to its weights. Merging, g <- g + a (w_j - g), w_j <- g, and
    the plain mean in the end are linear: the final model is the initial one plus the sum of all increments, each times
    a factor. A worker's weight is the mean of its factors over its epochs. They sum to 1 in synchronous averaging, and
    to less here by what merging discards: only a of an increment gets into the shared model.
    """
    held = np.zeros((workers, workers))  # of replica i, the factor of worker j's training, 1 for all its epochs
    shared = np.zeros(workers)
    for worker in order:
        held[worker, worker] += every / epochs
        shared += weight * (held[worker] - shared)
        held[worker] = shared
    held[np.arange(workers), np.arange(workers)] += (epochs % every) / epochs
    factors: list[float] = held.mean(axis=0).tolist()
    return factors
