"""User data in an .npz file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeInt

from scalebench.data import builder
from scalebench.data.dataset import ARRAY_NAMES, Task
from scalebench.data.files import only_file, read_npz
from scalebench.errors import DataError

_LARGEST = float(np.finfo(np.float32).max)
# checked at once, which bounds what a check takes of memory
_ROWS_AT_ONCE = 4096
# regression target, from which a mean squared error is not that of targets near 1
_LARGE = 10.0
_AS_REGRESSION = "if they are values to be predicted, give the option task: regression"


@builder.DATASETS.add
class Npz(builder.DatasetBuilder):
    """Arrays x_train, y_train, x_test, y_test; or x and y, of which a seeded part is held out.

    Whole numbers (N,) in y, of any dtype, are class numbers 0, 1, ..., other numbers
    are regression targets, unless `task` is set. With `standardise`, features and
    regression targets are, by the training part.
    """

    name = "npz"
    summary = (
        "your own .npz in --data-dir: x_train, y_train, x_test, y_test, or x and y"
    )

    file: str | None = None
    task: Task | None = None
    test_fraction: float = Field(0.2, gt=0, lt=1)
    seed: NonNegativeInt = 0
    standardise: bool = False

    def files(self, data_dir: Path | None) -> list[Path]:
        return [only_file(self.name, data_dir, self.file, ".npz")]

    def build(self, files: list[Path], allocate: builder.Allocate) -> builder.Arrays:
        (path,) = files
        found = read_npz(path)
        if set(ARRAY_NAMES) <= set(found):
            # A split of the user's own is kept.
            x_train, y_train, x_test, y_test = (found[name] for name in ARRAY_NAMES)
            _require_numbers(path, {name: found[name] for name in ARRAY_NAMES})
            task = self._task_of(path, [y_train, y_test])
            if task == "classification":
                _require_class_numbers(path, {"y_train": y_train, "y_test": y_test})
        elif {"x", "y"} <= set(found):
            x, y = found["x"], found["y"]
            if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
                raise DataError(
                    f"{path}: x {x.shape} and y {y.shape}; expected as many targets as samples"
                )
            # before rows are split, so that those of the file are named
            _require_numbers(path, {"x": x, "y": y})
            task = self._task_of(path, [y])
            if task == "classification":
                _require_class_numbers(path, {"y": y})
            # Stratified by class, where there are classes.
            labels = y if task == "classification" and y.ndim == 1 else None
            train, test = builder.hold_out(
                len(x), self.test_fraction, self.seed, labels
            )
            x_train = x[train]
            y_train = y[train]
            x_test = x[test]
            y_test = y[test]
        else:
            listed = ", ".join(found) or "nothing"
            raise DataError(
                f"{path}: holds {listed}; expected x_train, y_train, x_test and y_test, or x and y"
            )
        notes = self._on_dtypes(path, task, x_train, y_train)
        outputs, y_train, y_test = _targets(path, task, y_train, y_test)
        x_train, x_test = x_train.astype(np.float32), x_test.astype(np.float32)
        if self.standardise:
            x_train, x_test = builder.standardised(x_train, x_test)
            y_train, y_test = (
                builder.standardised(y_train, y_test)
                if task == "regression"
                else (y_train, y_test)
            )
        elif (
            task == "regression"
            and (largest := float(np.abs(y_train).max(initial=0))) > _LARGE
        ):
            notes.append(
                f"{path.name}: targets reach {largest:.3g} and are taken as they are, with which training may diverge; "
                "give the option standardise: true"
            )
        made = builder.Arrays(task, outputs, x_train, y_train, x_test, y_test)
        return replace(made, notes=(*notes, *builder.notes_on(made)))

    def _task_of(self, path: Path, parts: list[NDArray[Any]]) -> Task:
        """Return the stated task, or the one that the targets mean.

        Raises:
            DataError: one-hot targets, or class numbers in a column, which are neither (N,) nor stated to be values.
        """
        if self.task is not None:
            return self.task
        if not all(_are_whole(y) for y in parts):
            return "regression"
        shape = parts[0].shape
        if all(_are_one_hot(y) for y in parts):
            raise DataError(
                f"{path}: targets are one-hot {shape}; expected class numbers (N,): save y.argmax(axis=1), or "
                f"{_AS_REGRESSION}"
            )
        if len(shape) == 2 and shape[1] == 1:
            raise DataError(
                f"{path}: targets are whole numbers {shape}; expected class numbers (N,): save y[:, 0], or "
                f"{_AS_REGRESSION}"
            )
        # Floats in a matrix that happen to be whole are values, as of a rounded table.
        is_float = any(y.dtype.kind == "f" for y in parts)
        return "regression" if is_float and len(shape) > 1 else "classification"

    def _on_dtypes(
        self, path: Path, task: Task, x: NDArray[Any], y: NDArray[Any]
    ) -> list[str]:
        notes = []
        if self.task is None and task == "classification" and y.dtype.kind == "f":
            notes.append(
                f"{path.name}: targets are whole numbers in {y.dtype}, taken as {len(np.unique(y))} classes; "
                f"{_AS_REGRESSION}"
            )
        if x.dtype == np.uint8 and x.max(initial=0) > 1:
            notes.append(
                f"{path.name}: features are uint8 up to {x.max()}, taken as they are; divide by 255 for values to 1"
            )
        return notes


def _require_numbers(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Raise DataError for what is no number, or none that float32 holds, with its row in the file."""
    for name, array in arrays.items():
        if name.startswith("x") and (array.dtype.kind not in "iubf" or array.ndim < 2):
            raise DataError(
                f"{path}: features are {array.dtype} {array.shape}; expected numbers (N, ...) with two or more "
                "dimensions"
            )
        if array.dtype.kind in "US":
            raise DataError(
                f"{path}: targets are text, {array.dtype} {array.shape}; number the classes: save "
                "np.unique(y, return_inverse=True)[1]"
            )
        for start in range(
            0, len(array) if array.dtype.kind == "f" else 0, _ROWS_AT_ONCE
        ):
            rows = array[start : start + _ROWS_AT_ONCE].reshape(
                -1, math.prod(array.shape[1:])
            )
            bad = ~(np.abs(rows) <= _LARGEST).all(axis=1)  # NaN too
            if bad.any():
                raise DataError(
                    f"{path}: {name}, row {start + int(bad.argmax())} (counted from 0) holds NaN, infinity or a number "
                    "that float32 does not hold; remove or fill it"
                )


