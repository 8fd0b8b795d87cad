"""Cache of data sets as arrays, which workers open without importing the libraries that made them."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from scalebench import __version__
from scalebench.data import dataset
from scalebench.data.builder import (
    DATASETS,
    Allocate,
    Arrays,
    DatasetBuilder,
    check,
    validation_split,
)
from scalebench.errors import DataError
from scalebench.study.spec import Training
from scalebench.system.file_access import cache_folder

_HASH_BYTES = 1 << 24
_SHOWN = 12  # digits of a checksum
Pinned = TypeVar("Pinned", bound=Training)


def prepare(training: Training, workers: int, cache_dir: Path | None = None) -> Path:
    """Return the folder with the arrays of `training.dataset`, built if missing.

    Under weak scaling the data set has `workers` times as many training samples. The
    folder is renamed to its name when it is complete, so that two processes may prepare
    the same data set at once.

    Raises:
        DataError: an unknown data set or option, missing or corrupt files, invalid arrays, a data set that cannot grow
            under weak scaling, or a cache folder that cannot be written.
    """
    builder = _builder(training, workers)
    files = builder.files(training.data_dir)
    return _cached(
        builder,
        _key(builder, files),
        lambda allocate: builder.build(files, allocate),
        cache_dir,
    )


def prepare_validation(
    training: Training,
    workers: int,
    share: float,
    seed: int,
    cache_dir: Path | None = None,
) -> Path:
    """Return the folder of `training.dataset` with `share` of its training samples, drawn by `seed`, as test part.

    Raises:
        DataError: as `prepare`, or a part would be empty.
    """
    whole = dataset.open_dataset(prepare(training, workers, cache_dir))
    builder = _builder(training, workers)
    files = builder.files(training.data_dir)

    def split(allocate: Allocate) -> Arrays:
        return validation_split(whole, builder.copies, share, seed, allocate)

    return _cached(
        builder, f"{_key(builder, files)}-validation-{share:g}-{seed}", split, cache_dir
    )


def with_checksum(training: Pinned) -> Pinned:
    """Return `training` with the SHA-256 of its data if they are read from files; of weak scaling, of one worker's.

    Raises:
        DataError: as `prepare`, or the data have another checksum than stated.
    """
    files = _builder(training, 1).files(training.data_dir)
    if not files:
        return training.model_copy(update={"dataset_sha256": None})
    digest = dataset.open_dataset(prepare(training, 1)).sha256
    stated = training.dataset_sha256
    if stated not in (None, digest):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise DataError(
            f"data set {training.dataset.name}: {files[0]}{more} changed since the study began, or is read otherwise "
            f"(sha256 {str(stated)[:_SHOWN]}, now {digest[:_SHOWN]}); put it back, or begin anew with --new"
        )
    return training.model_copy(update={"dataset_sha256": digest})


def _builder(training: Training, workers: int) -> DatasetBuilder:
    builder = DATASETS.create(training.dataset.name, training.dataset.options)
    if training.scaling != "weak":
        return builder
    if not builder.grows:
        growing = [name for name in DATASETS.names() if DATASETS.find(name).grows]
        raise DataError(
            f"scaling: weak needs a data set that can grow, {builder.name!r} cannot; "
            f"use dataset: {' or '.join(growing)}"
        )
    return builder.grown(workers)


def _cached(
    builder: DatasetBuilder,
    key: str,
    make: Callable[[Allocate], Arrays],
    cache_dir: Path | None,
) -> Path:
    """Return the folder of these arrays, made if missing."""
    cache = cache_dir or cache_folder("datasets")
    folder = cache / f"{builder.name}-{key}"
    if folder.exists() and _is_whole(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Beside its final place: a rename works within one file system only.
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache))
        try:
            _build(builder, make, building)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"data set {builder.name}: cannot be cached in {cache} ({error.strerror or error}); "
            "free space there or set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return folder


def _key(builder: DatasetBuilder, files: list[Path]) -> str:
    """Return a hash of everything that determines the arrays; files count by size and time."""
    stats = []
    for path in files:
        state = path.stat()
        stats.append((str(path.resolve()), state.st_size, state.st_mtime_ns))
    # Another version may read the same files otherwise.
    versions = [
        __version__,
        version("scikit-learn"),
    ]  # of the packages that make arrays
    facts = [
        dataset.FORMAT_VERSION,
        builder.name,
        builder.model_dump(mode="json"),
        versions,
        stats,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    try:
        dataset.open_dataset(folder)
    except DataError:
        return False
    return True


def _build(
    builder: DatasetBuilder, make: Callable[[Allocate], Arrays], folder: Path
) -> None:
    def allocate(name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        array: NDArray[Any] = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape
        )
        return array

    arrays = make(allocate)
    check(builder.name, arrays)
    digest = hashlib.sha256()
    named: dict[str, NDArray[Any]] = {
        name: getattr(arrays, name) for name in dataset.ARRAY_NAMES
    }
    for name, array in named.items():
        path = folder / f"{name}.npy"
        if path.exists():
            # The builder asked for it by `allocate`, and has filled it in place.
            assert isinstance(array, np.memmap)
            array.flush()
        else:
            np.save(path, array, allow_pickle=False)
        # Equal bytes of another shape or dtype are other data.
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        rows = max(1, _HASH_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[start : start + rows]).data)
    meta = {
        "format": dataset.FORMAT_VERSION,
        "name": builder.name,
        "options": builder.model_dump(mode="json"),
        "task": arrays.task,
        "outputs": arrays.outputs,
        "sha256": digest.hexdigest(),
        "notes": arrays.notes,
        "arrays": dataset.shapes_of(named),
    }
    (folder / dataset.META).write_text(json.dumps(meta, indent=1) + "\n")


def _publish(building: Path, folder: Path) -> None:
    """Rename the finished folder, unless another process has already provided it."""
    # mkdtemp makes a folder for one user, and a cache may be shared.
    building.chmod(0o755)
    try:
        building.rename(folder)
    except OSError:
        # It is there: another process was faster.
        if not folder.exists():
            raise
        if not _is_whole(folder):
            # Moved, not deleted in place: the new folder takes its name at once.
            folder.rename(building.with_name(f"{building.name}-broken"))
            building.rename(folder)
            shutil.rmtree(
                building.with_name(f"{building.name}-broken"), ignore_errors=True
            )
