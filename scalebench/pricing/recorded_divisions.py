"""What recorded workers hold of a model (all, a part, shares of layers, or shards), and the events of its steps.

As `training.division`, on tensors without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from scalebench.models.parts import LayerFacts
from scalebench.pricing.schedule import Kept, PartMemory
from scalebench.strategies.base import Batch, UnitRule
from scalebench.system.clock import Clock, Task
from scalebench.training.components import Passes
from scalebench.training.sharded import shard_length
from scalebench.training.stage import Stage


class RecordedDivision:
    """A model of which each worker holds all; derived classes are those of which it holds less."""

    share = 1.0  # of the model's parameters: those that this worker updates
    shares_layers = False  # with other workers, each of which has a share of a layer
    loss_is_elsewhere = False  # after a step: another worker has it

    def step(self, batch: Batch, weight: float, clock: Clock) -> None:
        """Write both passes of a batch, with what is exchanged between them."""
        samples = batch.x.shape[0]
        clock.did(Task.FORWARD, samples)
        clock.did(Task.BACKWARD, samples)

    def memory(self) -> PartMemory | None:
        """Return what this worker keeps of the model; None where it keeps all."""
        return None

    def gathered(self) -> list[Tensor]:
        """Return what a worker holds whole at the same time, beside its shards."""
        return []


class RecordedPart(RecordedDivision):
    """A part of a replica of several workers; `held` are its parameters, `kept` its elements of each chunk."""

    def __init__(
        self,
        stage: Stage,
        held: int,
        share: float,
        kept: tuple[Kept, ...] | None,
        *,
        shares_layers: bool,
        loss_is_elsewhere: bool,
    ) -> None:
        self._stage, self._held, self._kept = stage, held, kept
        self.share = share
        self.shares_layers = shares_layers
        self.loss_is_elsewhere = loss_is_elsewhere

    def memory(self) -> PartMemory:
        stage, held = self._stage, self._held
        return PartMemory(
            stage.chunks[0].facts,
            held,
            held,
            held,
            tuple(stage.kept),
            stage.largest_piece,
            self._kept,
        )

    def step(self, batch: Batch, weight: float, clock: Clock) -> None:
        self._stage.step(batch, weight, clock)


class RecordedLayout(RecordedDivision):
    """Shares of layers among groups of workers; `rows` are the samples in the batch of each worker in a step."""

    shares_layers = True

    def __init__(
        self,
        passes: Passes,
        parameters: Tensor,
        share: float,
        rows: Callable[[int], list[int]],
    ) -> None:
        self._passes, self._parameters, self._rows = passes, parameters, rows
        self.share = share

    def memory(self) -> PartMemory:
        held = self._parameters.numel()
        return PartMemory(None, held, held, held, (), 0, None)

    def step(self, batch: Batch, weight: float, clock: Clock) -> None:
        x = self._parameters.new_empty((len(batch.x), *self._passes.takes))
        self._passes.step(
            x,
            batch.y,
            weight,
            self._rows(batch.step),
            lambda outputs, *_: (outputs, outputs),
            clock,
        )


class RecordedUnit:
    """Implements `strategies.base.Unit` without values."""

    def __init__(
        self, numbers: int, workers: int, like: Tensor, *, is_last: bool
    ) -> None:
        length = shard_length(numbers, workers)
        self.is_last = is_last
        self.own = like.new_empty(length)
        self.own_gradients = self.own.clone()
        self.whole = like.new_empty(length * workers)
        self.gradients = self.whole.clone()
        self.holds, self.holds_gradients = True, True  # after a step

    def fill(self, shards: Sequence[Tensor]) -> None:
        self.holds = True

    def release(self) -> None:
        self.holds = False

    def release_gradients(self) -> None:
        self.holds_gradients = False


class RecordedShards(RecordedDivision):
    """Shards of the units of a model, and the exchanges of a step."""

    shares_layers = True

    def __init__(
        self, facts: Sequence[LayerFacts], rule: UnitRule, workers: int, like: Tensor
    ) -> None:
        self._rule, last = rule, len(facts) - 1
        self._units = [
            RecordedUnit(each.parameters, workers, like, is_last=place == last)
            for place, each in enumerate(facts)
        ]
        forward, backward = (
            sum(each.forward for each in facts),
            sum(each.backward for each in facts),
        )
        self._works = [
            (each.forward / forward, each.backward / backward) for each in facts
        ]
        self.parameters = like.new_empty(sum(unit.own.numel() for unit in self._units))
        self.share = self.parameters.numel() / like.numel()

    def memory(self) -> PartMemory:
        held = self.parameters.numel()
        parameters, gradients = (
            sum(map(Tensor.numel, vectors))
            for vectors in (self._whole(), self._gradients())
        )
        return PartMemory(None, held + parameters, held + gradients, held, (), 0, None)

    def step(self, batch: Batch, weight: float, clock: Clock) -> None:
        rule, samples = self._rule, batch.x.shape[0]
        for unit, (work, _) in zip(self._units, self._works, strict=True):
            rule.before_forward(unit)
            clock.did(Task.FORWARD, samples, work)
            rule.after_forward(unit)
        for unit, (_, work) in zip(
            reversed(self._units), reversed(self._works), strict=True
        ):
            rule.before_backward(unit)
            clock.did(Task.BACKWARD, samples, work)
            rule.after_backward(unit)

    def gathered(self) -> list[Tensor]:
        return [*self._whole(), *self._gradients()]

    def _whole(self) -> list[Tensor]:
        return _held_at_once([(unit.whole, unit.holds) for unit in self._units])

    def _gradients(self) -> list[Tensor]:
        return _held_at_once(
            [(unit.gradients, unit.holds_gradients) for unit in self._units]
        )


def _held_at_once(vectors: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
    """Return the vectors that stay, and the largest of those that are given up between their uses."""
    passing = [vector for vector, stays in vectors if not stays]
    return [vector for vector, stays in vectors if stays] + sorted(
        passing, key=Tensor.numel
    )[-1:]
