"""A replica of a virtual run that takes the steps between two communications together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from scalebench.strategies.base import Batch
from scalebench.training.replica import Replica
from scalebench.virtual.virtual_clock import VirtualClock


class Epoch:
    """The batches of an epoch of one replica: an iterator that also gives several at once."""

    def __init__(self, replica: Replica, epoch: int) -> None:
        self._replica, self._epoch, self._step = replica, epoch, 0
        self._cut = replica.plan.batches(epoch, replica.rank)

    @cached_property
    def _batches(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        x, y = self._replica.samples_of(
            self._epoch
        )  # not before they are asked for, as rows may move
        return torch.split(x, self._cut.sizes), torch.split(y, self._cut.sizes)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Batch:
        cut, step = self._cut, self._step
        x, y = self._batches
        if step == len(cut.sizes):
            raise StopIteration
        self._step += 1
        batch = Batch(x[step], y[step], cut.weights[step], step, step in cut.firsts)
        return self._replica.delivered(batch, len(cut.sizes))

    def take(
        self, steps: int | None
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], list[float]]:
        """Return x, y and the moments, in epochs, of the next `steps` batches, or of all that are left."""
        x, y = self._batches
        total = len(x)
        begin, end = (
            self._step,
            total if steps is None else min(self._step + steps, total),
        )
        self._step = end
        return (
            x[begin:end],
            y[begin:end],
            [self._epoch + step / total for step in range(begin, end)],
        )


class StretchingReplica(Replica):
    """A replica that charges its clock for a stretch of local steps at once, and then computes them."""

    clock: VirtualClock

    def batches(self, epoch: int) -> Iterator[Batch]:
        return Epoch(self, epoch)

    def local_steps(self, batches: Iterator[Batch], steps: int | None = None) -> None:
        if not isinstance(batches, Epoch):
            super().local_steps(batches, steps)
            return
        x, y, moments = batches.take(steps)
        if x:
            self.clock.took_steps([each.shape[0] for each in x])
            self.take_steps(x, y, [self._rate_at(moment) for moment in moments])

    def take_steps(
        self, x: Sequence[Tensor], y: Sequence[Tensor], rates: Sequence[float]
    ) -> None:
        """Compute a step of each of `rates` on the batches (x, y), in turn."""
        raise NotImplementedError

    def _rate_at(self, moment: float) -> float:
        self._moment = moment
        rate = self.settle_rate()
        self.steps += 1
        return rate
