"""Held-out split and standardisation by the training part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.data.tensor import Ints
from scalebench.errors import DataError


def hold_out(n: int, fraction: float, seed: int, labels: NDArray[Any] | None = None) -> tuple[Ints, Ints]:
    """Return ascending row numbers of the training part and of the test part of ceil(fraction n) rows.

    With `labels` the split is stratified by class (largest remainders first, ties by class).
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
    """Return both parts as float32, standardised by mean and deviation of the training part per column.

    A column that is constant in training is only centred.
    """
    mean = train.mean(axis=0, dtype=np.float64)
    spread = train.std(axis=0, dtype=np.float64)
    spread = np.where(spread > 0, spread, 1.0)
    return ((train - mean) / spread).astype(np.float32), ((test - mean) / spread).astype(np.float32)
