"""How a model is divided among workers: what each holds, its part in a step, and the way back to a whole model.

Others than here: `ShardedModel`, `SharedLayout`, and torch's own `TorchShards`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Communicator
from scalebench.models.flat import views
from scalebench.models.parts import layers_of
from scalebench.models.sharding import held_by
from scalebench.strategies.base import Batch
from scalebench.system.clock import Clock, Task
from scalebench.training.stage import Stage, run_backward, scalar

if TYPE_CHECKING:
    from scalebench.training.torch_dtensors import TorchStyles
    from scalebench.training.torch_stage import TorchStage


def step_overhead() -> None:
    """Stand for what a worker that shares layers computes in a step beyond its share of the model's step.

    Layers that all compute, the small operations of a share in Python, copies of
    shards, a library's hooks and dispatch: measured by `calibration.operation_costs`.
    """


class Division:
    """A model of which each worker holds all; derived classes are those of which it holds less.

    `vector` is the flat vector of the parameters that a worker holds, `model` the
    module of these: arguments, as virtual workers build their models late.
    """

    # workers that hold a model together; None: each holds all of it
    holders: Communicator | None = None
    share = 1.0  # of the model's parameters: those that this worker updates
    shares_layers = False  # with other workers, each of which has a share of a layer

    def step(
        self,
        batch: Batch,
        weight: float,
        loss: Callable[[Batch], Tensor],
        clock: Clock,
    ) -> Tensor | None:
        """Add the gradient of weight * mean loss of a batch; return the mean loss (), None where another worker has it.

        `loss` computes it by the model as a whole, for those who call it so.
        """
        samples = batch.x.shape[0]  # `len` of a tensor is a function of Python's
        mean = loss(batch)
        clock.did(Task.FORWARD, samples)
        run_backward((mean,), (scalar(weight, mean.dtype, mean.device),))
        clock.did(Task.BACKWARD, samples)
        return mean.detach()

    def own(self, vector: Tensor) -> Tensor:
        """Return all parameters that this worker holds, which may not be in `vector`."""
        return vector

    def kept(self, vector: Tensor, *, here: bool) -> Tensor | None:
        """Return a copy of the parameters for a snapshot if it is stored `here`; of shards, those of the whole model.

        Collective where workers hold shards.
        """
        return vector.detach().clone() if here else None

    def assembled(
        self, vector: Tensor, model: nn.Module
    ) -> tuple[Tensor, nn.Module] | None:
        """Return the vector of a whole model, and a model with it, from what `kept` returned; None on other parts.

        Its floating-point buffers are those of `model`. Collective over a replica of
        several workers.
        """
        return vector, with_trained(model, vector)

    def reset(self) -> None:
        """Set parameters that are not in the flat vector to those at the beginning."""


class Part(Division):
    """A part of a replica of several workers: a stage of its layers, or a share of them.

    All parts come together on part 0, which has a whole model for them; `build` makes
    it, and `name` is what it is called.
    """

    def __init__(
        self,
        stage: Stage,
        share: float,
        build: Callable[[], nn.Module],
        sizes: Sequence[int],
        mesh: Mesh,
        replica: Communicator,
        name: str,
    ) -> None:
        self.stage: Stage | TorchStage | TorchStyles = stage
        self.chunks = stage.chunks
        self.share = share
        self.shares_layers = mesh.tensor > 1
        self.holders = self._replica = replica
        self._build = build
        self._sizes = sizes
        self._mesh = mesh
        self._name = name

    def step(
        self,
        batch: Batch,
        weight: float,
        loss: Callable[[Batch], Tensor],
        clock: Clock,
    ) -> Tensor | None:
        return self.stage.step(batch, weight, clock)

    def assembled(
        self, vector: Tensor, model: nn.Module
    ) -> tuple[Tensor, nn.Module] | None:
        buffers = [each.reshape(-1).to(vector.dtype) for each in floating(model)]
        # one message for all
        joined = torch.cat([vector.detach().reshape(-1), *buffers])
        if self._replica.rank:
            self._replica.send(joined, 0)
            return None
        for part, places in enumerate(self._places):
            if part:
                joined = vector.new_empty(sum(place.numel() for place in places))
                self._replica.recv_(joined, part)
            with torch.no_grad():
                for place, value in zip(places, views(places, joined), strict=True):
                    place.copy_(value)
        return trained_vector(self._whole), self._whole

    @cached_property
    def _whole(self) -> nn.Module:
        return self._build()

    @cached_property
    def _places(self) -> list[list[Tensor]]:
        """Where each part's parameters and floating-point buffers lie in the whole model."""
        layers = layers_of(self._whole, self._name)
        return [
            held_by(layers, self._sizes, self._mesh, part, self._name).places()
            for part in range(self._mesh.parts)
        ]


def trained_vector(model: nn.Module) -> Tensor:
    """Return a copy of the trainable parameters of a model as one vector, (n,)."""
    return torch.cat(
        [each.detach().reshape(-1) for each in model.parameters() if each.requires_grad]
    )


def with_trained(model: nn.Module, vector: Tensor) -> nn.Module:
    """Set the trainable parameters of a model to those in a vector; return it."""
    trained = [each.detach() for each in model.parameters() if each.requires_grad]
    for parameter, values in zip(trained, views(trained, vector), strict=True):
        parameter.copy_(values)
    return model


def floating(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers of a model."""
    return [each for each in model.buffers() if each.is_floating_point()]
