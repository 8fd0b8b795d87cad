"""A held-out part, and a scaling that knows the training part only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.data.tensor import Ints
from scalebench.errors import DataError


def hold_out(n: int, fraction: float, seed: int, labels: NDArray[Any] | None = None) -> tuple[Ints, Ints]:
    """Ascending row numbers of the training and of the test part, ceil(fraction n) rows in the latter.

    With `labels` each class gives its share to the test part (largest remainders first, ties by class).
    """
    size = math.ceil(fraction * n)
    if not 0 < size < n:
        raise DataError(f"holding out {fraction:g} of {n} samples leaves one part empty; give more samples")
    rng = np.random.default_rng(seed)
    if labels is None:
        test = rng.permutation(n)[:size]
    else:
        classes, counts = np.unique(labels, return_counts=True)
        shares = counts * (size / n)
        takes = np.floor(shares).astype(np.int64)
        takes[np.argsort(takes - shares, kind="stable")[: size - int(takes.sum())]] += 1
        members = (rng.permutation(np.flatnonzero(labels == label)) for label in classes)
        test = np.concatenate([rows[:take] for rows, take in zip(members, takes, strict=True)])
    is_test = np.zeros(n, dtype=bool)
    is_test[test] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def standardised(train: NDArray[Any], test: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both parts as float32 with the training part's mean 0 and standard deviation 1 per column.

    A column that is constant in training is only centred.
    """
    mean = train.mean(axis=0, dtype=np.float64)
    spread = train.std(axis=0, dtype=np.float64)
    spread = np.where(spread > 0, spread, 1.0)
    return ((train - mean) / spread).astype(np.float32), ((test - mean) / spread).astype(np.float32)