def _require_class_numbers(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    for name, y in arrays.items():
        if y.ndim == 1 and (bad := y < 0).any():
            row = int(bad.argmax())
            raise DataError(
                f"{path}: {name}, row {row} (counted from 0): label {y[row]:g}; number the classes 0, 1, ..., or if "
                "the target is a value to be predicted, give the option task: regression"
            )


def _are_whole(y: NDArray[Any]) -> bool:
    """Return True for integers, in any dtype of numbers."""
    if y.dtype.kind in "iub":
        return True
    if y.dtype.kind != "f":
        return False
    return bool(np.isfinite(y).all() and (y == np.floor(y)).all())


def _are_one_hot(y: NDArray[Any]) -> bool:
    """Return True for rows of zeros with a single 1, of two columns or more."""
    if y.ndim != 2 or y.shape[1] < 2:
        return False
    zeros_and_ones = bool(((y == 0) | (y == 1)).all())
    return zeros_and_ones and bool((y.sum(axis=1) == 1).all())


def _targets(
    path: Path, task: Task, y_train: NDArray[Any], y_test: NDArray[Any]
) -> tuple[int, NDArray[Any], NDArray[Any]]:
    for y in (y_train, y_test):
        suits = _are_whole(y) if task == "classification" else y.dtype.kind in "iubf"
        if not suits or y.ndim not in (1, 2):
            expected = (
                "whole class numbers (N,)"
                if task == "classification"
                else "numbers (N,) or (N, columns)"
            )
            raise DataError(
                f"{path}: targets are {y.dtype} {y.shape}; {task} expects {expected}"
            )
    if task == "classification":
        outputs = max(int(y.max(initial=0)) for y in (y_train, y_test)) + 1
        samples = len(y_train) + len(y_test)
        # An identifier or a year would make a model of as many outputs.
        if outputs > max(2, samples):
            raise DataError(
                f"{path}: label {outputs - 1} makes {outputs:,} classes of {samples:,} samples; number the classes "
                "0, 1, ..., or if the target is a value to be predicted, give the option task: regression"
            )
        # The cross entropy of a single output is always zero.
        return max(outputs, 2), y_train.astype(np.int64), y_test.astype(np.int64)
    train, test = (y[:, None] if y.ndim == 1 else y for y in (y_train, y_test))
    return train.shape[1], train.astype(np.float32), test.astype(np.float32)
