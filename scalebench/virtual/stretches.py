"""A replica of a virtual run that takes the steps between two communications together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from scalebench.data.batch_plan import Batches
from scalebench.data.shard import equal_batches
from scalebench.strategies.base import Batch
from scalebench.training.replica import Replica
from scalebench.virtual.virtual_clock import VirtualClock


class Epoch:
    """The batches of an epoch of one replica: an iterator that also gives several at once.

    `pieces` cuts the samples of the epoch, x or y, into these batches.
    """

    def __init__(
        self,
        replica: Replica,
        epoch: int,
        cut: Batches,
        pieces: Callable[[Tensor], Sequence[Tensor]],
    ) -> None:
        self._replica, self._epoch, self._step = replica, epoch, 0
        self._cut, self._pieces = cut, pieces

    @cached_property
    def _batches(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        # not before they are asked for, as rows may move
        x, y = self._replica.samples_of(self._epoch)
        return self._pieces(x), self._pieces(y)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Batch:
        cut, step = self._cut, self._step
        x, y = self._batches
        if step == len(cut.sizes):
            raise StopIteration
        batch = Batch(x[step], y[step], cut.weights[step], step, self.begins_block)
        self._step += 1
        return self._replica.delivered(batch, len(cut.sizes))

    @property
    def begins_block(self) -> bool:
        """True if the next batch is the first of a ds-tensor block."""
        return self._step in self._cut.firsts

    def stretches(self, steps: int | None, *, by_block: bool) -> list[int]:
        """Return how many of the next `steps` batches, or of all that are left, are to be taken at once, in turn."""
        begin, end = self._step, len(self._cut.sizes)
        if steps is not None:
            end = min(begin + steps, end)
        # The optimizer is reset where a block begins, so that no stretch crosses it.
        firsts = sorted(self._cut.firsts) if by_block else []
        inside = [first for first in firsts if begin < first < end]
        return [after - before for before, after in pairwise([begin, *inside, end])]

    def take(
        self, steps: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], list[float]]:
        """Return x, y and the moments, in epochs, of the next `steps` batches."""
        x, y = self._batches
        total, begin, end = len(x), self._step, self._step + steps
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
        cut = self.plan.batches(epoch, self.rank)
        return Epoch(self, epoch, cut, lambda each: torch.split(each, cut.sizes))

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        slices, firsts = equal_batches(
            self.plan.block_starts(epoch, self.rank),
            int(self.plan.shard_sizes(epoch)[self.rank]),
            self.plan.batch_size,
        )
        sizes = [high - low for low, high in slices]
        cut = Batches(sizes, [1.0] * len(sizes), frozenset(firsts))
        return Epoch(
            self, epoch, cut, lambda each: [each[low:high] for low, high in slices]
        )

    def local_steps(
        self,
        batches: Iterator[Batch],
        steps: int | None = None,
        *,
        reset_per_block: bool = False,
    ) -> None:
        if not isinstance(batches, Epoch):
            super().local_steps(batches, steps, reset_per_block=reset_per_block)
            return
        for count in batches.stretches(steps, by_block=reset_per_block):
            if reset_per_block and batches.begins_block:
                self.reset_optimizer()
            x, y, moments = batches.take(count)
            # Charged first: steps that are computed with those of others end a sleep.
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
