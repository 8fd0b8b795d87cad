"""CIFAR from files in both published forms; unsafe pickles are refused."""

import os
import pickle
import struct

import numpy as np
import pytest

from scalebench.data.catalog import prepare
from scalebench.data.dataset import open_dataset
from scalebench.errors import DataError
from scalebench.study.spec import Training

ROWS = 6
TRAIN10 = [f"data_batch_{number}" for number in range(1, 6)]


def images(seed):
    return np.random.default_rng(seed).integers(0, 256, (ROWS, 3072)).astype(np.uint8)


def write_binary10(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*TRAIN10, "test_batch"]):
        labels = ((np.arange(ROWS) + number) % 10).astype(np.uint8)[:, None]
        (folder / f"{name}.bin").write_bytes(
            np.hstack([labels, images(number)]).tobytes()
        )


def write_python10(folder, dump):
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([*TRAIN10, "test_batch"]):
        (folder / name).write_bytes(
            dump(images(number), [(row + number) % 10 for row in range(ROWS)])
        )


def python3_pickle(data, labels):
    return pickle.dumps(
        {"data": data, "labels": labels, "filenames": ["a.png"] * ROWS}, protocol=2
    )


def python2_pickle(data, labels):
    """Byte for byte what Python 2 wrote: protocol 2, text as byte strings, the array rebuilt by `_reconstruct`."""
    raw = data.tobytes()
    return b"".join(
        [
            b"\x80\x02}(U\x06labels](",
            *(b"K" + bytes([label]) for label in labels),
            b"eU\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K",
            bytes([len(labels)]) + b"M" + struct.pack("<H", 3072),
            b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
            struct.pack("<I", len(raw)) + raw + b"tbu.",
        ]
    )


def load(tmp_path, dataset="cifar10"):
    training = Training.model_validate(
        {"dataset": dataset, "data_dir": tmp_path / "data"}
    )
    return open_dataset(prepare(training, 1, tmp_path / "cache"))


def check_contents(dataset):
    assert dataset.x_train.shape == (5 * ROWS, 3, 32, 32)
    assert dataset.x_test.shape == (ROWS, 3, 32, 32)
    second = images(1)[2].reshape(3, 32, 32) / np.float32(255)
    assert np.array_equal(dataset.x_train[ROWS + 2], second.astype(np.float32))
    assert dataset.y_train[ROWS + 2] == 3
    assert dataset.y_test.tolist() == [5, 6, 7, 8, 9, 0]


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_binary_version(tmp_path, folder):
    write_binary10(tmp_path / "data" / folder)
    check_contents(load(tmp_path))


@pytest.mark.parametrize("dump", [python2_pickle, python3_pickle])
def test_python_version(tmp_path, dump):
    write_python10(tmp_path / "data" / "cifar-10-batches-py", dump)
    check_contents(load(tmp_path))


@pytest.mark.parametrize(
    ("labels", "outputs", "expected"), [("fine", 100, [7, 99]), ("coarse", 20, [3, 19])]
)
@pytest.mark.parametrize("version", ["binary", "python"])
def test_cifar100_has_two_kinds_of_labels(tmp_path, version, labels, outputs, expected):
    coarse, fine, pixels = (
        np.array([[3], [19]], np.uint8),
        np.array([[7], [99]], np.uint8),
        images(0)[:2],
    )
    folder = tmp_path / "data" / f"cifar-100-{version}"
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        if version == "binary":
            (folder / f"{name}.bin").write_bytes(
                np.hstack([coarse, fine, pixels]).tobytes()
            )
        else:
            table = {"data": pixels, "coarse_labels": [3, 19], "fine_labels": [7, 99]}
            (folder / name).write_bytes(pickle.dumps(table, protocol=2))
    dataset = load(tmp_path, {"cifar100": {"labels": labels}})
    assert dataset.outputs == outputs
    assert dataset.y_train.tolist() == expected
    assert np.array_equal(dataset.x_test.reshape(2, 3072), pixels / np.float32(255))


class Harmful:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Evaluates:
    def __reduce__(self):
        return eval, ("1 + 1",)


@pytest.mark.parametrize("harm", ["system", "eval", "nested"])
def test_pickle_with_code_is_refused(tmp_path, harm):
    marker = tmp_path / "it ran"
    data = np.array([Harmful(marker)], dtype=object) if harm == "nested" else images(0)
    extra = {"system": Harmful(marker), "eval": Evaluates(), "nested": 0}[harm]
    write_python10(
        tmp_path / "data",
        lambda _, labels: pickle.dumps(
            {"data": data, "labels": labels, "extra": extra}, protocol=2
        ),
    )
    with pytest.raises(
        DataError,
        match=r"data_batch_1: refused or corrupt pickle .*asks for (posix\.mkdir|__builtin__\.eval)",
    ):
        load(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "refused or corrupt pickle"),
        (b"\x80\x02}(", "refused or corrupt pickle"),
        (pickle.dumps([1]), "holds list, expected a dictionary"),
        (pickle.dumps({"data": 1}), "holds data; expected data and labels"),
        (
            pickle.dumps({"data": images(0), "labels": [1]}),
            r"expected uint8 \(1, 3072\)",
        ),
        (
            pickle.dumps({"data": images(0) / 1.0, "labels": [1] * ROWS}),
            "data is float64",
        ),
        (
            pickle.dumps({"data": images(0), "labels": ["cat"] * ROWS}),
            "not whole numbers",
        ),
    ],
)
def test_damaged_python_files(tmp_path, contents, message):
    write_python10(tmp_path / "data", python3_pickle)
    (tmp_path / "data" / "data_batch_3").write_bytes(contents)
    with pytest.raises(DataError, match=f"data_batch_3: .*{message}"):
        load(tmp_path)


def test_damaged_binary_files(tmp_path):
    write_binary10(tmp_path / "data")
    path = tmp_path / "data" / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(
        DataError, match=r"data_batch_2\.bin: 18428 bytes, expected a multiple of 3073"
    ):
        load(tmp_path)
    path.write_bytes(whole[:-3073])
    with pytest.raises(DataError, match=r"unequal length .*data_batch_2\.bin 5"):
        load(tmp_path)
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(DataError, match="row 6 has label 10, expected 0 to 9"):
        load(tmp_path)


def test_missing_files_of_both_versions_are_named(tmp_path):
    write_binary10(tmp_path / "data")
    (tmp_path / "data" / "test_batch.bin").unlink()
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "missing test_batch.bin (looked in" in message
    assert "or else data_batch_1, data_batch_2" in message
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in message
