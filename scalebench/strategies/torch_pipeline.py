"""PyTorch's own pipelines, torch.distributed.pipelining, and their model for virtual runs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies.base import Worker
from scalebench.strategies.pipeline import Pipeline
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits


@register("virtual")
class VirtualTorchPipeline(Pipeline):
    """ScheduleGPipe, Schedule1F1B and ScheduleInterleaved1F1B over the stages of `pipeline`.

    A virtual run takes the steps of `pipeline`, whose order of micro-batches is that of torch.
    """

    recompute: Literal["none"] = Field("none", description="torch keeps all activations")

    name: ClassVar[str] = "torch_pipeline"
    summary: ClassVar[str] = "the real torch.distributed.pipelining: GPipe, 1F1B, Interleaved1F1B (option schedule)"
    source: ClassVar[str] = "torch.distributed.pipelining"
    engines: ClassVar[tuple[str, ...]] = providing(Capability.PROCESS_GROUP)


@register()
class TorchPipeline(VirtualTorchPipeline):
    """Torch's own schedules; gradients of replicas are averaged as by `allreduce`, after the step.

    Torch does not say when its messages came: the waiting of a stage is communication, and the bubble is unknown.
    """

    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.PROCESS_GROUP, Capability.SPLIT})

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        if worker.mesh.parts > 1:
            worker.use_schedule(self.schedule, self.micro_batches)
            worker.use_optimizer(lambda optimizer: optimizer)

    @property
    def traits(self) -> Traits:
        return self.repeated()
