"""Files of data sets: search, reading with one-line errors, and arrays of which only the requested rows are read."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import DataError
from scalebench.formatting import memory_size
from scalebench.system import file_access
from scalebench.system.file_access import MIB
from scalebench.system.hardware import usable_memory_mib

_MOST_BYTES = 1024 * MIB  # of a file of MNIST or CIFAR, the largest of which has 180 MB


@dataclass(frozen=True)
class FileSet:
    """Files of one data set. Each entry of `names` lists accepted spellings of one file."""

    names: tuple[tuple[str, ...], ...]
    folders: tuple[str, ...] = (".",)  # below the data folder, in order of search


def need_folder(dataset: str, data_dir: Path | None, what: str, source: str) -> Path:
    """Return `data_dir` with ~ expanded. Raises DataError if it is not a folder."""
    if data_dir is None:
        raise DataError(
            f"data set {dataset} reads files: give --data-dir (data_dir in a study), a folder with {what}; {source}"
        )
    data_dir = data_dir.expanduser()
    if not data_dir.is_dir():
        raise DataError(
            f"data set {dataset}: no folder {data_dir}; give --data-dir, a folder with {what}; {source}"
        )
    return data_dir


def find_files(
    dataset: str, data_dir: Path | None, sets: tuple[FileSet, ...], source: str
) -> list[Path]:
    """Return the files of the first complete set, in the order of its names.

    Raises:
        DataError: no set is complete; names the missing files, the searched folders and the source.
    """
    what = ", or with ".join(
        ", ".join(spellings[0] for spellings in one.names) for one in sets
    )
    folder = need_folder(dataset, data_dir, what, source)
    lacks = []
    for one in sets:
        found, missing = [], []
        for spellings in one.names:
            places_of_it = (
                folder / place / spelling
                for place in one.folders
                for spelling in spellings
            )
            if path := next(filter(Path.is_file, places_of_it), None):
                found.append(path)
            else:
                missing.append(" or ".join(spellings))
        if not missing:
            return found
        places = ", ".join(str(folder / place) for place in one.folders)
        lacks.append(f"{', '.join(missing)} (looked in {places})")
    raise DataError(f"data set {dataset}: missing {'; or else '.join(lacks)}; {source}")


def only_file(
    dataset: str, data_dir: Path | None, name: str | None, suffix: str
) -> Path:
    """Return the file `name` in `data_dir`, or without a name the only file that ends in `suffix`."""
    hint = f"put your own {suffix} file there"
    folder = need_folder(dataset, data_dir, name or f"one {suffix} file", hint)
    if name is not None:
        return find_files(dataset, folder, (FileSet(((name,),)),), hint)[0]
    found = sorted(folder.glob(f"*{suffix}"))
    if len(found) != 1:
        listed = ", ".join(path.name for path in found[:8]) or "none"
        raise DataError(
            f"data set {dataset}: expected one {suffix} file in {folder}, found {len(found)} ({listed}); "
            f"say which with the option file: NAME{suffix}"
        )
    if not found[0].is_file():  # a device may have no end
        raise DataError(f"data set {dataset}: {found[0]} is no regular file; {hint}")
    return found[0]


def read_bytes(path: Path) -> bytes:
    """Return the content of `path`, decompressed if it ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                # One byte more than allowed shows that there are more.
                content = file.read(_MOST_BYTES + 1)
        else:
            content = file_access.read_bytes(path, _MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read ({error}); it is corrupt or cut short: get it again"
        ) from None
    if len(content) > _MOST_BYTES:
        raise DataError(
            f"{path}: larger than {_MOST_BYTES / MIB:,.0f} MiB when unpacked: get it again"
        )
    return content


def require_fits(path: Path, nbytes: int) -> None:
    """Raise DataError if reading `path`, which takes about `nbytes` of memory, takes more than this machine has."""
    has = usable_memory_mib() * MIB
    if nbytes > has:
        raise DataError(
            f"{path}: reading it takes about {memory_size(nbytes)} of memory, this machine has "
            f"{memory_size(has)}; give fewer samples"
        )


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
            # Unpacked sizes: a packed array of zeros is a thousand times smaller.
            require_fits(path, sum(entry.file_size for entry in archive.zip.infolist()))
            return {name: archive[name] for name in archive.files}
    except (
        OSError,
        ValueError,
        EOFError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{path}: not a readable .npz archive ({_cause(error)})"
        ) from None


def open_npy(path: Path) -> Source:
    """Open the array in a .npy file, memory-mapped."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: not a readable .npy array ({_cause(error)})"
        ) from None
    if not isinstance(found, np.ndarray):
        # An archive that np.load has opened, and holds open.
        found.close()
        raise DataError(
            f"{path}: not a readable .npy array (it is an archive; from_npz reads those)"
        )
    return found


def array_of_npz(path: Path, key: str) -> Source:
    """Read the array `key` of an .npz file into memory."""
    arrays = read_npz(path)
    if key not in arrays:
        raise DataError(
            f"{path}: no array {key!r}; it holds {', '.join(arrays) or 'nothing'}"
        )
    return arrays[key]


def open_hdf5(path: Path, key: str) -> Source:
    """Open the data set `key` of an HDF5 file: memory-mapped if contiguous, else (chunked, packed) read by slices."""
    try:
        import h5py
    except ImportError:
        raise DataError(
            f"{path}: HDF5 files need h5py; install it with pip install 'scalebench[hdf5]'"
        ) from None
    try:
        file = h5py.File(path, "r")  # open as long as its data set is referred to
        found = file.get(key)
        if not isinstance(found, h5py.Dataset):
            known: list[str] = []
            file.visititems(
                lambda name, item: (
                    known.append(name) if isinstance(item, h5py.Dataset) else None
                )
            )
            raise DataError(
                f"{path}: no data set {key!r}; it holds {', '.join(known) or 'none'}"
            )
        # A contiguous data set lies in the file as an array does, from its offset on.
        # None for one in chunks, or packed; one in external files has no place in this.
        offset = found.id.get_offset()
        plain = (
            offset is not None
            and not found.external
            and found.dtype.kind in "biufc"
            and found.size
        )
        return (
            np.memmap(
                path, dtype=found.dtype, mode="r", offset=offset, shape=found.shape
            )
            if plain
            else found
        )
    except OSError as error:
        raise DataError(f"{path}: not a readable HDF5 file ({error})") from None


def _cause(error: Exception) -> str:
    """Return the reason why numpy cannot read a file, without its unsafe advice to unpickle the file."""
    if "pickle" in str(error):
        return "it holds Python objects, or something else that is no array of numbers"
    return str(error)
