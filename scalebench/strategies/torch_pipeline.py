"""PyTorch's own pipelines, torch.distributed.pipelining, and their model for virtual runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from scalebench.cluster.mesh import Mesh
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.strategies.base import Move, Worker
from scalebench.strategies.parts import SCHEDULE, Schedule
from scalebench.strategies.pipeline import Pipeline
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits
from scalebench.strategies.zero_bubble import zero_bubble


@register("virtual")
class VirtualTorchPipeline(Pipeline):
    """ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B and ScheduleZBVZeroBubble over the stages of `pipeline`.

    zbv:  stage k of m holds chunks k and 2 m - 1 - k of the layers; backward passes come in halves, gradients of the
          inputs first, and those of the weights fill the bubble

    A virtual run takes the steps of `pipeline`, in the order of micro-batches of torch;
    halves of a backward pass take equally long there, but for the first layers, which
    have no gradient of inputs.
    """

    schedule: Schedule | Literal["zbv"] = Field("1f1b", description=SCHEDULE)  # type: ignore[assignment]
    recompute: Literal["none"] = Field(
        "none", description="torch keeps all activations"
    )

    name: ClassVar[str] = "torch_pipeline"
    summary: ClassVar[str] = (
        "the real torch.distributed.pipelining: GPipe, 1F1B, Interleaved1F1B, ZBV (schedule)"
    )
    source: ClassVar[str] = (
        "torch.distributed.pipelining; zbv: Qi et al., ICLR 2024, arXiv 2401.10241"
    )
    engines: ClassVar[tuple[str, ...]] = providing(Capability.PROCESS_GROUP)

    def replica(self) -> Mesh:
        return Mesh(pipeline=self.stages, folded=self.schedule == "zbv")

    def groups(self) -> int:
        return 2 * self.stages if self.schedule == "zbv" else super().groups()

    def order(self, stage: int, stages: int, micro_batches: int) -> Iterator[Move]:
        if self.schedule == "zbv":
            return zero_bubble(stage, stages, micro_batches)
        return super().order(stage, stages, micro_batches)

    @property
    def traits(self) -> Traits:
        return self.repeated()


@register()
class TorchPipeline(VirtualTorchPipeline):
    """Torch's own schedules; gradients of replicas are averaged as by `allreduce`, after the step.

    Torch does not say when its messages came: the waiting of a stage is communication,
    and the bubble is unknown.
    """

    requires: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PROCESS_GROUP, Capability.SPLIT}
    )

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        if worker.mesh.parts > 1:
            worker.use_schedule(self.schedule, self.micro_batches)
            worker.use_optimizer(lambda optimizer: optimizer)

    @property
    def traits(self) -> Traits:
        return self.repeated()
