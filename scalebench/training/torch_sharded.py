"""A model that torch's fully_shard divides among workers, in place of `ShardedModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from scalebench.cluster.operation import Kind
from scalebench.comm.base import LibraryCommunicator
from scalebench.models.flat import views
from scalebench.models.parts import Layer
from scalebench.system.clock import Clock, Task


class TorchShards:
    """The layers of a model, each sharded by torch, which communicates inside both passes.

    `reshard` gives the parameters of a layer up between its passes. Those of the last
    layer stay: its backward pass is next.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        comm: LibraryCommunicator,
        *,
        reshard: bool,
    ) -> None:
        self.model = model
        self._comm = comm
        self._reshard = reshard
        self._whole = [
            sum(each.nbytes for each in layer.parameters) for layer in layers
        ]
        group: Any = comm.process_group or torch.distributed.group.WORLD
        device = layers[0].parameters[0].device
        mesh = DeviceMesh.from_group(group, device.type)
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
        x: Tensor,
        y: Tensor,
        weight: float,
        loss: Callable[[], Tensor],
        clock: Clock,
    ) -> Tensor:
        """Compute the mean gradient of weight * mean loss of a batch over the workers; return the mean loss ()."""
        for parameter in self.trained:
            parameter.grad = None
        mean = loss()
        clock.did(Task.FORWARD, len(x))
        (mean * weight).backward()
        clock.did(Task.BACKWARD, len(x))
        comm = self._comm
        for place, nbytes in enumerate(self._whole):
            again = self._reshard and place < len(self._whole) - 1
            own = -(-nbytes // comm.size)
            for _ in range(1 + again):
                comm.overlapped(comm.operation(Kind.ALLGATHER, own), calls=1)
            comm.overlapped(comm.operation(Kind.REDUCE_SCATTER, nbytes), calls=1)
        return mean.detach()

    def own(self) -> Tensor:
        """Return this worker's shards as one vector."""
        return torch.cat([each.to_local().reshape(-1) for each in self.trained])

    def gathered(self, gather: object) -> Tensor:
        """Return the parameters of the whole model as one vector. Collective."""
        return torch.cat(
            [each.detach().full_tensor().reshape(-1) for each in self.trained]
        )

    def whole(self, vector: Tensor, model: nn.Module) -> nn.Module:
        """Return `model`, a whole one, with the parameters `vector` and this worker's buffers."""
        trained = [each for each in model.parameters() if each.requires_grad]
        with torch.no_grad():
            for parameter, value in zip(trained, views(trained, vector), strict=True):
                parameter.copy_(value)
            for buffer, own in zip(model.buffers(), self.model.buffers(), strict=True):
                buffer.copy_(own)
        return model

    def reset(self) -> None:
        """Set the parameters to those at the beginning."""
        with torch.no_grad():
            for parameter, value in zip(self.trained, self._initial, strict=True):
                parameter.to_local().copy_(value)
