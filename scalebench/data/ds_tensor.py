"""The ds-tensor: an array cut into blocks along its first axis, in one process or over the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from scalebench.data.exchange import Ints, Peers, Ranks, SingleProcess
from scalebench.data.files import Source, array_of_npz, open_hdf5, open_npy
from scalebench.data.layout import SHUFFLES, Blocks, Grid, laid_out, shuffled
from scalebench.errors import DataError, nearest


class DsTensor:
    """An array (N, ...) in blocks along the first axis.

    `blocks` is their number (sizes then differ by at most one), a grid (rows, columns)
    of blocks in row-major order, or a list of sizes; by default one, or one for each
    rank. Blocks are views: a memory-mapped array is read only where a block is used.

    With `comm`, a communicator of scalebench (`MpiCommunicator(MPI.COMM_WORLD)`), every rank makes the same tensor and
    keeps its blocks rank, rank + K, rank + 2 K, ..., possibly none. Iteration, `block` and the function of `map` see
    these; `shape`, `len` and `block_sizes` are those of the whole. All operations except iteration and `block` are then
    collective: every rank calls them with the same arguments and gets the result of one process, bit for bit. An error
    on one rank is raised on all. Runs use tensors of one process: a native worker's `Shard` reads its rows by them, and
    sends rows by the same exchange.

    Raises:
        DataError: `array` or `blocks` is invalid, there are fewer rows than blocks, sizes do not add up to the rows, or
            ranks give different tensors.

    >>> [len(block) for block in DsTensor(np.arange(10), 4)]
    [3, 3, 2, 2]
    """

    array: NDArray[Any]
    """Rows of this rank in ascending row number: all rows in one process."""
    grid: Grid
    block_sizes: Ints

    def __init__(
        self,
        array: NDArray[Any] | Callable[[], Source],
        blocks: Blocks | None = None,
        comm: Peers | None = None,
    ) -> None:
        self.comm = comm
        self._among = _among(comm)

        def made() -> tuple[NDArray[Any], Ints, Grid]:
            source = array() if callable(array) else _as_array(array)
            if len(source.shape) == 0:
                raise DataError(
                    "a ds-tensor needs an array with a first axis, got a single number"
                )
            sizes, grid = laid_out(source.shape[0], blocks, self._among.size)
            try:
                return self._own(source, sizes), sizes, grid
            except OSError as error:
                raise DataError(
                    f"rows of a ds-tensor cannot be read: {error}"
                ) from None

        def described(it: tuple[NDArray[Any], Ints, Grid]) -> dict[str, Any]:
            array, sizes, grid = it
            shape = (int(sizes.sum()), *array.shape[1:])
            return {
                "shape": shape,
                "dtype": self._among.written(array.dtype),
                "grid": grid,
                "blocks": sizes.tolist(),
            }

        # All ranks compare what they made, and fail together: none waits for one that
        # gave up.
        self._hold(*self._among.agreed(made, described))

    @classmethod
    def from_array(
        cls,
        array: NDArray[Any],
        blocks: Blocks | None = None,
        comm: Peers | None = None,
    ) -> DsTensor:
        """Wrap `array` without a copy; with `comm` and the whole array on each rank, copy the blocks of this rank."""
        return cls(array, blocks, comm)

    @classmethod
    def from_npy(
        cls, path: Path, blocks: Blocks | None = None, comm: Peers | None = None
    ) -> DsTensor:
        """Open the array in a .npy file, memory-mapped; with `comm`, each rank reads its blocks only.

        Raises DataError if it cannot be read.
        """
        # Opened with the others in `agreed`: a file that one rank lacks fails on all.
        return cls(partial(open_npy, path), blocks, comm)

    @classmethod
    def from_npz(
        cls,
        path: Path,
        key: str,
        blocks: Blocks | None = None,
        comm: Peers | None = None,
    ) -> DsTensor:
        """Read the array `key` of an .npz file into memory; with `comm`, each rank then keeps its blocks only.

        Raises DataError if it cannot be read.
        """
        return cls(partial(array_of_npz, path, key), blocks, comm)

    @classmethod
    def from_hdf5(
        cls,
        path: Path,
        key: str,
        blocks: Blocks | None = None,
        comm: Peers | None = None,
    ) -> DsTensor:
        """Open the data set `key` of an HDF5 file; memory-mapped if contiguous, else (chunked, packed) read.

        With `comm`, each rank reads its blocks only. Raises DataError if it cannot be
        read, or without h5py.
        """
        return cls(partial(open_hdf5, path, key), blocks, comm)

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.block_sizes.sum()), *self.array.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the largest block."""
        return (int(self.block_sizes.max(initial=0)), *self.shape[1:])

    @property
    def n_blocks(self) -> int:
        return len(self.block_sizes)

    @property
    def own_blocks(self) -> range:
        """Numbers of the blocks of this rank."""
        return range(self._among.rank, self.n_blocks, self._among.size)

    def block(self, k: int, column: int | None = None) -> NDArray[Any]:
        """Return block `k` in visiting order, or the block at row `k` and `column` of the grid.

        Raises:
            IndexError: there is no such block, or another rank holds it.
        """
        if column is not None:
            if not (0 <= k < self.grid[0] and 0 <= column < self.grid[1]):
                raise IndexError(
                    f"block ({k}, {column}) of a {self.grid[0]}x{self.grid[1]} grid"
                )
            k = k * self.grid[1] + column
        if not 0 <= k < self.n_blocks:
            raise IndexError(f"block {k} of {self.n_blocks}")
        # Blocks are dealt in turn, as in a run.
        place, holder = divmod(k, self._among.size)
        if holder != self._among.rank:
            raise IndexError(
                f"block {k} is on rank {holder}, this is rank {self._among.rank}; index rows to bring them"
            )
        return self.array[self._starts[place] : self._starts[place + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Iterate over the blocks of this rank in visiting order."""
        return (self.block(k) for k in self.own_blocks)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """Index the whole array as numpy does: `t[3]`, `t[2:9]`, `t[mask]`, `t[5:, 0]`.

        A slice is a view in one process and a copy over ranks; each rank may request
        other rows.
        """
        if isinstance(self._among, SingleProcess):
            return np.asarray(self.array[index])
        inner = self.shape[1:]
        # Any index of numpy, found by indexing numbers in place of the elements.
        cells = prod(inner)

        def requested() -> tuple[Ints, Ints]:
            """Return row and place in the row of each requested element."""
            numbers = np.arange(len(self)).reshape(-1, *(1 for _ in inner))
            places = np.arange(cells).reshape(1, *inner)
            return np.broadcast_to(numbers, self.shape)[index], np.broadcast_to(
                places, self.shape
            )[index]

        (numbers, places), _ = self._among.together(requested, lambda found: None)
        needed = np.unique(numbers)
        found = self._among.rows(self.array, self.block_sizes, needed).reshape(
            len(needed), cells
        )
        return np.asarray(found[np.searchsorted(needed, numbers), places])

    def map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> DsTensor:
        """Apply `function` to each block and join the results in the same grid; their number of rows may change.

        Raises:
            DataError: a result has no first axis, or rows of another shape than the others.
        """

        def made() -> list[NDArray[Any]]:
            return [_with_rows(np.asarray(function(block))) for block in self]

        def described(results: list[NDArray[Any]]) -> list[tuple[tuple[int, ...], Any]]:
            return [
                (result.shape, self._among.written(result.dtype)) for result in results
            ]

        results, shapes = self._among.together(made, described)
        # Block k is on rank k mod K, where it is the (k // K)-th.
        of_block = [
            shapes[k % self._among.size][k // self._among.size]
            for k in range(self.n_blocks)
        ]
        shape = _one_shape(shape[1:] for shape, _ in of_block)
        dtypes = [self._among.read(text) for _, text in of_block]
        sizes = np.array([shape[0] for shape, _ in of_block], dtype=np.int64)
        # A rank without a block has dtype and shape of the others' results.
        return self._like(
            np.concatenate([_joined(dtypes, shape), *results]), sizes, self.grid
        )

    def rechunk(self, blocks: Blocks) -> DsTensor:
        """Return the same rows in other blocks, without a copy in one process, by one alltoallv over ranks."""
        sizes, grid = self._among.agreed(
            lambda: laid_out(len(self), blocks, self._among.size),
            lambda layout: (layout[0].tolist(), layout[1]),
        )
        return self._like(
            self._among.rearranged(self.array, [self.block_sizes], None, sizes),
            sizes,
            grid,
        )

    def shuffle(self, how: str, seed: int) -> DsTensor:
        """Return a copy with permuted rows: `in_block`, `rotate_blocks`, `pairwise` or `global` (docs/data.md).

        Grid and block sizes are kept; `rotate_blocks` moves sizes with their blocks.
        Over ranks, one alltoallv moves rows.
        """

        def drawn() -> tuple[Ints, Ints]:
            if how not in SHUFFLES:
                raise DataError(f"unknown shuffle {how!r}; {nearest(how, SHUFFLES)}")
            # Every rank draws the whole order, in place of sending it.
            return shuffled(
                how, np.arange(len(self)), self.block_sizes, np.random.default_rng(seed)
            )

        # A checksum of the order in place of the order, which is as long as the tensor.
        order, sizes = self._among.agreed(
            drawn, lambda it: f"{how} with seed {seed} (CRC {crc32(it[0].tobytes())})"
        )
        return self._like(
            self._among.rearranged(self.array, [self.block_sizes], order, sizes),
            sizes,
            self.grid,
        )

    @staticmethod
    def concatenate(tensors: Sequence[DsTensor]) -> DsTensor:
        """Return rows and blocks of all `tensors` in sequence. Raises DataError if rows differ in shape.

        Grids of the same number of columns are stacked; others become one column of
        blocks. Over ranks, blocks are renumbered and moved by one alltoallv.
        """
        shape = _one_shape(tensor.shape[1:] for tensor in tensors)
        first = tensors[0]
        # Not by their ranks: two communicators may number the same processes otherwise.
        if any(tensor.comm is not first.comm for tensor in tensors):
            raise DataError(
                "cannot join tensors of different communicators; expected one comm"
            )
        before = [tensor.block_sizes for tensor in tensors]
        sizes: Ints = first._among.agreed(
            lambda: np.concatenate(before), lambda sizes: sizes.tolist()
        )
        # of the common dtype
        empty = _joined([tensor.dtype for tensor in tensors], shape)
        here = np.concatenate([empty, *(tensor.array for tensor in tensors)])
        columns = {tensor.grid[1] for tensor in tensors}
        if len(columns) == 1:
            grid = sum(tensor.grid[0] for tensor in tensors), columns.pop()
        else:
            grid = len(sizes), 1
        return first._like(
            first._among.rearranged(here, before, None, sizes), sizes, grid
        )

    def rows(self, indices: Ints) -> NDArray[Any]:
        """Return a copy of the rows `indices` in that order; each rank may request others. Files are read in order."""
        numbers, _ = self._among.together(
            lambda: np.arange(len(self))[indices], lambda numbers: None
        )
        return self._among.rows(self.array, self.block_sizes, numbers)

    def collect(self) -> NDArray[Any]:
        """Return the rows of all ranks as one array in memory."""
        return self._among.everything(self.array, self.block_sizes)

    def _own(self, source: Source, sizes: Ints) -> NDArray[Any]:
        """Return the rows of this rank's blocks; in one process `source` itself if it is an array."""
        if isinstance(self._among, SingleProcess):
            return source if isinstance(source, np.ndarray) else np.asarray(source[()])
        ends = np.cumsum(sizes)
        # Only blocks of this rank are read: the file may be larger than its memory.
        here = slice(self._among.rank, None, self._among.size)
        rows = int(sizes[here].sum())
        found = np.empty((rows, *source.shape[1:]), dtype=source.dtype)
        begin = 0
        for end, size in zip(ends[here].tolist(), sizes[here].tolist(), strict=True):
            found[begin : begin + size] = source[end - size : end]
            begin += size
        return found

    def _hold(self, array: NDArray[Any], sizes: Ints, grid: Grid) -> None:
        assert grid[0] * grid[1] == len(sizes)
        self.array = array
        self.block_sizes = sizes
        self.grid = grid
        own_sizes = sizes[self._among.rank :: self._among.size]
        self._starts: Ints = np.concatenate([[0], np.cumsum(own_sizes)])

    def _like(self, array: NDArray[Any], sizes: Ints, grid: Grid) -> DsTensor:
        """Return a tensor over the same ranks with the rows `array` on this rank."""
        # Without __init__, which would compare the ranks again.
        tensor = DsTensor.__new__(DsTensor)
        tensor.comm, tensor._among = self.comm, self._among
        tensor._hold(array, sizes, grid)
        return tensor


def _among(comm: Peers | None) -> SingleProcess | Ranks:
    return SingleProcess() if comm is None else Ranks(comm)


def _as_array(array: Any) -> NDArray[Any]:
    try:
        # As it is: a memory-mapped array stays one.
        return np.asanyarray(array)
    except (
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:  # rows of different lengths, a tensor with gradients
        raise DataError(
            f"a ds-tensor needs an array, got a {type(array).__name__}: {error}"
        ) from None


def _with_rows(array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim == 0:
        raise DataError(
            "a ds-tensor needs an array with a first axis, got a single number"
        )
    return array


def _one_shape(shapes: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common shape of rows."""
    found = set(shapes)
    if len(found) != 1:
        listed = " and ".join(str(shape) for shape in sorted(found)) or "none"
        raise DataError(f"cannot join rows of shapes {listed}; expected one shape")
    return found.pop()


def _joined(dtypes: Sequence[np.dtype[Any]], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an empty array with the common dtype of `dtypes`."""
    return np.concatenate([np.empty((0, *shape), dtype=dtype) for dtype in dtypes])
