"""The strongest entries of each tile of a model's parameters, as messages: what SparseLoCo and DeMo send."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from scalebench.strategies.compression import rows_and_columns
from scalebench.strategies.few_bits import by_bins, packed_codes, unpacked_codes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST = 181  # side of a tile whose places fit into 16 bits with a sign
_PLACE_BYTES = 2  # int16
_TABLE_ENTRY_BYTES = 4  # float32


class StrongestOfTiles:
    """Messages of the `count(entries)` entries of each tile that are largest in magnitude.

    A parameter of `shapes` is a matrix, its first axis by all others, or a vector; a tile of it has as sides the
    largest divisors of the matrix's that are at most `side`. With `cosines` the entries are those of the tile's
    orthonormal discrete cosine transform (DCT-II) instead. In a message entries have `bits` and their places in the
    tile 16; below 32 bits a table of `by_bins` stands before those of each parameter.

    Of tensors without values, as recordings have them, results have the sizes alone: torch takes a millisecond in
    Python for each of hundreds of small operations on such tensors.
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
        self._grids = [_grid(shape, side) for shape in shapes]  # (rows of tiles, height, columns of tiles, width)
        self._tiles = [(down * across, height * width) for down, height, across, width in self._grids]
        self._counts = [min(entries, max(1, count(entries))) for _, entries in self._tiles]
        self._bits, self._cosines, self._dtype = bits, cosines, like.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes of a message."""
        sent = [tiles * count for (tiles, _), count in zip(self._tiles, self._counts, strict=True)]
        if self._bits == 32:
            return sum((self._dtype.itemsize + _PLACE_BYTES) * n for n in sent)
        return sum(_TABLE_ENTRY_BYTES * 2**self._bits + _bytes_of(n, self._bits) + _PLACE_BYTES * n for n in sent)

    def message(self, vector: Tensor) -> Tensor:
        """Return the bytes (b,) that stand for `vector` (n,)."""
        import torch

        if vector.is_meta:
            return vector.new_empty(self.nbytes, dtype=torch.uint8)
        parts: list[Tensor] = []
        for tiles, count in zip(self.tiles_of(vector), self._counts, strict=True):
            places = tiles.abs().topk(count, dim=1, sorted=False).indices
            parts += self._written(tiles.gather(1, places).view(-1))
            parts.append(places.view(-1).to(torch.int16).view(torch.uint8))
        return torch.cat(parts)

    def tiles_in(self, message: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the entries of a message in their tiles (tiles, entries) of each parameter, and 1 where one is."""
        import torch

        found, at = [], 0
        for (tiles, entries), count in zip(self._tiles, self._counts, strict=True):
            values, at = self._read(message, at, tiles * count)
            end = at + _PLACE_BYTES * tiles * count
            places = message[at:end].clone().view(torch.int16).to(torch.int64).view(tiles, count)
            at = end
            filled = values.new_zeros(tiles, entries)
            sent = filled.scatter(1, places, 1.0)
            found.append((filled.scatter(1, places, values.view(tiles, count)), sent))
        return found

    def vector_of(self, message: Tensor) -> Tensor:
        """Return the vector (n,) for which a message stands."""
        if message.is_meta:
            return message.new_empty(sum(self._sizes), dtype=self._dtype)
        return self.vector([entries for entries, _ in self.tiles_in(message)])

    def tiles_of(self, vector: Tensor) -> list[Tensor]:
        """Return the tiles (tiles, entries) of each parameter."""
        cut = []
        for piece, grid in zip(vector.split_with_sizes(self._sizes), self._grids, strict=True):
            down, height, across, width = grid
            tiles = piece.view(down, height, across, width).transpose(1, 2).reshape(-1, height, width)
            if self._cosines:
                rows, columns = self._bases(grid, vector)
                tiles = rows @ tiles @ columns.T
            cut.append(tiles.reshape(-1, height * width))
        return cut

    def vector(self, cut: Sequence[Tensor]) -> Tensor:
        """Return the vector (n,) that has these tiles."""
        import torch

        pieces = []
        for entries, grid in zip(cut, self._grids, strict=True):
            down, height, across, width = grid
            tiles = entries.view(-1, height, width)
            if self._cosines:
                rows, columns = self._bases(grid, entries)
                tiles = rows.T @ tiles @ columns
            pieces.append(tiles.view(down, across, height, width).transpose(1, 2).reshape(-1))
        return torch.cat(pieces)

    def _bases(self, grid: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        _, height, _, width = grid
        return cosines(height, like.dtype, like.device), cosines(width, like.dtype, like.device)

    def _written(self, values: Tensor) -> list[Tensor]:
        """Return the bytes of a parameter's entries."""
        import torch

        if self._bits == 32:
            return [values.view(torch.uint8)]
        codes, table = by_bins(values, self._bits)
        return [table.view(torch.uint8), packed_codes(codes, self._bits)]

    def _read(self, message: Tensor, at: int, n: int) -> tuple[Tensor, int]:
        """Return `n` entries that begin at byte `at` of a message, and where they end."""
        import torch

        if self._bits == 32:
            end = at + n * self._dtype.itemsize
            return message[at:end].clone().view(self._dtype), end
        begin = at + _TABLE_ENTRY_BYTES * 2**self._bits
        end = begin + _bytes_of(n, self._bits)
        table = message[at:begin].clone().view(torch.float32).to(self._dtype)
        return table.index_select(0, unpacked_codes(message[begin:end], self._bits, n).int()), end


def _bytes_of(n: int, bits: int) -> int:
    """Return the bytes that `n` codes fill."""
    return -(-n * bits // 8)


def _grid(shape: tuple[int, ...], side: int) -> tuple[int, int, int, int]:
    rows, columns = rows_and_columns(shape) if len(shape) > 1 else (1, math.prod(shape))
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
    basis = torch.cos(math.pi / (2 * n) * steps[:, None] * (2 * steps + 1)).mul_(math.sqrt(2 / n))
    basis[0] /= math.sqrt(2)
    return basis.to(device, dtype)
