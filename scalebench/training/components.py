"""A model in components, each shared by a number of workers of its own; the same program trains and is recorded.

A component of degree t is shared by t neighbouring workers, which work on the batches
of all of them: t = 1 is data parallelism, t = K sharing among all K workers, and
between lie K / t replicas of shares. Before a component its workers gather the rows
that they lack; behind it each has all rows of its group, of which its own are a part.

`SharedLayout` is the layout of a model in components, of which each worker holds a
share, and the way to another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Communicator
from scalebench.models.flat import views
from scalebench.models.parts import Layer, LayerFacts, layers_of
from scalebench.models.sharding import Held, held_by, sharing_degrees_of
from scalebench.strategies.base import Batch, LayerProfile
from scalebench.system.clock import Clock
from scalebench.training import division
from scalebench.training.stage import (
    StageArithmetic,
    StageCompute,
    StageFacts,
    run_backward,
    scalar,
    segment_facts,
)

# From outputs of the model, targets and a weight: the mean loss (), and the gradient of
# weight * mean loss.
LossGradient = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]


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
    whole: Sequence[tuple[int, ...]],
    input_shape: tuple[int, ...],
    sizes: Sequence[int],
    place: int,
) -> StageFacts:
    """Return the facts of a component of layers whose outputs have the shapes `whole`; none computes the loss."""
    first = sum(sizes[:place])
    last = first + sizes[place]
    takes = whole[first - 1] if first else input_shape
    return StageFacts(place, len(sizes) + 1, first, last, takes, whole[last - 1])


class Passes:
    """Both passes of a batch through components; `rank` of the worker among all."""

    def __init__(self, components: Sequence[Component], rank: int) -> None:
        self._components, self._rank = components, rank
        self.takes = components[0].facts.takes  # shape of one sample

    def step(
        self,
        x: Tensor,
        y: Tensor,
        weight: float,
        rows: Sequence[int],
        loss: LossGradient,
        clock: Clock,
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

    def _moved(
        self,
        x: Tensor,
        source: Component | None,
        target: Component | None,
        rows: Sequence[int],
    ) -> Tensor:
        """Return the rows that the group of `target` works on, from those of `source`; None: of this worker alone."""
        before, after = (
            1 if each is None else each.degree for each in (source, target)
        )
        if before == after:
            return x
        first = self._rank - self._rank % before
        if before > 1:  # x has the rows of a group, in the order of its workers
            own = x.narrow(0, sum(rows[first : self._rank]), rows[self._rank])
        else:
            own = x
        if target is None or after == 1:
            return own.contiguous()
        members = rows[self._rank - self._rank % after :][:after]
        # An allgather takes tensors of one shape: filled up to the largest batch, and
        # cut afterwards.
        compute = target.compute
        gathered = target.group.allgather(compute.filled(own, max(members)))
        return compute.joined(gathered, members)


def slices(vector: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return consecutive views of a vector."""
    ends = list(accumulate(lengths))
    return [
        vector[end - length : end] for end, length in zip(ends, lengths, strict=True)
    ]


def profiles_of(
    layers: Sequence[Layer],
    facts: Sequence[LayerFacts],
    input_shape: tuple[int, ...],
    workers: int,
    name: str,
) -> list[LayerProfile]:
    """Return what the choice of a layout needs to know of each layer of a model that is called `name`."""
    numbers = [
        math.prod(shape) for shape in (input_shape, *(each.shape for each in facts))
    ]
    degrees = sharing_degrees_of(layers, workers, name)
    return [
        LayerProfile(each.name, each.parameters, takes, gives, own)
        for each, takes, gives, own in zip(
            facts, numbers, numbers[1:], degrees, strict=False
        )
    ]


def sharers(comm: Communicator, degree: int) -> tuple[Communicator, Communicator]:
    """Return the neighbours among whom a layer is shared by `degree` workers, and those with the same share of it."""
    return comm.split(lambda rank: rank // degree), comm.split(
        lambda rank: rank % degree
    )


