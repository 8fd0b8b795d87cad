"""Exchange of rows between holders: the workers of a run or the ranks of a `DsTensor`.

All holders know the owner of every row before and after, so that no row numbers are sent; `exchange` is the alltoallv
of a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Exchange: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"


def moved(
    parts: Sequence[Tensor],
    rows: Ints,
    wanted: Ints,
    owners: tuple[Ints, Ints],
    holders: int,
    exchange: Exchange | None,
) -> list[Tensor]:
    """Return `parts`, whose rows (n_i, ...) have the numbers `rows`, with the rows `wanted` instead.

    `owners` are the holder (n,) of every row before and after. `exchange` sends tensor i to holder i and returns the
    tensors of all holders; it is called once for each part if any row moves, on all holders or on none. Rows are sent
    in ascending number. Parts without a move are returned uncopied.
    """
    import torch

    before, after = owners
    if before is not after and not np.array_equal(before, after):
        assert exchange is not None, "rows move: an exchange is needed"
        held = np.argsort(rows, kind="stable")
        departures = _by_holder(held, after[rows[held]], holders)
        parts = [torch.cat(exchange([pick(part, leaving) for leaving in departures])) for part in parts]
        ascending = np.sort(wanted)
        rows = ascending[np.argsort(before[ascending], kind="stable")]
    return reordered(parts, rows, wanted)


def reordered(parts: Sequence[Tensor], rows: Ints, wanted: Ints) -> list[Tensor]:
    """Return `parts`, whose rows have the numbers `rows`, with the subset `wanted` in that order."""
    if np.array_equal(rows, wanted):
        return list(parts)
    held = np.argsort(rows, kind="stable")
    positions = held[np.searchsorted(rows, wanted, sorter=held)]
    return [pick(part, positions) for part in parts]


def fetched(part: Tensor, rows: Ints, wanted: Ints, owners: Ints, holders: int, exchange: Exchange) -> Tensor:
    """Return copies of the rows `wanted` by this holder; they may repeat.

    `rows` are the numbers of the rows of `part`, `owners` (n,) the holder of every row. Makes two exchanges: of row
    numbers and of rows.
    """
    import torch

    needed = np.unique(wanted)
    requests = _by_holder(needed, owners[needed], holders)
    asked = exchange([torch.from_numpy(request) for request in requests])
    replies = [reordered([part], rows, request.numpy())[0] for request in asked]
    return reordered([torch.cat(exchange(replies))], np.concatenate(requests), wanted)[0]


def pick(tensor: Tensor, positions: Ints) -> Tensor:
    """Return a copy of the rows at `positions`."""
    import torch

    return tensor.index_select(0, torch.from_numpy(positions).to(tensor.device))


def _by_holder(values: Ints, holder: Ints, holders: int) -> list[Ints]:
    """Split `values` (n,) into one array for each holder, in order."""
    ends = np.cumsum(np.bincount(holder, minlength=holders))[:-1]
    return np.split(values[np.argsort(holder, kind="stable")], ends)


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
