"""Rows that change hands: what each holder sends to whom, and in which order it arrives.

Holders are the workers of a run or the ranks of a `DsTensor`. Everyone knows who holds which row before and after, so
that nobody has to be told what comes; `exchange` is the alltoallv of a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from scalebench.data.alone import Ints

Exchange = Callable[[list[Tensor]], list[Tensor]]


def moved(
    parts: Sequence[Tensor],
    rows: Ints,
    wanted: Ints,
    owners: tuple[Ints, Ints],
    holders: int,
    exchange: Exchange | None,
) -> list[Tensor]:
    """`parts`, whose rows (n_i, ...) are numbered `rows`, as they become when the rows `wanted` are to be here.

    `owners` are the holder (n,) of every row before and after. `exchange` gives tensor i to holder i and returns what
    each holder gave: once for each part if any row moves, which all holders see alike, and not at all otherwise. The
    rows of one holder go to another in ascending number. What needs no move is returned as it is, not copied.
    """
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
    """`parts`, whose rows are numbered `rows`, with the rows `wanted`, all of them among `rows`, in that order."""
    if np.array_equal(rows, wanted):
        return list(parts)
    held = np.argsort(rows, kind="stable")
    positions = held[np.searchsorted(rows, wanted, sorter=held)]
    return [pick(part, positions) for part in parts]


def fetched(part: Tensor, rows: Ints, wanted: Ints, owners: Ints, holders: int, exchange: Exchange) -> Tensor:
    """The rows `wanted`, each holder's own choice, copied from those who hold them; they may repeat.

    `rows` are the numbers of `part`'s rows, `owners` (n,) the holder of every row. Two exchanges: of the numbers asked
    for, and of the rows.
    """
    needed = np.unique(wanted)
    requests = _by_holder(needed, owners[needed], holders)
    asked = exchange([torch.from_numpy(request) for request in requests])
    replies = [reordered([part], rows, request.numpy())[0] for request in asked]
    return reordered([torch.cat(exchange(replies))], np.concatenate(requests), wanted)[0]


def pick(tensor: Tensor, positions: Ints) -> Tensor:
    """A copy of the rows at `positions`."""
    return tensor.index_select(0, torch.from_numpy(positions).to(tensor.device))


def _by_holder(values: Ints, holder: Ints, holders: int) -> list[Ints]:
    """`values` (n,) in one array for each holder, their order kept."""
    ends = np.cumsum(np.bincount(holder, minlength=holders))[:-1]
    return np.split(values[np.argsort(holder, kind="stable")], ends)
