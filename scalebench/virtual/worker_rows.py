"""Rows of matrices with the weights, gradients, momenta and buffers of workers: copies, and optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from scalebench.training.torch_optimizers import FlatSgd


class Rows(NamedTuple):
    """Weights, gradients and momenta of some workers as rows, (k, n) each; momenta may have no columns."""

    weights: Tensor
    gradients: Tensor
    momenta: Tensor

    def first(self, count: int) -> Rows:
        return Rows(*(matrix[:count] for matrix in self))

    def between(self, first: int, end: int) -> Rows:
        return Rows(*(matrix[first:end] for matrix in self))


class BufferRows:
    """Each buffer of K replicas as rows (K, n), and copies of some rows to compute with.

    Statistics lie beside the weights, in the first columns of `room` (K, ...). Copies
    are contiguous, as operations of vmap change nothing else where it lies.
    """

    def __init__(self, initial: list[Tensor], room: Tensor, at_once: int) -> None:
        self.initial = initial
        self._rows: list[Tensor] = []
        self._copies: list[Tensor] = []
        for buffer in initial:
            values = buffer.reshape(1, -1)
            self._copies.append(values.repeat(at_once, 1))
            if buffer.is_floating_point():
                here, room = room.tensor_split([buffer.numel()], dim=1)
                self._rows.append(here.copy_(values))
            else:
                self._rows.append(values.repeat(len(room), 1))

    def of(self, rank: int) -> list[Tensor]:
        """Return the buffers of a worker, in the order of the model."""
        return [
            rows[rank].view(buffer.shape)
            for rows, buffer in zip(self._rows, self.initial, strict=True)
        ]

    def copies(self, count: int) -> list[Tensor]:
        """Return the first copies (count, ...) of each buffer."""
        return [
            rows[:count].view(count, *buffer.shape)
            for rows, buffer in zip(self._copies, self.initial, strict=True)
        ]

    def fetch(self, places: Sequence[int]) -> None:
        """Copy the rows in `places`, to compute with them."""
        for rows, copies in zip(self._rows, self._copies, strict=True):
            fetch_rows(rows, places, copies)

    def put_back(self, places: Sequence[int]) -> None:
        for rows, copies in zip(self._rows, self._copies, strict=True):
            put_rows(copies[: len(places)], rows, places)

    @contextmanager
    def kept(self, first: int, end: int) -> Iterator[None]:
        """Put back the copies from `first` to `end`, with which a call computes in vain."""
        behind = [copies[first:end] for copies in self._copies] if end > first else []
        before = [each.clone() for each in behind]
        yield
        for each, values in zip(behind, before, strict=True):
            each.copy_(values)


def matrix_views(parameters: Sequence[Tensor], matrix: Tensor) -> list[Tensor]:
    """Return consecutive views (k, *shape) of the columns of `matrix`."""
    found, begin, rows = [], 0, matrix.shape[0]
    for parameter in parameters:
        end = begin + parameter.numel()
        found.append(matrix[:, begin:end].view(rows, *parameter.shape))
        begin = end
    return found


def step_rows(optimizer: FlatSgd, rates: Sequence[float], rows: Rows) -> None:
    """Take a step of each row, as `optimizer` would."""
    (change,) = _changes(optimizer, *([matrix] for matrix in rows))
    if len(set(rates)) == 1:
        rows.weights.add_(change, alpha=-rates[0])
    else:
        rows.weights.addcmul_(change, change.new_tensor(rates)[:, None], value=-1)


def take_row_steps(
    optimizer: FlatSgd, rates: Sequence[float], rows: Rows, places: Sequence[int]
) -> None:
    """Take a step of the rows in `places`, where they lie: to copy them there and back takes longer."""
    if are_adjacent(places):
        step_rows(optimizer, rates, rows.between(places[0], places[-1] + 1))
        return
    weights, gradients, momenta = (
        [matrix[place] for place in places] for matrix in rows
    )
    changes = _changes(optimizer, weights, gradients, momenta)
    for row, change, rate in zip(weights, changes, rates, strict=True):
        row.add_(change, alpha=-rate)


def _changes(
    optimizer: FlatSgd,
    weights: list[Tensor],
    changes: list[Tensor],
    momenta: list[Tensor],
) -> list[Tensor]:
    """Return what a step takes of each of `weights`, by its gradient in `changes`; momenta go on where they lie."""
    (options,) = optimizer.param_groups
    if options["weight_decay"]:
        changes = list(
            torch._foreach_add(changes, weights, alpha=options["weight_decay"])
        )
    if not options["momentum"]:
        return changes
    torch._foreach_mul_(momenta, options["momentum"])
    torch._foreach_add_(momenta, changes)
    if not options["nesterov"]:
        return momenta
    return list(torch._foreach_add(changes, momenta, alpha=options["momentum"]))


def are_adjacent(places: Sequence[int]) -> bool:
    return list(places) == list(range(places[0], places[0] + len(places)))


def fetch_rows(matrix: Tensor, places: Sequence[int], to: Tensor) -> None:
    """Copy the rows in `places` to the first ones of `to`."""
    count = len(places)
    if are_adjacent(places):
        to[:count].copy_(matrix[places[0] : places[0] + count])
    else:
        torch.index_select(matrix, 0, torch.tensor(places), out=to[:count])


def put_rows(rows: Tensor, matrix: Tensor, places: Sequence[int]) -> None:
    """Copy the first rows to the rows of `matrix` in `places`."""
    count = len(places)
    if are_adjacent(places):
        matrix[places[0] : places[0] + count].copy_(rows[:count])
    else:
        # Row by row: torch's index_copy_ takes longer than as many copies.
        torch._foreach_copy_([matrix[place] for place in places], rows[:count].unbind())
