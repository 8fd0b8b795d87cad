"""Search and reading of the files of data sets, with one-line errors."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from scalebench.errors import DataError
from scalebench.system import bounded_read
from scalebench.system.bounded_read import MIB
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
        raise DataError(f"data set {dataset}: no folder {data_dir}; give --data-dir, a folder with {what}; {source}")
    return data_dir


def find_files(dataset: str, data_dir: Path | None, sets: tuple[FileSet, ...], source: str) -> list[Path]:
    """Return the files of the first complete set, in the order of its names.

    Raises:
        DataError: no set is complete; names the missing files, the searched folders and the source.
    """
    what = ", or with ".join(", ".join(spellings[0] for spellings in one.names) for one in sets)
    folder = need_folder(dataset, data_dir, what, source)
    lacks = []
    for one in sets:
        found, missing = [], []
        for spellings in one.names:
            places_of_it = (folder / place / spelling for place in one.folders for spelling in spellings)
            if path := next(filter(Path.is_file, places_of_it), None):
                found.append(path)
            else:
                missing.append(" or ".join(spellings))
        if not missing:
            return found
        places = ", ".join(str(folder / place) for place in one.folders)
        lacks.append(f"{', '.join(missing)} (looked in {places})")
    raise DataError(f"data set {dataset}: missing {'; or else '.join(lacks)}; {source}")


def only_file(dataset: str, data_dir: Path | None, name: str | None, suffix: str) -> Path:
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
                content = file.read(_MOST_BYTES + 1)
        else:
            content = bounded_read.read_bytes(path, _MOST_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); it is corrupt or cut short: get it again") from None
    if len(content) > _MOST_BYTES:
        raise DataError(f"{path}: larger than {_MOST_BYTES / MIB:,.0f} MiB when unpacked: get it again")
    return content


def require_fits(path: Path, nbytes: int) -> None:
    """Raise DataError if reading `path`, which takes about `nbytes` of memory, takes more than this machine has."""
    has = usable_memory_mib() * MIB
    if nbytes > has:
        raise DataError(
            f"{path}: reading it takes about {nbytes / 2**30:,.1f} GiB of memory, this machine has "
            f"{has / 2**30:,.1f} GiB; give fewer samples"
        )
