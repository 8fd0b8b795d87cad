"""Bundled data sets: sizes, standardisation and held-out part."""

import numpy as np
import pytest

from scalebench.data.builder import DATASETS, hold_out, standardised
from scalebench.errors import DataError


def build(name, **options):
    return DATASETS.create(name, options).build([], None)


@pytest.mark.parametrize(
    ("name", "n_train", "n_test", "features", "outputs"),
    [
        ("digits", 1437, 360, 64, 10),
        ("digits_shifted", 7185, 360, 64, 10),
        ("breast_cancer", 455, 114, 30, 2),
        ("wine", 142, 36, 13, 3),
        ("diabetes", 353, 89, 10, 1),
    ],
)
def test_sizes(name, n_train, n_test, features, outputs):
    made = build(name)
    assert made.x_train.shape == (n_train, features)
    assert made.x_test.shape == (n_test, features)
    assert made.outputs == outputs
    assert (len(made.y_train), len(made.y_test)) == (n_train, n_test)


def test_digits_lie_between_0_and_1_with_a_stratified_test_part():
    made = build("digits")
    assert (made.x_train.min(), made.x_train.max()) == (0, 1)
    shares = np.bincount(made.y_test) / np.bincount(
        np.concatenate([made.y_train, made.y_test])
    )
    assert np.abs(shares - 0.2).max() < 0.01


def test_shifted_digits_are_the_digits_moved_by_one_pixel():
    plain, made = build("digits"), build("digits_shifted")
    n = len(plain.x_train)
    images = made.x_train.reshape(5, n, 8, 8)
    assert np.array_equal(images[0].reshape(n, 64), plain.x_train)
    assert np.array_equal(images[1][:, :-1], images[0][:, 1:])  # up
    assert np.array_equal(images[2][:, 1:], images[0][:, :-1])  # down
    assert np.array_equal(images[3][:, :, :-1], images[0][:, :, 1:])  # left
    assert np.array_equal(images[4][:, :, 1:], images[0][:, :, :-1])  # right
    edges = [images[1][:, -1], images[2][:, 0], images[3][:, :, -1], images[4][:, :, 0]]
    assert all((edge == 0).all() for edge in edges)
    assert np.array_equal(made.y_train, np.tile(plain.y_train, 5))


def test_training_has_no_shifted_copy_of_a_test_image():
    plain, made = build("digits"), build("digits_shifted")
    assert np.array_equal(made.x_test, plain.x_test)
    assert np.array_equal(made.y_test, plain.y_test)
    originals = {row.tobytes() for row in plain.x_train}
    assert {row.tobytes() for row in made.x_train[: len(plain.x_train)]} == originals
    assert not originals & {row.tobytes() for row in made.x_test}


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes"])
def test_features_are_standardised_by_the_training_part(name):
    made = build(name)
    # float32 rounding of a sum to zero
    assert np.abs(made.x_train.mean(axis=0, dtype=float)).max() < 1e-6
    assert np.abs(made.x_train.std(axis=0, dtype=float) - 1).max() < 1e-6
    assert np.abs(made.x_test.mean(axis=0, dtype=float)).max() > 1e-3
    if name == "diabetes":
        assert abs(made.y_train.mean(dtype=float)) < 1e-6
        assert made.y_train.shape == (353, 1)


def test_a_constant_column_is_only_centred():
    train, test = standardised(np.full((4, 1), 7.0), np.array([[8.0]]))
    assert train.tolist() == [[0]] * 4
    assert test.tolist() == [[1]]


def test_holding_out_is_seeded_and_exact():
    labels = np.repeat([0, 1, 2], [70, 20, 13])
    train, test = hold_out(103, 0.2, 5, labels)
    assert len(test) == 21
    assert sorted([*train, *test]) == list(range(103))
    assert np.bincount(labels[test]).tolist() == [14, 4, 3]
    assert np.array_equal(test, hold_out(103, 0.2, 5, labels)[1])
    assert not np.array_equal(test, hold_out(103, 0.2, 6, labels)[1])
    assert len(hold_out(10, 0.25, 0)[1]) == 3
    with pytest.raises(DataError, match="leaves one part empty"):
        hold_out(1, 0.2, 0)
