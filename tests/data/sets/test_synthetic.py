"""Synthetic rows depend on their number and the seed only, and are learnable."""

import numpy as np
import pytest

from scalebench.data.builder import DATASETS


def build(**options):
    def allocate(name, shape, dtype):
        return np.empty(shape, dtype)

    return DATASETS.create("synthetic", options).build([], allocate)


@pytest.mark.parametrize("kind", ["classification", "regression", "images"])
def test_row_does_not_depend_on_the_number_of_rows(kind):
    options = {"kind": kind, "n_test": 3, "outputs": 2}
    if kind == "images":
        options["shape"] = (2, 6, 5)
    large, small = build(n_train=2500, **options), build(n_train=1111, **options)
    assert np.array_equal(large.x_train[:1111], small.x_train)
    assert np.array_equal(large.y_train[:1111], small.y_train)
    assert np.array_equal(large.x_test, small.x_test)
    assert not np.array_equal(
        build(n_train=1111, **options, seed=1).x_train, small.x_train
    )


def test_chunks_and_parts_are_not_repeated():
    made = build(n_train=3000, n_test=1024)
    rows = np.concatenate([made.x_train, made.x_test])
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize(
    ("options", "x_shape", "y_shape"),
    [
        ({"features": 7}, (9, 7), (9,)),
        ({"shape": (2, 3)}, (9, 2, 3), (9,)),
        ({"kind": "images"}, (9, 3, 32, 32), (9,)),
        ({"kind": "images", "shape": (1, 2, 70)}, (9, 1, 2, 70), (9,)),
        ({"kind": "regression", "outputs": 4}, (9, 32), (9, 4)),
    ],
)
def test_shapes(options, x_shape, y_shape):
    made = build(n_train=9, n_test=2, **options)
    assert (made.x_train.shape, made.y_train.shape) == (x_shape, y_shape)
    assert made.x_train.dtype == np.float32
    assert made.y_train.dtype == (np.float32 if made.task == "regression" else np.int64)


@pytest.mark.parametrize("kind", ["classification", "images"])
def test_no_class_is_missing_or_dominates(kind):
    made = build(kind=kind, shape=(1, 8, 8), n_train=4096)
    shares = np.bincount(made.y_train, minlength=10) / 4096
    assert shares.min() > 0.02
    assert shares.max() < 0.3


def test_targets_follow_the_inputs():
    """A linear fit explains part of them (the teacher is a tanh network), shuffled targets not at all."""
    made = build(kind="regression", n_train=4096, n_test=2048, features=8)

    def r2(y_train):
        weights = np.linalg.lstsq(made.x_train, y_train, rcond=None)[0]
        residual = ((made.y_test - made.x_test @ weights) ** 2).sum()
        return 1 - residual / ((made.y_test - made.y_test.mean()) ** 2).sum()

    assert r2(made.y_train) > 0.3
    assert r2(np.random.default_rng(0).permutation(made.y_train)) < 0.05


def test_noise_changes_targets_and_not_inputs():
    plain, noisy = build(n_train=500, noise=0), build(n_train=500, noise=2)
    assert np.array_equal(plain.x_train, noisy.x_train)
    assert 0.2 < (plain.y_train != noisy.y_train).mean() < 0.95
