"""The strongest entries of each tile of a model's parameters, as messages: what SparseLoCo and DeMo send."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from scalebench.strategies.compression import places_of_largest, rows_and_columns
from scalebench.strategies.few_bits import by_bins, packed_codes, unpacked_codes
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST = 181  # side of a tile whose places fit into 16 bits with a sign
_PLACE_BYTES = 2  # int16
_TABLE_ENTRY_BYTES = 4  # float32


class StrongestOfTiles:
    """Messages of the `count(entries)` entries of each tile that are largest in magnitude.

    A parameter of `shapes` is a matrix, its first axis by all others, or a vector; a
    tile of it has as sides the largest divisors of the matrix's that are at most
    `side`. With `cosines` the entries are those of the tile's orthonormal discrete
    cosine transform (DCT-II) instead. In a message entries have `bits` and their places
    in the tile 16; below 32 bits a table of `by_bins` stands before those of each
    parameter.

    Of tensors without values, as recordings have them, results have the sizes alone:
    torch takes a millisecond in Python for each of hundreds of small operations on such
    tensors.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        side: int,
        count: Callable[[int], int],
        like: Tensor,
        *,
        bits: int = 32,
        cosines: bool = False,
    ) -> None:
        self._sizes = [math.prod(shape) for shape in shapes]
        # (rows of tiles, height, columns of tiles, width)
        self._grids = [_grid(shape, side) for shape in shapes]
        self._tiles = [
            (down * across, height * width)
            for down, height, across, width in self._grids
        ]
        self._counts = [
            min(entries, max(1, count(entries))) for _, entries in self._tiles
        ]
        self._bits, self._cosines, self._dtype = bits, cosines, like.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes of a message."""
        sent = [
            tiles * count
            for (tiles, _), count in zip(self._tiles, self._counts, strict=True)
        ]
        if self._bits == 32:
            return sum((self._dtype.itemsize + _PLACE_BYTES) * n for n in sent)
        return sum(
            _TABLE_ENTRY_BYTES * 2**self._bits
            + _bytes_of(n, self._bits)
            + _PLACE_BYTES * n
            for n in sent
        )

    def tiled(self, vectors: Tensor) -> Tensor:
        """Return the entries of vectors (..., n) in the order of their tiles, (..., n); `cosines`: their transforms."""
        if vectors.is_meta:
            return vectors
        pieces, lead = [], vectors.shape[:-1]
        for piece, grid in zip(
            vectors.split_with_sizes(self._sizes, -1), self._grids, strict=True
        ):
            _, height, _, width = grid
            tiles = (
                piece.unflatten(-1, grid).transpose(-3, -2).reshape(-1, height, width)
            )
            if self._cosines:
                rows, columns = self._bases(grid, vectors)
                tiles = _between(rows, tiles, columns.T)
            pieces.append(tiles.reshape(*lead, -1))
        return torch.cat(pieces, -1)

    def vector(self, tiled: Tensor) -> Tensor:
        """Return the vectors (..., n) of which `tiled` (..., n) has the tiles."""
        if tiled.is_meta:
            return tiled
        pieces, lead = [], tiled.shape[:-1]
        for piece, grid in zip(
            tiled.split_with_sizes(self._sizes, -1), self._grids, strict=True
        ):
            down, height, across, width = grid
            tiles = piece.reshape(-1, height, width)
            if self._cosines:
                rows, columns = self._bases(grid, tiled)
                tiles = _between(rows.T, tiles, columns)
            pieces.append(
                tiles.view(*lead, down, across, height, width)
                .transpose(-3, -2)
                .reshape(*lead, -1)
            )
        return torch.cat(pieces, -1)

    def take_(self, tiled: Tensor) -> Tensor:
        """Return the bytes (..., b) that stand for the strongest entries of `tiled` (..., n), from which they go."""
        if tiled.is_meta:
            return tiled.new_empty(*tiled.shape[:-1], self.nbytes, dtype=torch.uint8)
        parts: list[Tensor] = []
        for piece, of_tiles, count in zip(
            tiled.split_with_sizes(self._sizes, -1),
            self._tiles,
            self._counts,
            strict=True,
        ):
            tiles = piece.unflatten(-1, of_tiles)
            # Of each tile, not of the model: places fit into two bytes, and no layer is
            # left out.
            places = places_of_largest(tiles.abs(), count)
            values = tiles.gather(-1, places)
            written, sent = self._written(values.flatten(-2))
            parts += written
            parts.append(places.flatten(-2).to(torch.int16).view(torch.uint8))
            tiles.scatter_(-1, places, values - sent.view_as(values))
        return torch.cat(parts, -1)

    def taken(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries (k, m) for which messages (k, b) stand, and their places (k, m) in tiled vectors."""
        if messages.is_meta:
            sent = sum(
                tiles * count
                for (tiles, _), count in zip(self._tiles, self._counts, strict=True)
            )
            shape = (len(messages), sent)
            return messages.new_empty(shape, dtype=self._dtype), messages.new_empty(
                shape, dtype=torch.int64
            )
        values: list[Tensor] = []
        places: list[Tensor] = []
        at = begin = 0
        for (tiles, entries), count in zip(self._tiles, self._counts, strict=True):
            of_tiles, at = self._read(messages, at, tiles * count)
            values.append(of_tiles)
            end = at + _PLACE_BYTES * tiles * count
            in_tile = _piece(messages, at, end).view(torch.int16).to(torch.int64)
            first = torch.arange(
                begin, begin + tiles * entries, entries, device=messages.device
            )
            places.append(in_tile + first.repeat_interleave(count))
            at, begin = end, begin + tiles * entries
        return torch.cat(values, -1), torch.cat(places, -1)

    def _bases(
        self, grid: tuple[int, int, int, int], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, height, _, width = grid
        return cosines(height, like.dtype, like.device), cosines(
            width, like.dtype, like.device
        )

    def _written(self, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the bytes of a parameter's entries (..., m), and the entries for which they stand."""
        if self._bits == 32:
            return [values.view(torch.uint8)], values
        codes, table = by_bins(values, self._bits)
        written = [table.view(torch.uint8), packed_codes(codes, self._bits)]
        return written, table.to(self._dtype).gather(-1, codes.to(torch.int64))

    def _read(self, messages: Tensor, at: int, n: int) -> tuple[Tensor, int]:
        """Return `n` entries (..., n) that begin at byte `at` of messages (..., b), and where they end."""
        if self._bits == 32:
            end = at + n * self._dtype.itemsize
            return _piece(messages, at, end).view(self._dtype), end
        begin = at + _TABLE_ENTRY_BYTES * 2**self._bits
        end = begin + _bytes_of(n, self._bits)
        table = _piece(messages, at, begin).view(torch.float32).to(self._dtype)
        codes = unpacked_codes(messages[..., begin:end], self._bits, n)
        return table.gather(-1, codes.to(torch.int64)), end


def _between(rows: Tensor, tiles: Tensor, columns: Tensor) -> Tensor:
    """Return R t C of all tiles t (k, height, width).

    Each is a product of its own: in one of all rows last bits depend on how many there
    are, and a worker alone is to have the same.
    """
    return rows @ tiles @ columns.expand(len(tiles), *columns.shape)


def _piece(messages: Tensor, begin: int, end: int) -> Tensor:
    """Return a copy of some bytes of messages (..., b), which other dtypes can view."""
    return messages[..., begin:end].clone(memory_format=torch.contiguous_format)


def _bytes_of(n: int, bits: int) -> int:
    """Return the bytes that `n` codes fill."""
    return -(-n * bits // 8)


def _grid(shape: tuple[int, ...], side: int) -> tuple[int, int, int, int]:
    rows, columns = rows_and_columns(shape) if len(shape) > 1 else (1, math.prod(shape))
    # Divisors, as tiles do not overlap and nothing is padded.
    height, width = largest_divisor(rows, side), largest_divisor(columns, side)
    return rows // height, height, columns // width, width


def largest_divisor(n: int, most: int) -> int:
    """Return the largest divisor of `n` that is at most `most`."""
    return next(each for each in range(min(n, most), 0, -1) if n % each == 0)


@lru_cache(maxsize=64)
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal DCT-II of n numbers as a matrix: sqrt(2 / n) cos(pi (2 j + 1) k / 2 n), row 0 / sqrt 2."""
    steps = torch.arange(n, dtype=torch.float64)
    # In float64, as rounding would make the transform and its inverse drift apart.
    basis = torch.cos(math.pi / (2 * n) * steps[:, None] * (2 * steps + 1)).mul_(
        math.sqrt(2 / n)
    )
    basis[0] /= math.sqrt(2)
    return basis.to(device, dtype)
