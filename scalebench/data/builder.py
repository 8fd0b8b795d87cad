"""Base class of data sets, which a new data set implements; the splits and checks of its arrays."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scalebench.data.dataset import Dataset, Task
from scalebench.data.exchange import Ints
from scalebench.errors import DataError
from scalebench.formatting import counted
from scalebench.registry import Choice, Registry

Allocate = Callable[[str, tuple[int, ...], Any], NDArray[Any]]
_ROWS_AT_ONCE = 4096  # of an array that may be larger than memory
_SHOWN = 8  # classes in a note


@dataclass(frozen=True)
class Arrays:
    """Arrays of a data set, and notes on its files for the user. Shapes and dtypes are those of `Dataset`."""

    task: Task
    outputs: int
    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    notes: tuple[str, ...] = ()


class DatasetBuilder(Choice):
    """Builder of a data set: its fields are its options, `build` makes its arrays."""

    grows: ClassVar[bool] = False  # True if `grown` can enlarge it, for weak scaling
    copies: ClassVar[int] = (
        # of each training sample: the unaltered ones, then blocks of altered ones in
        # that order
        1
    )

    def grown(self, factor: int) -> DatasetBuilder:
        """Return this data set with `factor` times as many training samples."""
        raise NotImplementedError

    def files(self, data_dir: Path | None) -> list[Path]:
        """Return the input files. Raises DataError with the missing files and their source."""
        return []

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        """Return the arrays. `allocate(name, shape, dtype)` creates one on disk, for arrays larger than memory."""
        raise NotImplementedError


DATASETS: Registry[DatasetBuilder] = Registry(
    "data set", DataError, "scalebench.data.sets", "scalebench.datasets"
)


def notes_on(arrays: Arrays) -> list[str]:
    """Return notes on classes without samples, and on test samples that are training samples too, with their counts."""
    notes = []
    if arrays.task == "classification":
        notes += _empty_classes(arrays.y_train, arrays.y_test, arrays.outputs)
    # Digests in place of samples: a data set may be larger than memory.
    known = set(_digests(arrays.x_train, arrays.y_train))
    repeated = sum(digest in known for digest in _digests(arrays.x_test, arrays.y_test))
    if repeated:
        are = "is a training sample" if repeated == 1 else "are training samples"
        tested = counted(len(arrays.x_test), "test sample")
        notes.append(
            f"{repeated} of {tested} {are} too, with the same features and target: their metric shows memory"
        )
    return notes


def _empty_classes(
    y_train: NDArray[Any], y_test: NDArray[Any], outputs: int
) -> list[str]:
    """Return a note on the classes that no training sample has, if any; `check` refuses labels that are no class."""
    in_training = set(np.unique(y_train).tolist())
    in_test = set(np.unique(y_test).tolist())
    empty = sorted(set(range(outputs)) - in_training)
    if not empty:
        return []
    shown = ", ".join(map(str, empty[:_SHOWN]))
    if len(empty) > _SHOWN:
        shown += ", ..."
    note = f"{len(empty)} of {outputs} classes ({shown}) {'has' if len(empty) == 1 else 'have'} no training sample"
    tested = len(in_test & set(empty))
    if tested:
        note += (
            f", and {tested} of these {'has' if tested == 1 else 'have'} test samples"
        )
    return [
        f"{note}: outputs that are never trained; number the classes 0, 1, ... without gaps"
    ]


def _digests(x: NDArray[Any], y: NDArray[Any]) -> Iterator[bytes]:
    """Yield a digest of each sample with its target."""
    for features, target in zip(x, y, strict=False):  # `check` refuses other lengths
        digest = hashlib.blake2b(np.ascontiguousarray(features).data, digest_size=16)
        digest.update(np.ascontiguousarray(target).data)
        yield digest.digest()


def check(name: str, arrays: Arrays) -> None:
    """Refuse arrays that are not valid for training.

    Raises:
        DataError: no samples, different lengths, a wrong dtype, values that are not finite, or a class out of range.
    """
    for part in ("train", "test"):
        x, y = getattr(arrays, f"x_{part}"), getattr(arrays, f"y_{part}")
        where = f"data set {name}, {part} part"
        if len(x) == 0:
            raise DataError(f"{where}: no samples; at least one is needed")
        if len(x) != len(y):
            raise DataError(
                f"{where}: {len(x)} samples but {len(y)} targets; expected as many targets as samples"
            )
        if x.shape[1:] != arrays.x_train.shape[1:]:
            raise DataError(
                f"{where}: samples of shape {x.shape[1:]}, expected {arrays.x_train.shape[1:]} as in training"
            )
        _check_finite(x, where, "features")
        if arrays.task == "classification":
            _check_classes(y, arrays.outputs, where)
        else:
            if y.shape[1:] != (arrays.outputs,):
                raise DataError(
                    f"{where}: targets of shape {y.shape}, expected ({len(x)}, {arrays.outputs})"
                )
            _check_finite(y, where, "targets")


def _check_finite(values: NDArray[Any], where: str, what: str) -> None:
    if values.dtype != np.float32:
        raise DataError(f"{where}: {what} are {values.dtype}, expected float32")
    for start in range(0, len(values), _ROWS_AT_ONCE):
        chunk = values[start : start + _ROWS_AT_ONCE]
        bad = ~np.isfinite(chunk).reshape(len(chunk), -1).all(axis=1)
        if bad.any():
            row = start + int(np.argmax(bad))
            raise DataError(
                f"{where}: {what} of row {row} (counted from 0) hold NaN or infinity; remove or fill them"
            )


def _check_classes(labels: NDArray[Any], classes: int, where: str) -> None:
    if labels.ndim != 1 or labels.dtype != np.int64:
        raise DataError(
            f"{where}: labels are {labels.dtype} {labels.shape}, expected int64 (N,), one class a sample; "
            "make a sample of each place that has a label"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(
            f"{where}: row {row} has label {int(labels[row])}, expected 0 to {classes - 1}"
        )


def hold_out(
    n: int, fraction: float, seed: int, labels: NDArray[Any] | None = None
) -> tuple[Ints, Ints]:
    """Return ascending row numbers of the training part and of the test part of ceil(fraction n) rows.

    With `labels` the split is stratified by class (largest remainders first, ties by
    class).
    """
    size = math.ceil(fraction * n)
    if not 0 < size < n:
        raise DataError(
            f"holding out {fraction:g} of {n} samples leaves one part empty; give more samples"
        )
    rng = np.random.default_rng(seed)
    if labels is None:
        test = rng.permutation(n)[:size]
    else:
        classes, counts = np.unique(labels, return_counts=True)
        # Largest remainders: rounded down first, then one more where most was cut off.
        shares = counts * (size / n)
        takes = np.floor(shares).astype(np.int64)
        takes[np.argsort(takes - shares, kind="stable")[: size - int(takes.sum())]] += 1
        members = (
            rng.permutation(np.flatnonzero(labels == label)) for label in classes
        )
        test = np.concatenate(
            [rows[:take] for rows, take in zip(members, takes, strict=True)]
        )
    is_test = np.zeros(n, dtype=bool)
    is_test[test] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def standardised(
    train: NDArray[Any], test: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return both parts as float32, standardised by mean and deviation of the training part per column.

    A column that is constant in training is only centred.
    """
    mean = train.mean(axis=0, dtype=np.float64)
    spread = train.std(axis=0, dtype=np.float64)
    spread = np.where(spread > 0, spread, 1.0)
    scaled_train = (train - mean) / spread
    scaled_test = (test - mean) / spread
    return scaled_train.astype(np.float32), scaled_test.astype(np.float32)


