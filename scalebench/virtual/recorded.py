"""A replica that repeats the operations of its gradient, which are recorded once for each shape of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from scalebench.models.flat import views
from scalebench.strategies.base import Batch
from scalebench.strategies.replica_state import model_buffers
from scalebench.system.clock import Task
from scalebench.training.replica import Replica
from scalebench.virtual.stretches import StretchingReplica
from scalebench.virtual.tape import Results, gradients_of, record, write


class RecordedReplica(StretchingReplica):
    """Computes the gradients of `Replica`, bit for bit, in half of a small model's time.

    The model's operations must not depend on values, nor change anything but what they
    return, and buffers where they lie.
    """

    # The replica that records for others, which have few steps each: its operations are
    # repeated on copies of their weights.
    original: Replica | None = None

    @cached_property
    def targets(self) -> list[Tensor]:
        """Views of the gradients, one for each trained parameter."""
        return views(_trained(self), self.gradients)

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        if not self._is_recorded:
            super().gradient(batch, weight, add=add)
            return
        samples = batch.x.shape[0]
        self.clock.did(Task.FORWARD, samples)
        with torch.no_grad():
            self._compute(batch.x, batch.y, weight, add=add)
        self.clock.did(Task.BACKWARD, samples)

    def local_steps(
        self,
        batches: Iterator[Batch],
        steps: int | None = None,
        *,
        reset_per_block: bool = False,
    ) -> None:
        if self._is_recorded:
            super().local_steps(batches, steps, reset_per_block=reset_per_block)
        else:
            Replica.local_steps(self, batches, steps, reset_per_block=reset_per_block)

    @property
    def _is_recorded(self) -> bool:
        # no part of a model, no library's wrapper of it
        return self.division.holders is None and self.forward is self.model

    def take_steps(
        self, x: Sequence[Tensor], y: Sequence[Tensor], rates: Sequence[float]
    ) -> None:
        # Once for the stretch: entering it takes as long as an operation.
        with torch.no_grad():
            for x_here, y_here, rate in zip(x, y, rates, strict=True):
                self._compute(x_here, y_here, 1.0, add=False)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()

    def _compute(self, x: Tensor, y: Tensor, weight: float, *, add: bool) -> None:
        original = self.original or self
        by_shape: dict[torch.Size, _Gradient] = vars(original).setdefault(
            "_gradients_by_shape", {}
        )
        if x.shape not in by_shape:
            by_shape[x.shape] = _Gradient(original, x, y)
        if original is self:
            loss, *found = by_shape[x.shape].of(x, y, weight)
        else:
            replicas: tuple[Replica, Replica] = self, original
            original.parameters.copy_(self.parameters)
            buffers = list(zip(*map(model_buffers, replicas), strict=True))
            for own, copy in buffers:
                copy.copy_(own)
            loss, *found = by_shape[x.shape].of(x, y, weight)
            for own, copy in buffers:
                own.copy_(copy)
        assert loss is not None
        write(found, self.targets, add=add)
        self.computed(loss, x.shape[0])


class _Gradient:
    """The gradient of weight * mean loss of batches of one shape, from a replica's parameters where they lie."""

    def __init__(self, replica: Replica, x: Tensor, y: Tensor) -> None:
        self._replica = replica
        self._batch = Batch(
            torch.empty_like(x), torch.empty_like(y), 1.0, 0, first_of_block=True
        )
        self._weight = replica.parameters.new_ones(())
        self._filled = 1.0
        self._trained = _trained(replica)
        self._repeat: Callable[[], Results] | None = None

    def of(self, x: Tensor, y: Tensor, weight: float) -> Results:
        """Return the mean loss () and the gradient by each trained parameter, None where one takes no part."""
        self._batch.x.copy_(x)
        self._batch.y.copy_(y)
        # It is 1 unless a strategy weights its batches: not written again at each step.
        if weight != self._filled:
            self._weight.fill_(weight)
            self._filled = weight
        if self._repeat is not None:
            return self._repeat()
        places = [self._batch.x, self._batch.y, self._weight, *self._trained]
        results, self._repeat = record(self._compute, places)
        return results

    def _compute(self) -> Results:
        with torch.enable_grad():
            loss = self._replica.batch_loss(self._batch)
        return (loss.detach(), *gradients_of(loss, self._weight, self._trained))


def _trained(replica: Replica) -> list[nn.Parameter]:
    return [each for each in replica.model.parameters() if each.requires_grad]
