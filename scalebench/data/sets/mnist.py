"""MNIST and other data sets in the same four IDX files, such as Fashion-MNIST."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.data.builder import DATASETS, Allocate, Arrays, DatasetBuilder
from scalebench.data.files import FileSet, find_files, read_bytes
from scalebench.errors import DataError

_SOURCE = "get them from http://yann.lecun.com/exdb/mnist/"
_UNSIGNED_BYTE = 8


def _spellings(stem: str, dimensions: int) -> tuple[str, ...]:
    names = (f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte")
    return tuple(name + ending for name in names for ending in ("", ".gz"))


_FILES = FileSet(
    names=(
        _spellings("train-images", 3),
        _spellings("train-labels", 1),
        _spellings("t10k-images", 3),
        _spellings("t10k-labels", 1),
    ),
    folders=(".", "MNIST/raw", "mnist"),
)


@DATASETS.add
class Mnist(DatasetBuilder):
    """Handwritten digits as 1 x 28 x 28 values from 0 to 1 (LeCun, Cortes, Burges); IDX files, plain or .gz."""

    name = "mnist"
    summary = "handwritten digits, 1x28x28, 10 classes; IDX files in --data-dir, plain or .gz"

    def files(self, data_dir: Path | None) -> list[Path]:
        return find_files(self.name, data_dir, (_FILES,), _SOURCE)

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        parts = [read_idx(path, dimensions) for path, dimensions in zip(files, (3, 1, 3, 1), strict=True)]
        x_train, y_train, x_test, y_test = parts
        return Arrays("classification", 10, _images(x_train), _labels(y_train), _images(x_test), _labels(y_test))


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes in an IDX file: 0 0 type rank, sizes (big-endian, 4 bytes each), data.

    Raises:
        DataError: not an IDX file of unsigned bytes with `dimensions` dimensions, or of another length than its sizes.
    """
    raw = read_bytes(path)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if raw[:4] != expected:
        raise DataError(f"{path}: begins with {raw[:4].hex()}, expected {expected.hex()} (IDX): get it again")
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise DataError(f"{path}: {len(raw)} bytes, shorter than its header of {header}: get it again")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    size = 1
    for length in shape:
        size *= length
    if len(raw) != header + size:
        raise DataError(
            f"{path}: {len(raw)} bytes, expected {header + size} for {shape}: corrupt or cut short, get it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


def _images(raw: NDArray[np.uint8]) -> NDArray[Any]:
    return (raw[:, None] / np.float32(255)).astype(np.float32)


def _labels(raw: NDArray[np.uint8]) -> NDArray[Any]:
    return raw.astype(np.int64)
