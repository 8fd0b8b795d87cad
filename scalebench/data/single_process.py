"""A ds-tensor in one process, which holds every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_T = TypeVar("_T")


class SingleProcess:
    """Operations of a ds-tensor in one process; `data.spread.Ranks` has them over the ranks of a communicator."""

    rank = 0
    size = 1

    def agreed(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> _T:
        return make()

    def together(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> tuple[_T, list[Any]]:
        made = make()
        return made, [describe(made)]

    def rearranged(self, array: NDArray[Any], before: Sequence[Ints], order: Ints | None, sizes: Ints) -> NDArray[Any]:
        return array if order is None else self.rows(array, sizes, order)

    def rows(self, array: NDArray[Any], sizes: Ints, wanted: Ints) -> NDArray[Any]:
        """Return a copy of the rows `wanted` in that order. A file is read once, front to back."""
        if not isinstance(array, np.memmap) or len(wanted) < 2:
            return np.asarray(array[wanted])
        ascending = np.argsort(wanted, kind="stable")
        found = np.empty((len(wanted), *array.shape[1:]), dtype=array.dtype)
        found[ascending] = array[wanted[ascending]]
        return found

    def written(self, dtype: np.dtype[Any]) -> Any:
        return dtype

    def read(self, written: Any) -> np.dtype[Any]:
        found: np.dtype[Any] = written
        return found

    def everything(self, array: NDArray[Any], sizes: Ints) -> NDArray[Any]:
        return np.array(array)
