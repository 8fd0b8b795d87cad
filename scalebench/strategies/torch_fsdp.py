"""PyTorch's own sharded data parallelism, fully_shard, and its model for virtual runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies.base import Worker
from scalebench.strategies.fsdp import Fsdp
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits


@register("virtual")
class VirtualTorchFsdp(Fsdp):
    """`fully_shard` of each layer, then of the model: parameters, gradients and optimizer state in shards.

    A virtual run takes the steps of `fsdp`, which exchanges as much, but does not
    overlap it with compute.
    """

    # fully_shard always divides gradients, so that there is no 1.
    shard: Literal[2, 3] = Field(
        3,
        description="2: whole parameters between the passes of a step (reshard_after_forward=False), 3: shards",
    )

    name = "torch_fsdp"
    summary = "the real fully_shard (FSDP2) of each layer: parameters, gradients, optimizer (option shard)"
    source = "Zhao et al., VLDB 2023 (FSDP); torch.distributed.fsdp.fully_shard"
    engines = providing(Capability.PROCESS_GROUP)


@register()
class TorchFsdp(VirtualTorchFsdp):
    """Torch's own sharding. It communicates inside both passes: compute and communication are not separate."""

    requires = frozenset({Capability.PROCESS_GROUP})

    def setup(self, worker: Worker) -> None:
        if worker.size > 1:
            worker.use_fully_shard(reshard=self.shard == 3)

    @property
    def traits(self) -> Traits:
        return replace(super().traits, split_is_measured=False)
