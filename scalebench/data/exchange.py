"""Exchange of rows between holders: the workers of a run, or the ranks of a `DsTensor`.

All holders know the owner of every row before and after, so that no row numbers are
sent; `exchange` is the alltoallv of a communicator. torch is imported where rows
travel, as a plan in one process needs none.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import DataError
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]
Exchange: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"
_T = TypeVar("_T")
_ROWS_AT_ONCE = 8192  # that are copied out of a file


def moved(
    parts: Sequence[Tensor],
    rows: Ints,
    wanted: Ints,
    owners: tuple[Ints, Ints],
    holders: int,
    exchange: Exchange | None,
) -> list[Tensor]:
    """Return `parts`, whose rows (n_i, ...) have the numbers `rows`, with the rows `wanted` instead.

    `owners` are the holder (n,) of every row before and after. `exchange` sends tensor
    i to holder i and returns the tensors of all holders; it is called once for each
    part if any row moves, on all holders or on none. Rows are sent in ascending number.
    Parts without a move are returned uncopied.
    """
    before, after = owners
    # A plan returns the same array while no row moves, which is the case in most
    # epochs.
    if before is not after and not np.array_equal(before, after):
        assert exchange is not None, "rows move: an exchange is needed"
        held = np.argsort(rows, kind="stable")
        departures = _by_holder(held, after[rows[held]], holders)
        parts = [
            torch.cat(exchange([_pick(part, leaving) for leaving in departures]))
            for part in parts
        ]
        # What arrived is in order of the senders, and of each in ascending row number.
        ascending = np.sort(wanted)
        rows = ascending[np.argsort(before[ascending], kind="stable")]
    return reordered(parts, rows, wanted)


def reordered(parts: Sequence[Tensor], rows: Ints, wanted: Ints) -> list[Tensor]:
    """Return `parts`, whose rows have the numbers `rows`, with the subset `wanted` in that order."""
    if np.array_equal(rows, wanted):
        return list(parts)
    held = np.argsort(rows, kind="stable")
    positions = held[np.searchsorted(rows, wanted, sorter=held)]
    return [_pick(part, positions) for part in parts]


def fetched(
    part: Tensor,
    rows: Ints,
    wanted: Ints,
    owners: Ints,
    holders: int,
    exchange: Exchange,
) -> Tensor:
    """Return copies of the rows `wanted` by this holder; they may repeat.

    `rows` are the numbers of the rows of `part`, `owners` (n,) the holder of every row.
    Makes two exchanges: of row numbers and of rows.
    """
    # Each row travels once, however often it is wanted.
    needed = np.unique(wanted)
    requests = _by_holder(needed, owners[needed], holders)
    asked = exchange([torch.from_numpy(request) for request in requests])
    replies = [reordered([part], rows, request.numpy())[0] for request in asked]
    return reordered([torch.cat(exchange(replies))], np.concatenate(requests), wanted)[
        0
    ]


def _pick(tensor: Tensor, positions: Ints) -> Tensor:
    """Return a copy of the rows at `positions`."""
    return tensor.index_select(0, torch.from_numpy(positions).to(tensor.device))


def _by_holder(values: Ints, holder: Ints, holders: int) -> list[Ints]:
    """Split `values` (n,) into one array for each holder, in order."""
    ends = np.cumsum(np.bincount(holder, minlength=holders))[:-1]
    # Stable: of each holder in the order of `values`, which the receiver knows.
    return np.split(values[np.argsort(holder, kind="stable")], ends)


class SingleProcess:
    """Operations of a ds-tensor in one process; `Ranks` has them over the ranks of a communicator."""

    rank = 0
    size = 1

    def agreed(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> _T:
        return make()

    def together(
        self, make: Callable[[], _T], describe: Callable[[_T], Any]
    ) -> tuple[_T, list[Any]]:
        made = make()
        return made, [describe(made)]

    def rearranged(
        self,
        array: NDArray[Any],
        before: Sequence[Ints],
        order: Ints | None,
        sizes: Ints,
    ) -> NDArray[Any]:
        return array if order is None else self.rows(array, sizes, order)

    def rows(self, array: NDArray[Any], sizes: Ints, wanted: Ints) -> NDArray[Any]:
        """Return a copy of the rows `wanted` in that order. A file is read once, front to back."""
        if not isinstance(array, np.memmap) or len(wanted) < 2:
            return np.asarray(array[wanted])
        # A file is read front to back, whatever the order of the request.
        ascending = np.argsort(wanted, kind="stable")
        found = np.empty((len(wanted), *array.shape[1:]), dtype=array.dtype)
        # Piece by piece, so that the rows are in memory once.
        for begin in range(0, len(wanted), _ROWS_AT_ONCE):
            some = ascending[begin : begin + _ROWS_AT_ONCE]
            found[some] = array[wanted[some]]
        return found

    def written(self, dtype: np.dtype[Any]) -> Any:
        return dtype

    def read(self, written: Any) -> np.dtype[Any]:
        found: np.dtype[Any] = written
        return found

    def everything(self, array: NDArray[Any], sizes: Ints) -> NDArray[Any]:
        return np.array(array)


class Peers(Protocol):
    """Part of a communicator used by a ds-tensor; implemented by all of scalebench.comm."""

    rank: int
    size: int

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


class Ranks:
    """The ranks of a communicator, each with its own blocks. All ranks call every method in the same order.

    Block k is on rank k mod K, as in a run. Rows are sent as bytes, so that any dtype
    of fixed size is supported. `sizes` are the sizes of all blocks, `array` the rows of
    this rank in ascending row number.

    Raises:
        DataError: `comm` is not a communicator of scalebench.
    """

    def __init__(self, comm: Peers) -> None:
        if not callable(getattr(comm, "alltoallv", None)):
            raise DataError(
                f"comm is a {type(comm).__name__}, expected a communicator of scalebench; "
                "for mpi4py: scalebench.comm.mpi.MpiCommunicator(MPI.COMM_WORLD)"
            )
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size

    def agreed(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> _T:
        """Return the result of `make` on this rank if `describe` is equal on all ranks.

        Raises:
            DataError: as `together`, and if descriptions differ.
        """
        made, descriptions = self.together(make, describe)
        first = descriptions[0]
        for rank, other in enumerate(descriptions):
            if other != first:
                raise DataError(
                    f"the ranks do not ask for the same: rank 0 has {first}, rank {rank} has {other}"
                )
        return made

    def together(
        self, make: Callable[[], _T], describe: Callable[[_T], Any]
    ) -> tuple[_T, list[Any]]:
        """Return the result of `make` on this rank and the descriptions (Python literals) of all ranks' results.

        Raises:
            DataError: `make` failed on another rank, which is named; a rank on which it failed raises its own error, so
                that all ranks raise.
        """
        failure: Exception | None = None
        try:
            made = make()
            # Literals in place of pickles: no rank executes what another sends.
            text = repr((describe(made), None))
        except (
            Exception
        ) as error:  # raised below, when the others know: they wait in the exchange
            failure = error
            text = repr((None, str(error) or type(error).__name__))
        # Communicators carry tensors alone.
        message = torch.tensor(list(text.encode()), dtype=torch.uint8)
        messages = self._comm.alltoallv([message] * self.size)
        results = [ast.literal_eval(bytes(each.tolist()).decode()) for each in messages]
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(results):
            if reason is not None:
                raise DataError(f"rank {rank}: {reason}")
        return made, [description for description, _ in results]

    def rearranged(
        self,
        array: NDArray[Any],
        before: Sequence[Ints],
        order: Ints | None,
        sizes: Ints,
    ) -> NDArray[Any]:
        """Return this rank's rows after bringing all rows into `order` (n,), by default unchanged, and into `sizes`.

        `before` are the block sizes of each concatenated tensor; `array` has this
        rank's rows of each. One alltoallv if any row moves; the result is a copy.
        """
        now = np.concatenate([self._holders(each) for each in before])
        there = self._holders(sizes)
        order = np.arange(len(now)) if order is None else order
        after = np.empty_like(now)
        after[order] = there
        mine = order[there == self.rank]
        held = np.flatnonzero(now == self.rank)
        (found,) = moved(
            [_bytes(array)], held, mine, (now, after), self.size, self._comm.alltoallv
        )
        # Copied, as parts without a move come back as they were.
        return np.array(_rows(found, array))

    def rows(self, array: NDArray[Any], sizes: Ints, wanted: Ints) -> NDArray[Any]:
        """Return a copy of the rows `wanted` by this rank; exchanges row numbers, then rows."""
        owners = self._holders(sizes)
        held = np.flatnonzero(owners == self.rank)
        return _rows(
            fetched(
                _bytes(array), held, wanted, owners, self.size, self._comm.alltoallv
            ),
            array,
        )

    def everything(self, array: NDArray[Any], sizes: Ints) -> NDArray[Any]:
        """Return all rows, on every rank."""
        arrived = torch.cat(self._comm.alltoallv([_bytes(array)] * self.size))
        # What arrives is in order of the ranks, and of each in ascending row number.
        numbers = np.argsort(self._holders(sizes), kind="stable")
        return _rows(reordered([arrived], numbers, np.arange(len(numbers)))[0], array)

    def written(self, dtype: np.dtype[Any]) -> Any:
        """Return `dtype` as a literal. Raises DataError for Python objects."""
        if dtype.hasobject:
            raise DataError(
                f"rows of Python objects ({dtype}) cannot travel; use numbers, or text of fixed size"
            )
        return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)

    def read(self, written: Any) -> np.dtype[Any]:
        """Return the dtype of the literal `written`."""
        return np.lib.format.descr_to_dtype(written)

    def _holders(self, sizes: Ints) -> Ints:
        """Return the rank of each row, (n,)."""
        return np.repeat(np.arange(len(sizes)) % self.size, sizes)


def _bytes(array: NDArray[Any]) -> Tensor:
    """Return the rows of `array` as (n, bytes of a row), sharing memory if contiguous."""
    width = prod(array.shape[1:]) * array.dtype.itemsize
    # numpy has no view of rows without bytes, as of an empty axis.
    if width == 0:
        return torch.empty((len(array), 0), dtype=torch.uint8)
    flat = np.ascontiguousarray(array).reshape(-1)
    return torch.from_numpy(flat.view(np.uint8).reshape(len(array), width))


def _rows(found: Tensor, like: NDArray[Any]) -> NDArray[Any]:
    """Rows of the shape and dtype of `like`'s from their bytes."""
    shape = (len(found), *like.shape[1:])
    if found.shape[1] == 0:
        return np.zeros(shape, dtype=like.dtype)
    return found.numpy().reshape(-1).view(like.dtype).reshape(shape)
