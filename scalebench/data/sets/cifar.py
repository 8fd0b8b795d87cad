"""CIFAR-10 and CIFAR-100, in their binary or in their python version."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from scalebench.data.builder import DATASETS, Allocate, Arrays, DatasetBuilder
from scalebench.data.files import FileSet, find_files, read_bytes
from scalebench.errors import DataError

_SOURCE = "get the binary or the python version from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it"
_PIXELS = 3 * 32 * 32


Part = tuple[NDArray[np.uint8], NDArray[np.int64]]  # pixels (n, 3072), labels (n,)


class _Cifar(DatasetBuilder):
    """Images of 3 x 32 x 32 values from 0 to 1; a record is its label bytes, then 1,024 red, green and blue pixels."""

    train_files: ClassVar[tuple[str, ...]]
    test_file: ClassVar[str]
    binary_folder: ClassVar[str]
    python_folder: ClassVar[str]
    label_bytes: ClassVar[int] = 1  # of a binary record, before the pixels

    @property
    def _label(self) -> tuple[int, int, str]:
        """Number of classes, position of the label among a record's bytes, and its key in the python version."""
        return 10, 0, "labels"

    def files(self, data_dir: Path | None) -> list[Path]:
        names = (*self.train_files, self.test_file)
        binary = FileSet(
            tuple((f"{name}.bin",) for name in names), (".", self.binary_folder)
        )
        python = FileSet(tuple((name,) for name in names), (".", self.python_folder))
        return find_files(self.name, data_dir, (binary, python), _SOURCE)

    def build(self, files: list[Path], allocate: Allocate) -> Arrays:
        # In the order of `files`, the test part last.
        *training, test = [
            self._read_binary(path)
            if path.suffix == ".bin"
            else self._read_python(path)
            for path in files
        ]
        lengths = {
            path.name: len(labels)
            for path, (_, labels) in zip(files[:-1], training, strict=True)
        }
        # A file that was cut at the end of a record reads without an error.
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(
                f"data set {self.name}: training files of unequal length ({listed}); one is cut short"
            )
        all_pixels = np.concatenate([pixels for pixels, _ in training])
        all_labels = np.concatenate([labels for _, labels in training])
        arrays: dict[str, Any] = {}
        for part, (pixels, labels) in (
            ("train", (all_pixels, all_labels)),
            ("test", test),
        ):
            x = arrays[f"x_{part}"] = allocate(
                f"x_{part}", (len(pixels), 3, 32, 32), np.float32
            )
            # Into the file, without a second copy in memory.
            np.divide(pixels.reshape(x.shape), np.float32(255), out=x)
            arrays[f"y_{part}"] = labels
        return Arrays("classification", self._label[0], **arrays)

    def _read_binary(self, path: Path) -> Part:
        raw = read_bytes(path)
        record = self.label_bytes + _PIXELS
        if not raw or len(raw) % record:
            raise DataError(
                f"{path}: {len(raw)} bytes, expected a multiple of {record}: cut short, get it again"
            )
        table = np.frombuffer(raw, dtype=np.uint8).reshape(-1, record)
        return table[:, self.label_bytes :], table[:, self._label[1]].astype(np.int64)

    def _read_python(self, path: Path) -> Part:
        table = load_arrays_only(path)
        key = self._label[2]
        if not {"data", key} <= set(table):
            raise DataError(
                f"{path}: holds {', '.join(table) or 'nothing'}; expected data and {key}: get it again"
            )
        pixels, labels = np.asarray(table["data"]), np.asarray(table[key])
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise DataError(
                f"{path}: {key} are not whole numbers: corrupt, get it again"
            )
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
            expected = f"uint8 ({len(labels)}, {_PIXELS})"
            raise DataError(
                f"{path}: data is {pixels.dtype} {pixels.shape}, expected {expected}: get it again"
            )
        return pixels, labels.astype(np.int64)


@DATASETS.add
class Cifar10(_Cifar):
    """50,000 + 10,000 photographs of 10 kinds of things (Krizhevsky 2009)."""

    name = "cifar10"
    summary = "photographs, 3x32x32, 10 classes; binary or python files in --data-dir"
    train_files = tuple(f"data_batch_{number}" for number in range(1, 6))
    test_file = "test_batch"
    binary_folder = "cifar-10-batches-bin"
    python_folder = "cifar-10-batches-py"


@DATASETS.add
class Cifar100(_Cifar):
    """As CIFAR-10 with 100 classes; `labels: coarse` gives their 20 groups."""

    name = "cifar100"
    summary = "photographs, 3x32x32, 100 classes (labels: coarse for 20); binary or python files in --data-dir"
    train_files = ("train",)
    test_file = "test"
    binary_folder = "cifar-100-binary"
    python_folder = "cifar-100-python"

    label_bytes = 2

    labels: Literal["fine", "coarse"] = "fine"

    @property
    def _label(self) -> tuple[int, int, str]:
        return (
            (100, 1, "fine_labels")
            if self.labels == "fine"
            else (20, 0, "coarse_labels")
        )


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of numpy arrays and plain containers; refuses everything else, which may run code."""

    _ALLOWED: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("_codecs", "encode"),  # bytes written by Python 3 in an old protocol
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which an array does not need"
            )
        # Files name the module as numpy 1 or as numpy 2 did.
        return super().find_class(
            "numpy._core.multiarray" if "multiarray" in module else module, name
        )


def load_arrays_only(path: Path) -> dict[str, Any]:
    """Return the dictionary pickled in `path`, with its keys as text.

    Raises:
        DataError: the pickle needs more than arrays and containers, or is not a dictionary.
    """
    raw = read_bytes(path)
    try:
        # numpy deprecates attributes of arrays pickled by Python 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:
        raise DataError(
            f"{path}: refused or corrupt pickle ({error}); get it again from its official page"
        ) from None
    if not isinstance(table, dict):
        raise DataError(
            f"{path}: holds {type(table).__name__}, expected a dictionary: get it again"
        )
    return {
        key.decode() if isinstance(key, bytes) else str(key): value
        for key, value in table.items()
    }
