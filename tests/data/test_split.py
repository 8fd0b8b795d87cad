"""The validation split: of the training samples, without the test set and without copies of held-out samples."""

from __future__ import annotations

import numpy as np
import pytest

from scalebench.data.catalog import prepare, prepare_validation
from scalebench.data.dataset import open_dataset
from scalebench.errors import DataError
from scalebench.study.spec import Training


def rows(array):
    return {row.tobytes() for row in np.asarray(array).reshape(len(array), -1)}


def split(tmp_path, share=0.2, seed=3, workers=1, **options):
    training = Training.model_validate(options)
    whole = open_dataset(prepare(training, workers, tmp_path))
    return whole, open_dataset(
        prepare_validation(training, workers, share, seed, tmp_path)
    )


def test_validation_samples_come_from_the_training_part_only(tmp_path):
    whole, part = split(tmp_path, dataset="digits")
    assert (part.n_train, part.n_test) == (1149, 288)
    assert part.n_train + part.n_test == whole.n_train
    assert rows(part.x_train) | rows(part.x_test) == rows(whole.x_train)
    assert not rows(part.x_test) & rows(whole.x_test)
    assert part.sha256 != whole.sha256
    shares = (
        np.bincount(part.y_test) / part.n_test
        - np.bincount(whole.y_train) / whole.n_train
    )
    # stratified: each class is within one sample
    assert np.abs(shares).max() < 1 / part.n_test


def test_no_shifted_copy_of_a_held_out_image_stays_in_training(tmp_path):
    whole, part = split(tmp_path, dataset="digits_shifted")
    images = whole.n_train // 5
    assert (part.n_train, part.n_test) == (5 * 1149, 288)
    copies = np.asarray(whole.x_train).reshape(5, images, -1)
    held = [
        place
        for place in range(images)
        if copies[0, place].tobytes() in rows(part.x_test)
    ]
    assert len(held) == 288
    assert not rows(copies[:, held].reshape(-1, 64)) & rows(part.x_train)


def test_the_seed_decides_the_split(tmp_path):
    first, again, other = (
        split(tmp_path, dataset="wine", seed=seed)[1].folder for seed in (1, 1, 2)
    )
    assert first == again != other


def test_split_grows_with_the_data_under_weak_scaling_and_works_for_regression(
    tmp_path,
):
    weak = split(
        tmp_path,
        dataset={"name": "synthetic", "n_train": 50, "n_test": 10},
        scaling="weak",
        workers=4,
    )[1]
    assert (weak.n_train, weak.n_test) == (160, 40)
    assert split(tmp_path, dataset="diabetes")[1].task == "regression"


def test_a_split_that_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="one part empty"):
        split(
            tmp_path,
            share=0.999,
            dataset={"name": "synthetic", "n_train": 20, "n_test": 10},
        )
