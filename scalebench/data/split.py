"""Held-out and validation split, and standardisation by the training part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.data.builder import Allocate, Arrays
from scalebench.data.dataset import Dataset
from scalebench.data.exchange import Ints
from scalebench.errors import DataError

_ROWS_AT_ONCE = 4096


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


def validation_split(dataset: Dataset, copies: int, share: float, seed: int, allocate: Allocate) -> Arrays:
    """Return the training part of `dataset` without ceil(share n) samples, and these as test part.

    The test part of `dataset` is not used. Of `copies` altered copies of each sample, one block after the other, all go
    with their sample: none of a held-out sample stays in the training part, and it is judged by its first copy alone.
    """
    samples = dataset.n_train // copies
    labels = np.asarray(dataset.y_train[:samples]) if dataset.task == "classification" else None
    kept, held = hold_out(samples, share, seed, labels)
    rows = {"train": np.concatenate([kept + copy * samples for copy in range(copies)]), "test": held}
    arrays: dict[str, Any] = {
        f"{name}_{part}": _taken(allocate, f"{name}_{part}", getattr(dataset, f"{name}_train"), rows[part])
        for part in rows
        for name in ("x", "y")
    }
    return Arrays(dataset.task, dataset.outputs, **arrays)


def _taken(allocate: Allocate, name: str, array: NDArray[Any], rows: Ints) -> NDArray[Any]:
    """Return the `rows` of `array` as a new array, copied a few thousand at a time."""
    taken = allocate(name, (len(rows), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        taken[part] = array[rows[part]]
    return taken
