"""The shares of a worker under the styles of torch.distributed.tensor.parallel, in place of `Stage`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from scalebench.cluster.operation import Kind
from scalebench.comm.base import LibraryCommunicator
from scalebench.models.sharding import Narrow, SharedHeads, SharedLinear, called
from scalebench.strategies.base import Batch
from scalebench.system.clock import Clock, Task
from scalebench.training.stage import Chunk, StageArithmetic


class TorchStyles:
    """All layers, whose products are modules that torch divides; it communicates inside both passes.

    The distributed parameters and their gradients are views of those of the worker, so
    that the strategy of the replicas works with these.
    """

    def __init__(self, chunk: Chunk, degree: int, replica: LibraryCommunicator) -> None:
        """`replica` is the communicator of the `degree` workers that share the layers."""
        compute = chunk.compute
        assert isinstance(compute, StageArithmetic)
        self._loss = compute.loss
        self._sizes = compute.sizes
        self._replica = replica
        self._number = compute.like.element_size()
        # A replica of all workers has no group of its own: it is the world.
        group: Any = replica.process_group or torch.distributed.group.WORLD
        mesh = DeviceMesh.from_group(group, compute.like.device.type)
        self._segments = [
            segment._replace(module=_divided(segment.module, degree, mesh))
            if segment.divided
            else segment
            for segment in compute.segments
        ]
        modules = nn.ModuleList(segment.module for segment in self._segments)
        self.trained: list[nn.Parameter] = [
            each for each in modules.parameters() if each.requires_grad
        ]

    def step(self, batch: Batch, weight: float, clock: Clock) -> Tensor:
        """Compute the gradient of weight * mean loss of `batch`; return the mean loss ()."""
        samples, state = len(batch.x), [batch.x]
        for segment in self._segments:
            made = called(segment.module, state[-1:] if segment.divided else state)
            state = [*state[:-1], *made] if segment.divided else made
        loss = self._loss(state[-1], batch.y)
        clock.did(Task.FORWARD, samples)
        # torch sums over the workers inside this pass.
        (loss * weight).backward()
        clock.did(Task.BACKWARD, samples)
        self._count(samples)
        return loss.detach()

    def _count(self, samples: int) -> None:
        """Count the sums of a step, which torch has made."""
        for size in self._sizes:
            if size.divided:
                # Outputs in the forward pass; gradients of inputs in the backward pass,
                # where they are needed.
                for shape in [size.gives] + [size.takes] * size.needed:
                    nbytes = self._number * samples * torch.Size(shape).numel()
                    self._replica.overlapped(
                        self._replica.operation(Kind.ALLREDUCE, nbytes), calls=1
                    )


def _divided(module: nn.Module, degree: int, mesh: DeviceMesh) -> nn.Module:
    """Return a module of `nn.Linear`s, divided by torch, for one whose products are shares."""
    if isinstance(module, SharedHeads):
        return _Attention(module, degree, mesh)
    first, *between, last = module.children()
    assert isinstance(last, SharedLinear)
    if isinstance(first, Narrow):
        return _linear(last, degree, mesh, RowwiseParallel(input_layouts=Replicate()))
    assert isinstance(first, SharedLinear)
    rows = _linear(last, degree, mesh, RowwiseParallel())
    return nn.Sequential(
        _linear(first, degree, mesh, ColwiseParallel()), *between, rows
    )


def _linear(
    share: SharedLinear, degree: int, mesh: DeviceMesh, style: ParallelStyle
) -> nn.Module:
    """Return the whole product of a share, divided by `style`; its local tensors are those of the share.

    The bias of a product by rows is added behind the sum, as in `tensor`, by what
    follows.
    """
    outputs, inputs = share.weight.shape
    if isinstance(style, ColwiseParallel):
        outputs *= degree
    else:
        inputs *= degree
    whole = nn.Linear(
        inputs, outputs, share.bias is not None, device="meta", dtype=share.weight.dtype
    )
    parallelize_module(whole, mesh, style)
    for name, own in share.named_parameters():
        distributed: Any = getattr(whole, name)
        placements = distributed.placements
        # Around the worker's own tensor, so that strategy and optimizer see what torch
        # trains.
        made = nn.Parameter(
            DTensor.from_local(own.detach(), mesh, placements), own.requires_grad
        )
        if own.grad is not None:
            made.grad = DTensor.from_local(own.grad, mesh, placements)
        setattr(whole, name, made)
    return whole


class _Attention(nn.Module):
    """Self-attention whose heads torch divides, written as its users do: a product each of queries, keys, values."""

    def __init__(self, shares: SharedHeads, degree: int, mesh: DeviceMesh) -> None:
        super().__init__()
        biases = shares.biases or [None] * len(shares.weights)
        self.query, self.key, self.value = (
            _linear(SharedLinear(weight, bias), degree, mesh, ColwiseParallel())
            for weight, bias in zip(shares.weights, biases, strict=True)
        )
        self.out = _linear(
            SharedLinear(shares.out, None), degree, mesh, RowwiseParallel()
        )
        self.heads = shares.heads
        whole = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        # one sum of the three gradients of the input
        parallelize_module(self, mesh, whole)

    def forward(self, x: Tensor) -> Tensor:
        samples, places, _ = x.shape
        query, key, value = (
            product(x).view(samples, places, self.heads, -1).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        joined = (
            functional.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(samples, places, -1)
        )
        made: Tensor = self.out(joined)
        return made
