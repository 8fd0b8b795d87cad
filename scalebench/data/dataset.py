"""A cached data set: four arrays, a task and a checksum."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import DataError

Task = Literal["classification", "regression"]
ARRAY_NAMES = ("x_train", "y_train", "x_test", "y_test")
FORMAT_VERSION = 2  # 2: notes
META = "meta.json"


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples.

    `x_*` are float32 (N, ...); `y_*` are int64 (N,) class numbers or float32 (N,
    outputs) values. `outputs` is the number of classes or of regression columns.
    `sha256` covers the contents of all four arrays. `notes` are facts of the input
    files that a user should know.
    """

    name: str
    task: Task
    outputs: int
    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    sha256: str = ""
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x_train.shape[1:])

    @property
    def n_train(self) -> int:
        return len(self.x_train)

    @property
    def n_test(self) -> int:
        return len(self.x_test)

    @property
    def metric_name(self) -> str:
        """`accuracy` for classification, `r2` for regression."""
        return "accuracy" if self.task == "classification" else "r2"

    @property
    def chance_metric(self) -> float:
        """Metric of a constant prediction: the share of the most frequent test class; an R2 of 0."""
        if self.task == "regression" or not self.n_test:
            return 0.0
        return float(np.bincount(self.y_test).max() / self.n_test)


def open_dataset(folder: Path) -> Dataset:
    """Return the cached data set in `folder`, memory-mapped, so that a worker reads only its rows.

    Raises:
        DataError: the folder is not a data set, or an array is missing, truncated or differs from meta.json.
    """
    folder = Path(folder)
    try:
        meta = json.loads((folder / META).read_text())
        # Without pickled objects: no file in the cache can execute code.
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ARRAY_NAMES
        }
        # Each file may be whole and the set not, as after a copy that was interrupted.
        if (meta["format"], meta["arrays"]) != (FORMAT_VERSION, shapes_of(arrays)):
            raise ValueError(f"its format or arrays are not those of {META}")
        return Dataset(
            meta["name"],
            meta["task"],
            meta["outputs"],
            **arrays,
            sha256=meta["sha256"],
            folder=folder,
            notes=tuple(meta["notes"]),
        )
    except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: not a whole cached data set ({error}); delete it to rebuild it"
        ) from None


def shapes_of(arrays: dict[str, NDArray[Any]]) -> dict[str, dict[str, Any]]:
    """Return shape and dtype of each array."""
    return {
        name: {"shape": list(array.shape), "dtype": array.dtype.name}
        for name, array in arrays.items()
    }
