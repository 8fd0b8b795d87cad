"""CINIC-10 from folders of real PNG files."""

import numpy as np
import pytest
from PIL import Image

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import DataError
from scalebench.study.spec import Training

COLOURS = {"bird": (255, 0, 0), "cat": (0, 255, 0)}


def write(root):
    for part, count in (("train", 3), ("valid", 2), ("test", 1)):
        for name, colour in COLOURS.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (32, 32), colour).save(
                    root / part / name / f"{number}.png"
                )


def load(tmp_path, **options):
    training = Training.model_validate(
        {"dataset": {"cinic10": options}, "data_dir": tmp_path / "data"}
    )
    return open_dataset(prepare(training, 1, tmp_path / "cache"))


@pytest.mark.parametrize("folder", [".", "CINIC-10"])
def test_folders_of_images(tmp_path, folder):
    write(tmp_path / "data" / folder)
    dataset = load(tmp_path)
    assert (dataset.x_train.shape, dataset.x_test.shape) == (
        (10, 3, 32, 32),
        (2, 3, 32, 32),
    )
    assert dataset.outputs == 2
    for image, label in zip(dataset.x_train, dataset.y_train, strict=True):
        assert image[label].min() == 1  # birds are red, cats are green
        assert image[1 - label].max() == 0


def test_the_validation_part_may_be_left_out_or_missing(tmp_path):
    write(tmp_path / "data")
    assert load(tmp_path, train_on_valid=False).n_train == 6


def test_images_are_resized(tmp_path):
    write(tmp_path / "data")
    assert load(tmp_path, resize=64).input_shape == (3, 64, 64)


def test_grey_images_become_colour(tmp_path):
    write(tmp_path / "data")
    Image.new("L", (32, 32), 255).save(tmp_path / "data" / "test" / "cat" / "0.png")
    assert np.array_equal(load(tmp_path).x_test[1], np.ones((3, 32, 32)))


def damage_size(root):
    Image.new("RGB", (20, 30)).save(root / "train" / "cat" / "1.png")


def damage_file(root):
    path = root / "train" / "cat" / "1.png"
    path.write_bytes(path.read_bytes()[:60])


def damage_class(root):
    (root / "test" / "dog").mkdir()
    (root / "test" / "cat" / "0.png").rename(root / "test" / "dog" / "0.png")


def damage_part(root):
    for name in COLOURS:
        (root / "valid" / name / "0.png").unlink()
        (root / "valid" / name / "1.png").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, r"1\.png: 20x30 pixels, .* has 32x32; give the option resize"),
        (damage_file, r"1\.png: not a readable image"),
        (damage_class, r"class 'dog' is not in train, which has bird, cat"),
        (
            damage_part,
            r"no images .*valid/CLASS/\*\.png .*https://doi\.org/10\.7488/ds/2448",
        ),
    ],
)
def test_damaged_folders(tmp_path, damage, message):
    write(tmp_path / "data")
    damage(tmp_path / "data")
    with pytest.raises(DataError, match=message):
        load(tmp_path)
