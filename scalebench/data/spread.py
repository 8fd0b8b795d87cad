"""A ds-tensor over ranks: who holds which block, how rows travel, and how all ranks come to the same end.

Block k lies on rank k mod K, as in a run. Rows travel as bytes, so that any dtype of fixed size does.
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

from scalebench.data.alone import Ints
from scalebench.data.exchange import fetched, moved, reordered
from scalebench.errors import DataError

_T = TypeVar("_T")


class Peers(Protocol):
    """What a ds-tensor asks of a communicator; every one in scalebench.comm has it."""

    rank: int
    size: int

    def alltoallv(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


class Ranks:
    """The ranks of a communicator, each with its own blocks. Every method is called by all of them, in one order.

    `sizes` are those of all blocks, `array` the rows that this rank holds, in ascending row number.

    Raises:
        DataError: `comm` is no communicator of scalebench.
    """

    def __init__(self, comm: Peers) -> None:
        if not callable(getattr(comm, "alltoallv", None)):
            raise DataError(
                f"comm is a {type(comm).__name__}, expected a communicator of scalebench; "
                "for mpi4py: scalebench.comm.mpi.MpiCommunicator(MPI.COMM_WORLD)"
            )
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def agreed(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> _T:
        """What `make` makes on this rank, if every rank made one that `describe` describes alike.

        Raises:
            DataError: as `together`, and where descriptions differ.
        """
        made, said = self.together(make, describe)
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise DataError(f"the ranks do not ask for the same: rank 0 has {said[0]}, rank {rank} has {theirs}")
        return made

    def together(self, make: Callable[[], _T], describe: Callable[[_T], Any]) -> tuple[_T, list[Any]]:
        """What `make` makes on this rank, and the description (a Python literal) of every rank's; one small exchange.

        Raises:
            DataError: it failed on another rank, which is named. A rank on which it failed raises its own error. So
                no rank waits for one that gave up.
        """
        failure: Exception | None = None
        try:
            made = make()
            text = repr((describe(made), None))
        except Exception as error:
            failure, text = error, repr((None, str(error) or type(error).__name__))
        letter = torch.tensor(list(text.encode()), dtype=torch.uint8)
        letters = self._comm.alltoallv([letter] * self.size)
        said = [ast.literal_eval(bytes(each.tolist()).decode()) for each in letters]
        if failure is not None:
            raise failure
        for rank, (_, trouble) in enumerate(said):
            if trouble is not None:
                raise DataError(f"rank {rank}: {trouble}")
        return made, [description for description, _ in said]

    def rearranged(self, array: NDArray[Any], before: Sequence[Ints], order: Ints | None, sizes: Ints) -> NDArray[Any]:
        """The rows here once all rows stand in `order` (n,), by default as they are, and in blocks of `sizes`.

        `before` are the sizes of the blocks of each tensor whose rows they are, one after the other; `array` has what
        this rank holds of each. One alltoallv if any row moves; a copy in any case.
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
        """A copy of the rows `wanted`, of which each rank may want others: their numbers travel, then they."""
        owners = self._holders(sizes)
        held = np.flatnonzero(owners == self.rank)
        return _rows(fetched(_bytes(array), held, wanted, owners, self.size, self._comm.alltoallv), array)

    def everything(self, array: NDArray[Any], sizes: Ints) -> NDArray[Any]:
        """All rows, on every rank."""
        arrived = torch.cat(self._comm.alltoallv([_bytes(array)] * self.size))
        numbers = np.argsort(self._holders(sizes), kind="stable")
        return _rows(reordered([arrived], numbers, np.arange(len(numbers)))[0], array)

    def written(self, dtype: np.dtype[Any]) -> Any:
        """`dtype` as a literal. Raises DataError for Python objects."""
        if dtype.hasobject:
            raise DataError(f"rows of Python objects ({dtype}) cannot travel; use numbers, or text of fixed size")
        return dtype.str if dtype.names is None else np.lib.format.dtype_to_descr(dtype)

    def read(self, written: Any) -> np.dtype[Any]:
        """The dtype that was `written`."""
        return np.lib.format.descr_to_dtype(written)

    def _holders(self, sizes: Ints) -> Ints:
        """(n,) the rank that holds each row."""
        return np.repeat(np.arange(len(sizes)) % self.size, sizes)


def _bytes(array: NDArray[Any]) -> Tensor:
    """The rows of `array` as (n, bytes of a row), sharing its memory where it is contiguous."""
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
