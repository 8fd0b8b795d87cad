"""The ds-tensor: an array cut into blocks along its first axis."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scalebench.data.shuffle import SHUFFLES, shuffled
from scalebench.errors import DataError, nearest

Ints = NDArray[np.int64]
Blocks = int | tuple[int, int] | Sequence[int] | Ints


def cut(length: int, parts: int) -> Ints:
    """Sizes (parts,) that sum to `length` and differ by at most one, the larger ones first: no remainder is lost."""
    whole, rest = divmod(length, parts)
    sizes = np.full(parts, whole, dtype=np.int64)
    sizes[:rest] += 1
    return sizes


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Every array in an .npz file by name; pickled objects are refused. Raises DataError where it cannot be read."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a readable .npz archive ({error})") from None


class DsTensor:
    """An array (N, ...) in blocks along the first axis.

    `blocks` is how many (sizes then differ by at most one), a grid (rows, columns) of that many blocks in row-major
    order, or a list of sizes. Blocks are views: a memory-mapped array is read only where a block is used.

    Raises:
        DataError: fewer rows than blocks, or sizes that do not add up to the rows.

    >>> [len(block) for block in DsTensor(np.arange(10), 4)]
    [3, 3, 2, 2]
    """

    def __init__(self, array: NDArray[Any], blocks: Blocks = 1) -> None:
        if array.ndim == 0:
            raise DataError("a ds-tensor needs an array with a first axis, got a single number")
        self.array = array
        self.grid: tuple[int, int]
        if isinstance(blocks, int | np.integer):
            blocks = (int(blocks), 1)
        if isinstance(blocks, tuple):
            self.grid = (int(blocks[0]), int(blocks[1]))
            self.block_sizes = self._cut_evenly(len(array), self.grid)
        else:
            self.block_sizes = np.asarray(blocks, dtype=np.int64)
            self.grid = (len(self.block_sizes), 1)
            if self.block_sizes.sum() != len(array) or (self.block_sizes < 0).any():
                raise DataError(f"block sizes add up to {self.block_sizes.sum()}, expected the {len(array)} rows")
        self.starts: Ints = np.concatenate([[0], np.cumsum(self.block_sizes)])

    @classmethod
    def from_array(cls, array: NDArray[Any], blocks: Blocks = 1) -> DsTensor:
        """`array`, not copied."""
        return cls(np.asanyarray(array), blocks)

    @classmethod
    def from_npy(cls, path: Path, blocks: Blocks = 1) -> DsTensor:
        """The array in a .npy file, memory-mapped. Raises DataError where it cannot be read."""
        try:
            return cls(np.load(path, mmap_mode="r", allow_pickle=False), blocks)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: not a readable .npy array ({error})") from None

    @classmethod
    def from_npz(cls, path: Path, key: str, blocks: Blocks = 1) -> DsTensor:
        """The array called `key` in an .npz file, read into memory. Raises DataError where it cannot be read."""
        arrays = read_npz(path)
        if key not in arrays:
            raise DataError(f"{path}: no array {key!r}; it holds {', '.join(arrays) or 'nothing'}")
        return cls(arrays[key], blocks)

    @classmethod
    def from_hdf5(cls, path: Path, key: str, blocks: Blocks = 1) -> DsTensor:
        """The data set `key` of an HDF5 file; memory-mapped if it is contiguous, else (chunked, packed) read.

        Raises DataError where it cannot be read, or h5py is not installed.
        """
        return cls(_read_hdf5(path, key), blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of the largest block; the others have at most so many rows."""
        return (int(self.block_sizes.max(initial=0)), *self.shape[1:])

    @property
    def n_blocks(self) -> int:
        return len(self.block_sizes)

    def block(self, k: int, column: int | None = None) -> NDArray[Any]:
        """Block `k` in visiting order, or the one at row `k` and `column` of the grid."""
        if column is not None:
            if not (0 <= k < self.grid[0] and 0 <= column < self.grid[1]):
                raise IndexError(f"block ({k}, {column}) of a {self.grid[0]}x{self.grid[1]} grid")
            k = k * self.grid[1] + column
        if not 0 <= k < self.n_blocks:
            raise IndexError(f"block {k} of {self.n_blocks}")
        return self.array[self.starts[k] : self.starts[k + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.block(k) for k in range(self.n_blocks))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """Rows, and parts of them, as numpy indexes the whole array: `t[3]`, `t[2:9]`, `t[mask]`, `t[5:, 0]`.

        A slice is a view; blocks play no part (they are what iteration and `block` give).
        """
        return np.asarray(self.array[index])

    def map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> DsTensor:
        """`function` of each block, the results joined in the same grid; they may have another number of rows.

        Raises:
            DataError: a result has no rows to join, or rows of another shape than the others.
        """
        return self.concatenate([DsTensor(np.asarray(function(block))) for block in self])._in_grid(self.grid)

    def rechunk(self, blocks: Blocks) -> DsTensor:
        """The same rows in other blocks; nothing is copied."""
        return DsTensor(self.array, blocks)

    def shuffle(self, how: str, seed: int) -> DsTensor:
        """A copy with its rows permuted: `in_block`, `rotate_blocks`, `pairwise` or `global` (docs/data.md).

        The grid is kept, and so are block sizes; `rotate_blocks` moves them with their blocks.
        """
        if how not in SHUFFLES:
            raise DataError(f"unknown shuffle {how!r}; {nearest(how, SHUFFLES)}")
        rows, sizes = shuffled(how, np.arange(len(self)), self.block_sizes, np.random.default_rng(seed))
        return DsTensor(self.rows(rows), sizes)._in_grid(self.grid)

    @staticmethod
    def concatenate(tensors: Sequence[DsTensor]) -> DsTensor:
        """All rows, and all blocks, of `tensors` one after the other. Raises DataError where rows differ in shape.

        Grids of the same number of columns are put one below the other; others become one column of blocks.
        """
        shapes = {tensor.shape[1:] for tensor in tensors}
        if len(shapes) != 1:
            listed = " and ".join(str(shape) for shape in sorted(shapes)) or "none"
            raise DataError(f"cannot join rows of shapes {listed}; expected one shape")
        sizes = np.concatenate([tensor.block_sizes for tensor in tensors])
        joined = DsTensor(np.concatenate([tensor.array for tensor in tensors]), sizes)
        columns = {tensor.grid[1] for tensor in tensors}
        return (
            joined._in_grid((sum(tensor.grid[0] for tensor in tensors), columns.pop())) if len(columns) == 1 else joined
        )

    def rows(self, indices: Ints) -> NDArray[Any]:
        """A copy of the rows `indices`, in that order. A file is read once, front to back."""
        if not isinstance(self.array, np.memmap) or len(indices) < 2:
            return np.asarray(self.array[indices])
        ascending = np.argsort(indices, kind="stable")
        found = np.empty((len(indices), *self.shape[1:]), dtype=self.array.dtype)
        found[ascending] = self.array[indices[ascending]]
        return found

    def collect(self) -> NDArray[Any]:
        """All rows as one array in memory."""
        return np.array(self.array)

    def _in_grid(self, grid: tuple[int, int]) -> DsTensor:
        """The same blocks, seen as a grid of that many."""
        assert grid[0] * grid[1] == self.n_blocks
        self.grid = grid
        return self

    @staticmethod
    def _cut_evenly(length: int, grid: tuple[int, int]) -> Ints:
        parts = grid[0] * grid[1]
        if min(grid) < 1:
            raise DataError(f"cannot cut into {grid[0]}x{grid[1]} blocks; at least one is needed")
        if parts > length:
            raise DataError(f"{parts} blocks but {length} samples; give at most one block per sample")
        return cut(length, parts)


def _read_hdf5(path: Path, key: str) -> NDArray[Any]:
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path}: HDF5 files need h5py; install it with pip install 'scalebench[hdf5]'") from None
    try:
        with h5py.File(path, "r") as file:
            found = file.get(key)
            if not isinstance(found, h5py.Dataset):
                known: list[str] = []
                file.visititems(lambda name, item: known.append(name) if isinstance(item, h5py.Dataset) else None)
                raise DataError(f"{path}: no data set {key!r}; it holds {', '.join(known) or 'none'}")
            offset = found.id.get_offset()
            plain = offset is not None and not found.external and found.dtype.kind in "biufc" and found.size
            if plain:
                return np.memmap(path, dtype=found.dtype, mode="r", offset=offset, shape=found.shape)
            return np.asarray(found[()])
    except OSError as error:
        raise DataError(f"{path}: not a readable HDF5 file ({error})") from None
