"""MNIST from published IDX files, plain and compressed, and damaged files."""

import gzip
import struct

import numpy as np
import pytest

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import DataError
from scalebench.study.spec import Training
from tests.facts import together


def idx(array):
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write(folder, spelling="{}-idx{}-ubyte", packed=False, side=28):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for stem, rows in (("train", 30), ("t10k", 10)):
        for kind, array in (
            ("images", rng.integers(0, 256, (rows, side, side))),
            ("labels", np.arange(rows) % 10),
        ):
            name = spelling.format(f"{stem}-{kind}", array.ndim)
            raw = idx(array)
            (folder / (name + ".gz" * packed)).write_bytes(
                gzip.compress(raw) if packed else raw
            )


def load(tmp_path):
    training = Training.model_validate(
        {"dataset": "mnist", "data_dir": tmp_path / "data"}
    )
    return open_dataset(prepare(training, 1, tmp_path / "cache"))


@pytest.mark.parametrize(
    ("folder", "spelling", "packed"),
    [
        (".", "{}-idx{}-ubyte", False),
        ("MNIST/raw", "{}-idx{}-ubyte", True),
        ("mnist", "{}.idx{}-ubyte", False),
    ],
)
def test_published_files(tmp_path, folder, spelling, packed):
    write(tmp_path / "data" / folder, spelling, packed)
    dataset = load(tmp_path)
    assert dataset.x_train.shape == (30, 1, 28, 28)
    assert dataset.x_test.shape == (10, 1, 28, 28)
    first = np.random.default_rng(0).integers(0, 256, (30, 28, 28))[0]
    assert np.array_equal(
        dataset.x_train[0, 0], (first / np.float32(255)).astype(np.float32)
    )
    assert dataset.y_train.tolist() == [row % 10 for row in range(30)]


def test_missing_files_are_named_with_folders_and_source(tmp_path):
    write(tmp_path / "data")
    (tmp_path / "data" / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert together(
        message, "missing", "t10k-labels-idx1-ubyte", "t10k-labels-idx1-ubyte.gz"
    )
    assert "train-images" not in message
    assert f"{tmp_path / 'data' / 'MNIST/raw'}" in message
    assert "http://yann.lecun.com/exdb/mnist/" in message


def test_a_folder_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data")
    training = Training.model_validate({"dataset": "mnist", "data_dir": "~/data"})
    assert open_dataset(prepare(training, 1, tmp_path / "cache")).n_train == 30


def test_no_folder(tmp_path):
    with pytest.raises(DataError, match=r"give --data-dir .* train-images-idx3-ubyte"):
        prepare(Training.model_validate({"dataset": "mnist"}), 1, tmp_path)
    with pytest.raises(DataError, match="no folder .*nowhere; give --data-dir"):  # noqa: RUF043
        prepare(
            Training.model_validate(
                {"dataset": "mnist", "data_dir": tmp_path / "nowhere"}
            ),
            1,
            tmp_path,
        )


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "train-images-idx3-ubyte",
            lambda raw: raw[:-1],
            r"expected 23536 for \(30, 28, 28\)",
        ),
        ("train-images-idx3-ubyte", lambda raw: raw + b"\0", "expected 23536"),
        (
            "train-labels-idx1-ubyte",
            lambda raw: b"<html>" + raw,
            "begins with 3c68746d, expected 00000801",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda raw: raw[:9],
            "9 bytes, shorter than its header of 16",
        ),
        ("t10k-labels-idx1-ubyte", lambda raw: b"", "begins with , expected 00000801"),
        (
            "train-labels-idx1-ubyte",
            lambda raw: raw[:-1] + b"\x0b",
            "row 29 has label 11, expected 0 to 9",
        ),
        (
            "train-labels-idx1-ubyte",
            lambda raw: idx(np.zeros(29)),
            "30 samples but 29 targets",
        ),
    ],
)
def test_damaged_files(tmp_path, name, damage, message):
    write(tmp_path / "data")
    path = tmp_path / "data" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-20],
        lambda raw: raw[:40] + b"junk" + raw[44:],
        lambda raw: b"no",
    ],
)
def test_damaged_gzip(tmp_path, damage):
    write(tmp_path / "data", packed=True)
    path = tmp_path / "data" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte.gz: cannot be read .* get it again"
    ):
        load(tmp_path)
