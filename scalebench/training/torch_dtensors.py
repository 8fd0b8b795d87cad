"""Parameters that torch divides among workers as DTensors: by fully_shard, or by styles of tensor parallelism.

`TorchShards` is in place of `ShardedModel`, `TorchStyles` in place of `Stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, parallel
from torch.nn import functional

from scalebench.cluster.operation import Kind
from scalebench.comm.base import LibraryCommunicator
from scalebench.models.parts import Layer
from scalebench.models.sharding import Narrow, SharedHeads, SharedLinear, called
from scalebench.strategies.base import Batch
from scalebench.system.clock import Clock, Task
from scalebench.training.division import Division, with_trained
from scalebench.training.stage import Chunk, StageArithmetic


class TorchShards(Division):
    """The layers of a model, each sharded by torch, which communicates inside both passes.

    `reshard` gives the parameters of a layer up between its passes. Those of the last
    layer stay: its backward pass is next.
    """

    shares_layers = True

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        build: Callable[[], nn.Module],
        comm: LibraryCommunicator,
        *,
        reshard: bool,
    ) -> None:
        """Divide `model`; `build` makes a whole one."""
        self.share = 1 / comm.size
        self._build = build
        self.holders = self._comm = comm
        self._reshard = reshard
        self._whole = [
            sum(each.nbytes for each in layer.parameters) for layer in layers
        ]
        group: Any = comm.process_group or torch.distributed.group.WORLD
        device = layers[0].parameters[0].device
        mesh = _mesh(group, device, "shards")
        # A module made of calls of the forward is not called itself: the whole model
        # gathers its parameters.
        called = set(model.modules())
        for layer in layers:
            for module in layer.modules:
                trained = any(each.requires_grad for each in module.parameters())
                if trained and module in called:
                    fully_shard(
                        module,
                        mesh=mesh,
                        reshard_after_forward=reshard and layer is not layers[-1],
                    )
        fully_shard(model, mesh=mesh)
        self.trained: list[Any] = [
            each for each in model.parameters() if each.requires_grad
        ]
        self._initial = [each.to_local().clone() for each in self.trained]

    def step(
        self,
        batch: Batch,
        weight: float,
        loss: Callable[[Batch], Tensor],
        clock: Clock,
    ) -> Tensor:
        # set anew by torch: means over the workers
        for parameter in self.trained:
            parameter.grad = None
        mean = loss(batch)
        clock.did(Task.FORWARD, len(batch.x))
        (mean * weight).backward()
        clock.did(Task.BACKWARD, len(batch.x))
        comm = self._comm
        for place, nbytes in enumerate(self._whole):
            again = self._reshard and place < len(self._whole) - 1
            own = -(-nbytes // comm.size)
            for _ in range(1 + again):
                comm.overlapped(comm.operation(Kind.ALLGATHER, own), calls=1)
            comm.overlapped(comm.operation(Kind.REDUCE_SCATTER, nbytes), calls=1)
        return mean.detach()

    def own(self, vector: Tensor) -> Tensor:
        return torch.cat([each.to_local().reshape(-1) for each in self.trained])

    def kept(self, vector: Tensor, *, here: bool) -> Tensor | None:
        whole = torch.cat(
            [each.detach().full_tensor().reshape(-1) for each in self.trained]
        )
        return whole if here else None

    def assembled(self, vector: Tensor, model: nn.Module) -> tuple[Tensor, nn.Module]:
        whole = with_trained(self._build(), vector)
        for buffer, own in zip(whole.buffers(), model.buffers(), strict=True):
            buffer.copy_(own)
        return vector, whole

    def reset(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.trained, self._initial, strict=True):
                parameter.to_local().copy_(value)


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
        mesh = _mesh(group, compute.like.device, "shares")
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
        clock.did(Task.FORWARD, samples, sum(size.forward for size in self._sizes))
        # torch sums over the workers inside this pass.
        (loss * weight).backward()
        clock.did(Task.BACKWARD, samples, sum(size.backward for size in self._sizes))
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


def _mesh(group: Any, device: torch.device, name: str) -> DeviceMesh:
    """Return the mesh of the ranks of a process group, whose only dimension is called `name`."""
    # Meshes of the same ranks are equal for torch's caches of layouts, whatever their
    # groups are: those of another strategy would name a group of an earlier run, which
    # has ended. Groups of one strategy have the same names in each run.
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(name,))


def _divided(module: nn.Module, degree: int, mesh: DeviceMesh) -> nn.Module:
    """Return a module of `nn.Linear`s, divided by torch, for one whose products are shares."""
    if isinstance(module, SharedHeads):
        return _Attention(module, degree, mesh)
    first, *between, last = module.children()
    assert isinstance(last, SharedLinear)
    if isinstance(first, Narrow):
        return _linear(
            last, degree, mesh, parallel.RowwiseParallel(input_layouts=Replicate())
        )
    assert isinstance(first, SharedLinear)
    rows = _linear(last, degree, mesh, parallel.RowwiseParallel())
    return nn.Sequential(
        _linear(first, degree, mesh, parallel.ColwiseParallel()), *between, rows
    )


def _linear(
    share: SharedLinear, degree: int, mesh: DeviceMesh, style: parallel.ParallelStyle
) -> nn.Module:
    """Return the whole product of a share, divided by `style`; its local tensors are those of the share.

    The bias of a product by rows is added behind the sum, as in `tensor`, by what
    follows.
    """
    outputs, inputs = share.weight.shape
    if isinstance(style, parallel.ColwiseParallel):
        outputs *= degree
    else:
        inputs *= degree
    whole = nn.Linear(
        inputs, outputs, share.bias is not None, device="meta", dtype=share.weight.dtype
    )
    parallel.parallelize_module(whole, mesh, style)
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
            _linear(
                SharedLinear(weight, bias), degree, mesh, parallel.ColwiseParallel()
            )
            for weight, bias in zip(shares.weights, biases, strict=True)
        )
        self.out = _linear(
            SharedLinear(shares.out, None), degree, mesh, parallel.RowwiseParallel()
        )
        self.heads = shares.heads
        whole = parallel.PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        # one sum of the three gradients of the input
        parallel.parallelize_module(self, mesh, whole)

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
