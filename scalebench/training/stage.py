"""One worker's part of a step: micro-batches through its stage, with messages to the stages before and after it.

The same program trains (`StageArithmetic`) and is recorded without arithmetic (`StageShapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from scalebench.comm.base import Communicator, Request
from scalebench.comm.mesh import Mesh
from scalebench.data.layout import cut
from scalebench.models.parts import LayerFacts, bounds_of
from scalebench.strategies.base import Batch, Move
from scalebench.system.clock import Clock, Task

Order = Callable[[int, int, int], Iterable[Move]]


@dataclass(frozen=True)
class StageFacts:
    """A stage of a pipeline: its layers `first` to `last` (exclusive), and its shares of the model's work.

    `takes` and `gives` are the shapes of one sample at its ends.
    """

    stage: int
    stages: int
    first: int
    last: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    forward: float
    backward: float
    update: float

    @classmethod
    def of(
        cls, facts: Sequence[LayerFacts], input_shape: tuple[int, ...], sizes: Sequence[int], stage: int
    ) -> StageFacts:
        """Return the stage that is the `stage`-th of stages with `sizes` layers."""
        first, last = bounds_of(sizes)[stage]
        takes = facts[first - 1].shape if first else input_shape

        def share(name: str) -> float:
            amounts: list[float] = [getattr(each, name) for each in facts]
            return sum(amounts[first:last]) / sum(amounts)

        shares = share("forward"), share("backward"), share("parameters")
        return cls(stage, len(sizes), first, last, takes, facts[last - 1].shape, *shares)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


class StageCompute(Protocol):
    """Forward and backward passes of a stage by micro-batch."""

    def forward(self, place: int, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """Return the output for micro-batch `place`: on the last stage its mean loss, whose gradient is scaled."""

    def backward(self, place: int, gradient: Tensor | None) -> Tensor:
        """Add to the parameters' gradients; return that of the input."""


class Stage:
    """The stage that this worker holds, and its channels to the neighbouring ones.

    Activations and gradients travel on communicators of their own: messages of one kind then never wait for the other,
    also where an engine carries those between two ranks one after the other (NCCL).
    """

    def __init__(
        self,
        facts: StageFacts,
        order: Order,
        micro_batches: int,
        replica: Communicator,
        mesh: Mesh,
        compute: StageCompute,
        like: Tensor,
    ) -> None:
        self.facts, self._order, self._micro_batches = facts, order, micro_batches
        self._compute, self._like = compute, like
        self._activations = replica.split(lambda rank: rank * 0)
        self._gradients = replica.split(lambda rank: rank * 0)
        self._before, self._after = replica.rank - mesh.tensor, replica.rank + mesh.tensor

    def step(self, batch: Batch, weight: float, clock: Clock) -> Tensor | None:
        """Compute the gradient of weight * mean loss of `batch`; return the mean loss () on the last stage.

        A batch with fewer samples than micro-batches is cut into its samples.
        """
        facts, samples = self.facts, len(batch.x)
        sizes = cut(samples, min(self._micro_batches, samples)).tolist()
        inputs, targets = torch.split(batch.x, sizes), torch.split(batch.y, sizes)
        sent: list[Request] = []
        total: Tensor | None = None
        for move in self._order(facts.stage, facts.stages, len(sizes)):
            place, size = move.micro_batch, sizes[move.micro_batch]
            if move.forward:
                x = inputs[place] if facts.is_first else self._receive(self._activations, self._before, size)
                made = self._compute.forward(place, x, targets[place], weight * (size / samples))
                clock.did(Task.FORWARD, size, facts.forward)
                if facts.is_last:
                    loss = made.detach() * (size / samples)
                    total = loss if total is None else total + loss
                else:
                    sent.append(self._activations.isend(made.detach().contiguous(), self._after))
            else:
                gradient = None if facts.is_last else self._receive(self._gradients, self._after, size)
                back = self._compute.backward(place, gradient)
                clock.did(Task.BACKWARD, size, facts.backward)
                if not facts.is_first:
                    sent.append(self._gradients.isend(back.contiguous(), self._before))
        for request in sent:
            request.wait()
        return total

    def _receive(self, comm: Communicator, source: int, samples: int) -> Tensor:
        shape = self.facts.takes if source == self._before else self.facts.gives
        tensor = self._like.new_empty((samples, *shape))
        comm.recv_(tensor, source)
        return tensor


class StageArithmetic:
    """Implements `StageCompute` by torch's autograd, which ends at the borders of the stage."""

    def __init__(self, facts: StageFacts, module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._facts, self._module, self._loss = facts, module, loss
        self._kept: dict[int, tuple[Tensor, Tensor, float]] = {}  # input, output and scale, until the backward pass

    def forward(self, place: int, x: Tensor, y: Tensor, scale: float) -> Tensor:
        if not self._facts.is_first:
            x.requires_grad_()
        made: Tensor = self._module(x)
        if self._facts.is_last:
            made = self._loss(made, y)
        self._kept[place] = x, made, scale
        return made

    def backward(self, place: int, gradient: Tensor | None) -> Tensor:
        x, made, scale = self._kept.pop(place)
        if gradient is None:
            gradient = torch.tensor(scale, dtype=made.dtype, device=made.device)
        run_backward(made, gradient)
        return x if x.grad is None else x.grad


class StageShapes:
    """Implements `StageCompute` without arithmetic: outputs have only their shapes."""

    def __init__(self, facts: StageFacts, like: Tensor) -> None:
        self._facts, self._like = facts, like
        self._samples: dict[int, int] = {}  # of each micro-batch

    def forward(self, place: int, x: Tensor, y: Tensor, scale: float) -> Tensor:
        self._samples[place] = len(x)
        shape = () if self._facts.is_last else (len(x), *self._facts.gives)
        return self._like.new_empty(shape)

    def backward(self, place: int, gradient: Tensor | None) -> Tensor:
        return self._like.new_empty((self._samples[place], *self._facts.takes))


def run_backward(made: Tensor, gradient: Tensor) -> None:
    """Compute `made.backward(gradient)` without its checks.

    They load half of torch's compiler (0.5 s) and take a tenth of a small model's backward pass.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((made,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
