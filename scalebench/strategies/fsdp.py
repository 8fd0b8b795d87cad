"""Data parallelism whose workers keep shards of optimizer state, gradients and parameters; and torch's fully_shard."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from scalebench.comm.base import Capability, Communicator
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.allreduce import mean_of_gradients
from scalebench.strategies.base import Batch, Setting, Strategy, Unit, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Stretch, Traits
from scalebench.study.spec import BY_LAYER


class Exchanges:
    """What a worker exchanges before and after it computes with a unit of the model. Implements `base.UnitRule`."""

    def __init__(self, comm: Communicator, shard: int) -> None:
        self.comm, self.shard = comm, shard
        # At 1 parameters stay whole within a step: one unit, gathered once.
        self.by_layer = shard > 1

    def before_forward(self, unit: Unit) -> None:
        unit.fill(self.comm.allgather(unit.own))

    def after_forward(self, unit: Unit) -> None:
        if self.shard == 3 and not unit.is_last:  # whose backward pass is next
            unit.release()

    def before_backward(self, unit: Unit) -> None:
        if self.shard == 3 and not unit.is_last:
            unit.fill(self.comm.allgather(unit.own))

    def after_backward(self, unit: Unit) -> None:
        # Half the bytes of an allreduce: a worker updates its shard alone.
        self.comm.reduce_scatter_(unit.own_gradients, unit.gradients, "mean")
        if self.shard > 1:
            unit.release_gradients()
        if self.shard == 3:
            unit.release()


@register()
class Fsdp(Strategy):
    """Worker k of K updates the k-th shard w_k of the parameters, with an optimizer whose state is that of w_k.

        forward:   w = allgather(w_k)            layer by layer; whole at `shard` 1
        backward:  g_k = reduce-scatter mean(g)  layer by layer; whole at `shard` 1
        step:      w_k <- w_k - eta g_k

    `shard` 1 keeps parameters and gradients whole during a step (ZeRO-1); 2 gives up
    the gradients of a layer once they are scattered (ZeRO-2); 3 gives up the parameters
    of a layer too, and gathers them anew for the backward pass (ZeRO-3). Weights are
    those of allreduce.
    """

    shard: Literal[1, 2, 3] = Field(
        3,
        description="what is divided: 1 the optimizer's state, 2 gradients too, 3 parameters too",
    )

    name = "fsdp"
    summary = "shards of optimizer state, gradients and parameters, gathered layer by layer (option shard)"
    source = "Rajbhandari et al., SC 2020, arXiv 1910.02054 (ZeRO); Zhao et al., VLDB 2023 (FSDP)"
    engines = providing(Capability.BATCHES)

    def setup(self, worker: Worker) -> None:
        if worker.size > 1:
            worker.divide(Exchanges(worker.comm, self.shard))

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            self.step(worker, batch)

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        worker.update()

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.step(worker, batch)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True

    def check(self, setting: Setting) -> list[str]:
        optimizer = setting.training.optimizer.name
        # A shard may end anywhere within a layer.
        if setting.workers > 1 and optimizer in BY_LAYER:
            raise StudyError(
                f"strategy {self.name}: optimizer {optimizer} needs whole layers, of which a worker updates a "
                "shard; use sgd, adam or adamw"
            )
        return []

    def arithmetic(self, workers: int) -> str:
        return mean_of_gradients(workers)

    @property
    def traits(self) -> Traits:
        return Traits(
            stretches=(Stretch(restarts=True),),
            mean_over_global_batch=True,
            sharded=self.shard,
        )


@register("virtual")
class VirtualTorchFsdp(Fsdp):
    """`fully_shard` of each layer, then of the model: parameters, gradients and optimizer state in shards.

    A virtual run takes the steps of `fsdp`, which exchanges as much, but does not
    overlap it with compute, and is charged the overhead that calibration measures of
    `torch_fsdp`.
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
