"""A ds-tensor over ranks: placement of blocks, exchange of rows, and agreement of all ranks.

Block k is on rank k mod K, as in a run. Rows are sent as bytes, so that any dtype of fixed size is supported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scalebench.data.exchange import Ints, fetched, moved, reordered
from scalebench.errors import DataError

_T = TypeVar("_T")


class Peers(Protocol):
    """Part of a communicator used by a ds-tensor; implemented by all of scalebench.comm."""

    rank: int
    size: int

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


class Ranks:
    """The ranks of a communicator, each with its own blocks. All ranks call every method in the same order.

    `sizes` are the sizes of all blocks, `array` the rows of this rank in ascending row number.

    Raises:
        DataError: `comm` is not a communicator of scalebench.
    """

    def __init__(self, comm: Peers) -> None:
        if not callable(getattr(comm, "alltoallv", None)):
            raise DataError(
                f"comm is a {type(comm).__name__}, expected a communicator of scalebench; "
                "for mpi4py: scalebench.comm.mpi.MpiCommunicator(MPI.COMM_WORLD)"
            )
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def agreed(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> _T:
        """Return the result of `make` on this rank if `describe` is equal on all ranks.

        Raises:
            DataError: as `together`, and if descriptions differ.
        """
        made, descriptions = self.together(make, describe)
        first = descriptions[0]
        for rank, other in enumerate(descriptions):
            if other != first:
                raise DataError(f"the ranks do not ask for the same: rank 0 has {first}, rank {rank} has {other}")
        return made

    def together(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> tuple[_T, list[Any]]:
        """Return the result of `make` on this rank and the descriptions (Python literals) of all ranks' results.

        Raises:
            DataError: `make` failed on another rank, which is named; a rank on which it failed raises its own error, so
                that all ranks raise.
        """
        failure: Exception | None = None
        try:
            made = make()
            text = repr((describe(made), None))
        except Exception as error:
            failure, text = error, repr((None, str(error) or type(error).__name__))
        message = torch.tensor(list(text.encode()), dtype=torch.uint8)
        messages = self._comm.alltoallv([message] * self.size)
        results = [ast.literal_eval(bytes(each.tolist()).decode()) for each in messages]
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(results):
            if reason is not None:
                raise DataError(f"rank {rank}: {reason}")
        return made, [description for description, _ in results]

    def rearranged(self, array: NDArray[Any], before: Sequence[Ints], order: Ints | None, sizes: Ints) -> NDArray[Any]:
        """Return this rank's rows after bringing all rows into `order` (n,), by default unchanged, and into `sizes`.

        `before` are the block sizes of each concatenated tensor; `array` has this rank's rows of each. One alltoallv if
        any row moves; the result is a copy.
        """
        now = np.concatenate([self._holders(each) for each in before])
        there = self._holders(sizes)
        order = np.arange(len(now)) if order is None else order
        after = np.empty_like(now)
        after[order] = there
        mine, held = order[there == self.rank], np.flatnonzero(now == self.rank)
        (found,) = moved([_bytes(array)], held, mine, (now, after), self.size, self._comm.alltoallv)
        return np.array(_rows(found, array))

    def rows(self, array: NDArray[Any], sizes: Ints, wanted: Ints) -> NDArray[Any]:
        """Return a copy of the rows `wanted` by this rank; exchanges row numbers, then rows."""
        owners = self._holders(sizes)
        held = np.flatnonzero(owners == self.rank)
        return _rows(fetched(_bytes(array), held, wanted, owners, self.size, self._comm.alltoallv), array)

    def everything(self, array: NDArray[Any], sizes: Ints) -> NDArray[Any]:
        """Return all rows, on every rank."""
        arrived = torch.cat(self._comm.alltoallv([_bytes(array)] * self.size))
        numbers = np.argsort(self._holders(sizes), kind="stable")
        return _rows(reordered([arrived], numbers, np.arange(len(numbers)))[0], array)

    def written(self, dtype: np.dtype[Any]) -> Any:
        """Return `dtype` as a literal. Raises DataError for Python objects."""
        if dtype.hasobject:
            raise DataError(f"rows of Python objects ({dtype}) cannot travel; use numbers, or text of fixed size")
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
    if width == 0:
        return torch.empty((len(array), 0), dtype=torch.uint8)
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(len(array), width))


def _rows(found: Tensor, like: NDArray[Any]) -> NDArray[Any]:
    """Rows of the shape and dtype of `like`'s from their bytes."""
    shape = (len(found), *like.shape[1:])
    if found.shape[1] == 0:
        return np.zeros(shape, dtype=like.dtype)
    return found.numpy().reshape(-1).view(like.dtype).reshape(shape)