def validation_split(
    dataset: Dataset, copies: int, share: float, seed: int, allocate: Allocate
) -> Arrays:
    """Return the training part of `dataset` without ceil(share n) samples, and these as test part.

    The test part of `dataset` is not used. Of `copies` altered copies of each sample,
    one block after the other, all go with their sample: none of a held-out sample stays
    in the training part, and it is judged by its first copy alone.
    """
    samples = dataset.n_train // copies
    labels = (
        np.asarray(dataset.y_train[:samples])
        if dataset.task == "classification"
        else None
    )
    kept, held = hold_out(samples, share, seed, labels)
    # Altered copies stand in blocks behind the samples: sample i has the rows i, i + n,
    # i + 2 n, ...
    rows = {
        "train": np.concatenate([kept + copy * samples for copy in range(copies)]),
        "test": held,
    }
    arrays: dict[str, Any] = {
        f"{name}_{part}": _taken(
            allocate, f"{name}_{part}", getattr(dataset, f"{name}_train"), rows[part]
        )
        for part in rows
        for name in ("x", "y")
    }
    return Arrays(dataset.task, dataset.outputs, **arrays)


def _taken(
    allocate: Allocate, name: str, array: NDArray[Any], rows: Ints
) -> NDArray[Any]:
    """Return the `rows` of `array` as a new array, copied a few thousand at a time."""
    taken = allocate(name, (len(rows), *array.shape[1:]), array.dtype)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        taken[part] = array[rows[part]]
    return taken
