"""MNIST and other data sets in the same four IDX files, such as Fashion-MNIST."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scalebench.data.builder import DATASETS, Allocate, Arrays, DatasetBuilder
from scalebench.data.files import FileSet, find_files, read_bytes
from scalebench.errors import DataError

_SOURCE = "get them from http://yann.lecun.com/exdb/mnist/"
# type code of the format
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
    # torchvision unpacks into the second.
    folders=(".", "MNIST/raw", "mnist"),
)


@DATASETS.add
class Mnist(DatasetBuilder):
    """Handwritten digits as 1 x 28 x 28 values from 0 to 1 (LeCun, Cortes, Burges); IDX files, plain or .gz."""

    name = "mnist"
    summary = (
        "handwritten digits, 1x28x28, 10 classes; IDX files in --data-dir, plain or .gz"
    )

    def files(self, data_dir: Path | None) -> list[Path]:
        return find_files(self.name, data_dir, (_FILES,), _SOURCE)

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        images = []
        for path in files[::2]:  # images and labels in turn
            pixels = read_idx(path, 3)[:, None]
            images.append((pixels / np.float32(255)).astype(np.float32))
        labels = [read_idx(path, 1).astype(np.int64) for path in files[1::2]]
        return Arrays("classification", 10, images[0], labels[0], images[1], labels[1])


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the array of unsigned bytes in an IDX file: 0 0 type rank, sizes (big-endian, 4 bytes each), data.

    Raises:
        DataError: not an IDX file of unsigned bytes with `dimensions` dimensions, or of another length than its sizes.
    """
    raw = read_bytes(path)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if raw[:4] != expected:
        raise DataError(
            f"{path}: begins with {raw[:4].hex()}, expected {expected.hex()} (IDX): get it again"
        )
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise DataError(
            f"{path}: {len(raw)} bytes, shorter than its header of {header}: get it again"
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) != (expected_bytes := header + math.prod(shape)):
        raise DataError(
            f"{path}: {len(raw)} bytes, expected {expected_bytes} for {shape}: corrupt or cut short, get it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)
