"""A model in units, of whose parameters, gradients and optimizer state each worker keeps a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from scalebench.comm.base import Communicator
from scalebench.models.flat import views
from scalebench.models.parts import Layer, facts_of
from scalebench.strategies.base import Batch, UnitRule
from scalebench.system.clock import Clock, Task
from scalebench.training.division import Division, with_trained
from scalebench.training.stage import run_backward, scalar


def shard_length(parameters: int, workers: int) -> int:
    """Return the elements of a shard: equal shards, of which the last one is filled up with zeros."""
    return -(-parameters // workers)


class ShardedUnit:
    """Consecutive modules whose parameters lie in one vector. Implements `strategies.base.Unit`.

    `own` and `own_gradients` are this worker's shards of parameters and gradients. The
    memory of the whole vectors can be given up while nothing computes with them: the
    module's parameters are views of it.
    """

    def __init__(
        self, modules: Sequence[nn.Module], workers: int, *, is_last: bool
    ) -> None:
        self.modules, self.is_last = modules, is_last
        self.parameters = [
            each
            for module in modules
            for each in module.parameters()
            if each.requires_grad
        ]
        self.numbers = sum(parameter.numel() for parameter in self.parameters)
        self.length = shard_length(self.numbers, workers)
        like = self.parameters[0].detach()
        self.whole = like.new_zeros(self.length * workers)
        torch.cat(
            [parameter.detach().reshape(-1) for parameter in self.parameters],
            out=self.whole[: self.numbers],
        )
        for parameter, view in zip(
            self.parameters, views(self.parameters, self.whole), strict=True
        ):
            parameter.data = view
        self.gradients = torch.zeros_like(self.whole)
        for parameter, view in zip(
            self.parameters, views(self.parameters, self.gradients), strict=True
        ):
            parameter.grad = view
        self.own = self.own_gradients = self.whole  # until `keep`

    def keep(self, own: Tensor, own_gradients: Tensor, rank: int) -> None:
        """Keep the shard of worker `rank` in `own`, and the gradients of it in `own_gradients`."""
        own.copy_(self.whole[rank * self.length :][: self.length])
        self.own, self.own_gradients = own, own_gradients

    def fill(self, shards: Sequence[Tensor]) -> None:
        _hold(self.whole)
        torch.cat(list(shards), out=self.whole)

    def release(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def release_gradients(self) -> None:
        self.gradients.untyped_storage().resize_(0)

    def clear_gradients(self) -> None:
        """Set the gradients to zero, in memory of their own."""
        _hold(self.gradients)
        self.gradients.zero_()

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


def _hold(tensor: Tensor) -> None:
    # A storage that was given up has no bytes; its tensor keeps its shape.
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.nbytes)


class ShardedModel(Division):
    """The units of a model, and the gradient through them with a rule's exchanges between.

    No exchange happens inside autograd, so that virtual workers can wait there.
    `parameters` and `gradients` are this worker's shards of all units, one after the
    other.
    """

    shares_layers = True

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer] | None,
        rule: UnitRule,
        comm: Communicator,
        sample: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Divide `model`; without `layers` it is one unit, whose loss is computed by `step`'s caller."""
        self.holders = self._comm = comm
        self._model = model
        self._rule = rule
        self._loss = loss
        self._whole_model = layers is None
        parts = (
            [[model]] if layers is None else [list(layer.modules) for layer in layers]
        )
        works = [(1.0, 1.0)]
        if layers is not None:
            facts = facts_of(layers, sample)
            forward = sum(each.forward for each in facts)
            backward = sum(each.backward for each in facts)
            works = [
                (each.forward / forward, each.backward / backward) for each in facts
            ]
        self._works = works
        self.units = [
            ShardedUnit(modules, comm.size, is_last=modules is parts[-1])
            for modules in parts
        ]
        lengths = [unit.length for unit in self.units]
        self.parameters = self.units[0].whole.new_zeros(sum(lengths))
        self.gradients = torch.zeros_like(self.parameters)
        # Shards of all units in one vector, so that strategy and optimizer see one
        # tensor.
        pieces = zip(
            torch.split(self.parameters, lengths),
            torch.split(self.gradients, lengths),
            strict=True,
        )
        for unit, (own, own_gradients) in zip(self.units, pieces, strict=True):
            unit.keep(own, own_gradients, comm.rank)
        for buffer in model.buffers():
            # it may lie in one storage with parameters, which ends
            buffer.data = buffer.detach().clone()
        whole = sum(each.numel() for each in model.parameters() if each.requires_grad)
        self.share = self.parameters.numel() / whole

    def step(
        self,
        batch: Batch,
        weight: float,
        loss: Callable[[Batch], Tensor],
        clock: Clock,
    ) -> Tensor:
        x, samples, rule = batch.x, len(batch.x), self._rule
        kept: list[tuple[Tensor, Tensor]] = []
        for unit, (work, _) in zip(self.units, self._works, strict=True):
            rule.before_forward(unit)
            inputs = x.detach().requires_grad_(bool(kept))
            x = loss(batch) if self._whole_model else unit.forward(inputs)
            clock.did(Task.FORWARD, samples, work)
            rule.after_forward(unit)
            kept.append((inputs, x))
        gradient = scalar(weight, x.dtype, x.device)
        mean = x.detach()
        if not self._whole_model:
            # The graph ends here, so that units exchange between their passes and never
            # inside autograd.
            leaf = x.detach().requires_grad_()
            made = self._loss(leaf, batch.y)
            run_backward((made,), (gradient,))
            assert leaf.grad is not None
            gradient, mean = leaf.grad, made.detach()
        for unit, (_, work), (inputs, outputs) in zip(
            reversed(self.units), reversed(self._works), reversed(kept), strict=True
        ):
            rule.before_backward(unit)
            unit.clear_gradients()
            run_backward((outputs,), (gradient,))
            clock.did(Task.BACKWARD, samples, work)
            rule.after_backward(unit)
            if inputs.grad is not None:
                gradient = inputs.grad
        return mean

    def kept(self, vector: Tensor, *, here: bool) -> Tensor | None:
        # Whole units keep what they hold.
        vectors: dict[Tensor, Tensor] = {}  # by parameter
        for unit in self.units:
            joined = torch.cat(self._comm.allgather(unit.own))[: unit.numbers]
            vectors |= zip(unit.parameters, views(unit.parameters, joined), strict=True)
        if not here:
            return None
        trained = [each for each in self._model.parameters() if each.requires_grad]
        return torch.cat([vectors[parameter].reshape(-1) for parameter in trained])

    def assembled(self, vector: Tensor, model: nn.Module) -> tuple[Tensor, nn.Module]:
        for unit in self.units:
            _hold(unit.whole)
        return vector, with_trained(model, vector)