class SharedLayout(division.Division):
    """Runs of `sizes` consecutive layers of a model, the c-th of which is shared by `degrees[c]` neighbouring workers.

    This worker holds its shares of `whole`; `build` makes a model like it, which is
    called `name`. `rows` are the samples in the batch of each worker in a step.
    Collective.
    """

    shares_layers = True

    def __init__(
        self,
        whole: nn.Module,
        build: Callable[[], nn.Module],
        comm: Communicator,
        name: str,
        loss: Loss,
        rows: Callable[[int], Sequence[int]],
        sizes: Sequence[int],
        degrees: Sequence[int],
    ) -> None:
        self.sizes, self.degrees = list(sizes), list(degrees)
        self._build = build
        self.holders = self._comm = comm
        self._name = name
        self._loss = loss
        self._rows = rows
        communicators = [sharers(comm, degree) for degree in degrees]
        self.groups = [group for group, _ in communicators]
        self.peers = [peers for _, peers in communicators]
        self._held = self._shares_of(whole)
        self._models = [each.model for each in self._held]
        # parameters of each component
        self.lengths = [
            division.trained_vector(model).numel() for model in self._models
        ]

    @property
    def model(self) -> nn.Module:
        """What this worker holds, as one module."""
        return nn.Sequential(*self._models)

    def share_of(self, whole: nn.Module) -> Tensor:
        """Return the parameters of a whole model that this worker holds, (n,)."""
        return torch.cat(
            [division.trained_vector(each.model) for each in self._shares_of(whole)]
        )

    def whole(self, vector: Tensor) -> nn.Module:
        """Return a whole model with the parameters in the `vector` of every worker, and the buffers. Collective."""
        model = self._build()
        for place, (own, values) in enumerate(
            zip(self._models, slices(vector, self.lengths), strict=True)
        ):
            buffers = [
                each.reshape(-1).to(vector.dtype) for each in division.floating(own)
            ]
            joined = torch.cat([values, *buffers]).detach()
            of_all = (
                [joined]
                if self.degrees[place] == 1
                else self.groups[place].allgather(joined)
            )
            for index, held in enumerate(of_all):
                places = self._held_of(model, place, index).places()
                for tensor, value in zip(places, views(places, held), strict=True):
                    tensor.detach().copy_(value)
        return model

    def components(
        self,
        gradients: Tensor,
        facts: Sequence[LayerFacts],
        input_shape: tuple[int, ...],
    ) -> list[Component]:
        """Return the components of the held model, through which `step` goes from now on.

        Their `gradients` are one vector; `facts` of all layers.
        """
        shapes, found = [each.shape for each in facts], []
        for place, own in enumerate(slices(gradients, self.lengths)):
            (segments,) = self._held[place].chunks
            stage = facts_of_component(shapes, input_shape, self.sizes, place)
            sizes = segment_facts(
                segments, gradients.new_zeros(2, *stage.takes), facts, first=place == 0
            )
            group, peers = self.groups[place], self.peers[place]
            compute = StageArithmetic(
                stage, segments, sizes, self._loss, group, gradients
            )
            found.append(
                Component(stage, compute, self.degrees[place], group, peers, own)
            )
        self._passes = Passes(found, self._comm.rank)
        return found

    def step(
        self,
        batch: Batch,
        weight: float,
        loss: Callable[[Batch], Tensor],
        clock: Clock,
    ) -> Tensor:
        rows = self._rows(batch.step)
        return self._passes.step(
            batch.x, batch.y, weight, rows, self._loss_gradient, clock
        )

    def _loss_gradient(
        self, outputs: Tensor, targets: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        leaf = outputs.detach().requires_grad_()
        mean = self._loss(leaf, targets)
        run_backward((mean,), (scalar(weight, mean.dtype, mean.device),))
        assert leaf.grad is not None
        return mean.detach(), leaf.grad

    def kept(self, vector: Tensor, *, here: bool) -> Tensor | None:
        model = self.whole(vector)
        return division.trained_vector(model) if here else None

    def assembled(self, vector: Tensor, model: nn.Module) -> tuple[Tensor, nn.Module]:
        whole = division.with_trained(self._build(), vector)
        for buffer, own in zip(
            division.floating(whole), division.floating(model), strict=True
        ):
            buffer.copy_(own)
        return vector, whole

    def _shares_of(self, whole: nn.Module) -> list[Held]:
        """Return what this worker holds of each component."""
        return [
            self._held_of(whole, place, self._comm.rank % degree)
            for place, degree in enumerate(self.degrees)
        ]

    def _held_of(self, whole: nn.Module, place: int, index: int) -> Held:
        """Return what worker `index` of a group holds of component `place`."""
        degree = self.degrees[place]
        mesh = Mesh(1, len(self.sizes), degree)
        return held_by(
            layers_of(whole, self._name),
            self.sizes,
            mesh,
            place * degree + index,
            self._name,
        )
