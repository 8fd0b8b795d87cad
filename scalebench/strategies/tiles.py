"""The strongest entries of each tile of a model's parameters, as messages: what SparseLoCo and DeMo send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from scalebench.strategies.compression import places_of_largest, rows_and_columns
from scalebench.strategies.few_bits import by_bins, packed_codes, unpacked_codes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST = 181  # side of a tile whose places fit into 16 bits with a sign
_PLACE_BYTES = 2  # int16
_TABLE_ENTRY_BYTES = 4  # float32
_FEW = 8  # rows of a product
_CACHED = 2**22  # bytes of vectors that are worked on at once


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

    def encode(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes (..., b) that stand for `vectors` (..., n), and the vectors for which they stand."""
        import torch

        lead = vectors.shape[:-1]
        if vectors.is_meta:
            messages = vectors.new_empty(*lead, self.nbytes, dtype=torch.uint8)
            return messages, vectors
        parts: list[Tensor] = []
        sent: list[Tensor] = []
        for tiles, count in zip(self.tiles_of(vectors), self._counts, strict=True):
            # Of each tile, not of the model: places fit into two bytes, and no layer is
            # left out.
            places = places_of_largest(tiles.abs(), count)
            written, values = self._written(tiles.gather(-1, places).flatten(-2))
            parts += written
            parts.append(places.flatten(-2).to(torch.int16).view(torch.uint8))
            sent.append(
                torch.zeros_like(tiles).scatter_(-1, places, values.view_as(places))
            )
        return torch.cat(parts, -1), self.vector(sent)

    def tiles_in(self, messages: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the entries of messages (..., b) in their tiles (..., tiles, entries) of each parameter, and places.

        The places (..., tiles, k) in a tile are those of the entries that were sent.
        """
        import torch

        found, at, lead = [], 0, messages.shape[:-1]
        for (tiles, entries), count in zip(self._tiles, self._counts, strict=True):
            values, at = self._read(messages, at, tiles * count)
            end = at + _PLACE_BYTES * tiles * count
            places = (
                _piece(messages, at, end)
                .view(torch.int16)
                .to(torch.int64)
                .view(*lead, tiles, count)
            )
            at = end
            filled = values.new_zeros(*lead, tiles, entries).scatter_(
                -1, places, values.view_as(places)
            )
            found.append((filled, places))
        return found

    def vector_of(self, messages: Tensor) -> Tensor:
        """Return the vectors (..., n) for which messages (..., b) stand."""
        if messages.is_meta:
            return messages.new_empty(
                *messages.shape[:-1], sum(self._sizes), dtype=self._dtype
            )
        return self.vector([entries for entries, _ in self.tiles_in(messages)])

    def stacks(self, messages: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield messages (b,) several at a time, (k, b), so that their vectors stay in a cache."""
        import torch

        at_once = max(1, _CACHED // (sum(self._sizes) * self._dtype.itemsize))
        for begin in range(0, len(messages), at_once):
            yield torch.stack(tuple(messages[begin : begin + at_once]))

    def tiles_of(self, vectors: Tensor) -> list[Tensor]:
        """Return the tiles (..., tiles, entries) of each parameter in vectors (..., n)."""
        cut, lead = [], vectors.shape[:-1]
        for pieces, grid in zip(
            vectors.split_with_sizes(self._sizes, -1), self._grids, strict=True
        ):
            down, height, across, width = grid
            tiles = (
                pieces.unflatten(-1, grid)
                .transpose(-3, -2)
                .reshape(-1, down * across, height, width)
            )
            if self._cosines:
                rows, columns = self._bases(grid, vectors)
                tiles = _between(rows, tiles, columns.T)
            cut.append(tiles.reshape(*lead, down * across, height * width))
        return cut

    def vector(self, cut: Sequence[Tensor]) -> Tensor:
        """Return the vectors (..., n) that have these tiles (..., tiles, entries) of each parameter."""
        import torch

        pieces = []
        for entries, grid in zip(cut, self._grids, strict=True):
            down, height, across, width = grid
            lead = entries.shape[:-2]
            tiles = entries.view(-1, down * across, height, width)
            if self._cosines:
                rows, columns = self._bases(grid, entries)
                tiles = _between(rows.T, tiles, columns)
            pieces.append(
                tiles.view(*lead, down, across, height, width)
                .transpose(-3, -2)
                .reshape(*lead, -1)
            )
        return torch.cat(pieces, -1)

    def _bases(
        self, grid: tuple[int, int, int, int], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        _, height, _, width = grid
        return cosines(height, like.dtype, like.device), cosines(
            width, like.dtype, like.device
        )

    def _written(self, values: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the bytes of a parameter's entries (..., m), and the entries for which they stand."""
        import torch

        if self._bits == 32:
            return [values.view(torch.uint8)], values
        codes, table = by_bins(values, self._bits)
        written = [table.view(torch.uint8), packed_codes(codes, self._bits)]
        return written, table.to(self._dtype).gather(-1, codes.to(torch.int64))

    def _read(self, messages: Tensor, at: int, n: int) -> tuple[Tensor, int]:
        """Return `n` entries (..., n) that begin at byte `at` of messages (..., b), and where they end."""
        import torch

        if self._bits == 32:
            end = at + n * self._dtype.itemsize
            return _piece(messages, at, end).view(self._dtype), end
        begin = at + _TABLE_ENTRY_BYTES * 2**self._bits
        end = begin + _bytes_of(n, self._bits)
        table = _piece(messages, at, begin).view(torch.float32).to(self._dtype)
        codes = unpacked_codes(messages[..., begin:end], self._bits, n)
        return table.gather(-1, codes.to(torch.int64)), end


def _between(rows: Tensor, tiles: Tensor, columns: Tensor) -> Tensor:
    """Return R t C of all tiles t (k, tiles, height, width) of k vectors.

    Last bits of a product of few rows depend on how many there are: those are computed
    for each vector by itself, so that a worker alone has the same.
    """
    import torch

    _, count, height, width = tiles.shape
    if count * min(height, width) < _FEW:
        return torch.stack([rows @ each @ columns for each in tiles.unbind()])
    return (rows @ tiles.flatten(0, 1) @ columns).view_as(tiles)


def _piece(messages: Tensor, begin: int, end: int) -> Tensor:
    """Return a copy of some bytes of messages (..., b), which other dtypes can view."""
    import torch

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
    import torch

    steps = torch.arange(n, dtype=torch.float64)
    # In float64, as rounding would make the transform and its inverse drift apart.
    basis = torch.cos(math.pi / (2 * n) * steps[:, None] * (2 * steps + 1)).mul_(
        math.sqrt(2 / n)
    )
    basis[0] /= math.sqrt(2)
    return basis.to(device, dtype)
