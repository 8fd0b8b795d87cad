"""A model in components, each shared by a number of workers of its own; the same program trains and is recorded.

A component of degree t is shared by t neighbouring workers, which work on the batches of all of them: t = 1 is data
parallelism, t = K sharing among all K workers, and between lie K / t replicas of shares. Before a component its workers
gather the rows that they lack; behind it each has all rows of its group, of which its own are a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from scalebench.comm.base import Communicator
from scalebench.system.clock import Clock
from scalebench.training.stage import StageCompute, StageFacts

# From outputs of the model, targets and a weight: the mean loss (), and the gradient of weight * mean loss.
LossGradient = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Component:
    """Consecutive layers of one degree. Implements `strategies.base.SharedComponent`."""

    facts: StageFacts
    compute: StageCompute
    degree: int
    group: Communicator  # the workers that share it
    peers: Communicator  # those with the same share
    gradients: Tensor  # (n,) of this worker's share


def facts_of_component(
    whole: Sequence[tuple[int, ...]], input_shape: tuple[int, ...], sizes: Sequence[int], place: int
) -> StageFacts:
    """Return the facts of a component of layers whose outputs have the shapes `whole`; none computes the loss."""
    first = sum(sizes[:place])
    last = first + sizes[place]
    return StageFacts(place, len(sizes) + 1, first, last, whole[first - 1] if first else input_shape, whole[last - 1])


class Passes:
    """Both passes of a batch through components; `rank` of the worker among all."""

    def __init__(self, components: Sequence[Component], rank: int) -> None:
        self._components, self._rank = components, rank
        self.takes = components[0].facts.takes  # shape of one sample

    def step(
        self, x: Tensor, y: Tensor, weight: float, rows: Sequence[int], loss: LossGradient, clock: Clock
    ) -> Tensor:
        """Add up the gradients of weight * mean loss over the batches of a group; return this worker's mean loss ().

        `rows` are the samples in the batch of each of the workers.
        """
        before = None
        for component in self._components:
            x = self._moved(x, before, component, rows)
            x = component.compute.forward(0, x, y, weight, clock)
            before = component
        mean, gradient = loss(self._moved(x, before, None, rows), y, weight)
        after = None
        for component in reversed(self._components):
            gradient = self._moved(gradient, after, component, rows)
            gradient = component.compute.backward(0, gradient, clock)
            after = component
        return mean

    def _moved(self, x: Tensor, source: Component | None, target: Component | None, rows: Sequence[int]) -> Tensor:
        """Return the rows that the group of `target` works on, from those of `source`; None: of this worker alone."""
        before, after = (1 if each is None else each.degree for each in (source, target))
        if before == after:
            return x
        first = self._rank - self._rank % before
        own = x.narrow(0, sum(rows[first : self._rank]), rows[self._rank]) if before > 1 else x
        if target is None or after == 1:
            return own.contiguous()
        members = rows[self._rank - self._rank % after :][:after]
        filled = own.new_zeros((max(members), *own.shape[1:]))
        filled[: len(own)] = own
        gathered = target.group.allgather(filled)
        return torch.cat([each[:count] for each, count in zip(gathered, members, strict=True)])


def slices(vector: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return consecutive views of a vector."""
    ends = list(accumulate(lengths))
    return [vector[end - length : end] for end, length in zip(ends, lengths, strict=True)]
