"""Arrays in files, of which only the requested rows are read if the format allows it."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scalebench.data.files import require_fits
from scalebench.errors import DataError


class Source(Protocol):
    """An array, memory-mapped file or data set of an HDF5 file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, index: Any, /) -> Any: ...


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of an .npz file by name, without pickled objects. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            require_fits(path, sum(entry.file_size for entry in archive.zip.infolist()))
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable .npz archive ({_cause(error)})") from None


def npy(path: Path) -> Source:
    """Open the array in a .npy file, memory-mapped."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: not a readable .npy array ({_cause(error)})") from None
    if not isinstance(found, np.ndarray):
        found.close()
        raise DataError(f"{path}: not a readable .npy array (it is an archive; from_npz reads those)")
    return found


def npz(path: Path, key: str) -> Source:
    """Read the array `key` of an .npz file into memory."""
    arrays = read_npz(path)
    if key not in arrays:
        raise DataError(f"{path}: no array {key!r}; it holds {', '.join(arrays) or 'nothing'}")
    return arrays[key]


def hdf5(path: Path, key: str) -> Source:
    """Open the data set `key` of an HDF5 file: memory-mapped if contiguous, else (chunked, packed) read by slices."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path}: HDF5 files need h5py; install it with pip install 'scalebench[hdf5]'") from None
    try:
        file = h5py.File(path, "r")  # open as long as its data set is referred to
        found = file.get(key)
        if not isinstance(found, h5py.Dataset):
            known: list[str] = []
            file.visititems(lambda name, item: known.append(name) if isinstance(item, h5py.Dataset) else None)
            raise DataError(f"{path}: no data set {key!r}; it holds {', '.join(known) or 'none'}")
        offset = found.id.get_offset()
        plain = offset is not None and not found.external and found.dtype.kind in "biufc" and found.size
        return np.memmap(path, dtype=found.dtype, mode="r", offset=offset, shape=found.shape) if plain else found
    except OSError as error:
        raise DataError(f"{path}: not a readable HDF5 file ({error})") from None


def _cause(error: Exception) -> str:
    """Return the reason why numpy cannot read a file, without its unsafe advice to unpickle the file."""
    if "pickle" in str(error):
        return "it holds Python objects, or something else that is no array of numbers"
    return str(error)
