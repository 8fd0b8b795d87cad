"""Small real data sets bundled with scikit-learn, without download or files.

The held-out fifth is drawn with a fixed seed, equal in all studies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from scalebench.data.builder import (
    DATASETS,
    Allocate,
    Arrays,
    DatasetBuilder,
    hold_out,
    standardised,
)

_TEST_FRACTION = 0.2
_SPLIT_SEED = 0


@DATASETS.add
class Digits(DatasetBuilder):
    """1,797 handwritten digits of 8x8 pixels (UCI optical recognition, test part), as 64 values from 0 to 1."""

    name = "digits"
    summary = "1,797 handwritten digits, 8x8 pixels as 64 values in [0, 1], 10 classes"

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        return Arrays("classification", 10, *_digits())


@DATASETS.add
class DigitsShifted(DatasetBuilder):
    """`digits` with each training image also shifted by one pixel up, down, left and right, after the split.

    Pixels shifted in are 0. The test images are those of `digits`, without copies in
    the training part.
    """

    name = "digits_shifted"
    summary = "digits, each training image also shifted by one pixel in 4 directions: 7,185 for training"
    copies = 5

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        x_train, y_train, x_test, y_test = _digits()
        images = x_train.reshape(-1, 8, 8)
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
        corners = (
            (1, 1),
            (2, 1),
            (0, 1),
            (1, 2),
            (1, 0),
        )  # unshifted, up, down, left, right
        shifted = np.concatenate(
            [padded[:, row : row + 8, column : column + 8] for row, column in corners]
        )
        return Arrays(
            "classification",
            10,
            shifted.reshape(-1, 64),
            np.tile(y_train, 5),
            x_test,
            y_test,
        )


class _Standardised(DatasetBuilder):
    """Classes and features standardised by the training part."""

    loader: ClassVar[str]  # of scikit-learn
    classes: ClassVar[int]

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        # Here, as it takes a second.
        import sklearn.datasets

        x, y = getattr(sklearn.datasets, self.loader)(return_X_y=True)
        train, test = hold_out(len(x), _TEST_FRACTION, _SPLIT_SEED, y)
        x_train, x_test = standardised(x[train], x[test])
        y = y.astype(np.int64)
        return Arrays(
            "classification", self.classes, x_train, y[train], x_test, y[test]
        )


@DATASETS.add
class BreastCancer(_Standardised):
    """569 tumours described by 30 features, malignant or benign (UCI, Wisconsin diagnostic)."""

    name = "breast_cancer"
    summary = "569 tumours, 30 standardised features, 2 classes"
    loader = "load_breast_cancer"
    classes = 2


@DATASETS.add
class Wine(_Standardised):
    """178 wines described by 13 chemical features, from 3 growers (UCI)."""

    name = "wine"
    summary = "178 wines, 13 standardised features, 3 classes"
    loader = "load_wine"
    classes = 3


@DATASETS.add
class Diabetes(DatasetBuilder):
    """442 patients described by 10 features; the progression of the disease after a year (Efron et al. 2004)."""

    name = "diabetes"
    summary = "442 patients, 10 features, progression of diabetes; regression, all standardised; train at --lr 0.01"

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        from sklearn.datasets import load_diabetes

        # scikit-learn's own scale is of all samples, those held out too.
        x, y = load_diabetes(return_X_y=True, scaled=False)
        train, test = hold_out(len(x), _TEST_FRACTION, _SPLIT_SEED)
        x_train, x_test = standardised(x[train], x[test])
        y_train, y_test = standardised(y[train, None], y[test, None])
        return Arrays("regression", 1, x_train, y_train, x_test, y_test)


def _digits() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = (
        (x / 16).astype(np.float32),
        y.astype(np.int64),
    )  # pixels are counts from 0 to 16
    train, test = hold_out(len(x), _TEST_FRACTION, _SPLIT_SEED, y)
    return x[train], y[train], x[test], y[test]
