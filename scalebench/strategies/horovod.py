"""The baseline that users run: Horovod's own DistributedOptimizer, and its model for virtual runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

from pydantic import Field

from scalebench.cluster.operation import Kind
from scalebench.comm.base import (
    Capability,
    LibraryCommunicator,
    Overlap,
    OverlapCommunicator,
)
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.allreduce import GradientAveraging, mean_of_gradients
from scalebench.strategies.base import Setting, Worker
from scalebench.strategies.compression import compressed
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Traits

_MIB = 1 << 20


@register("virtual")
class VirtualHorovod(GradientAveraging):
    """Gradients are averaged tensor by tensor behind the backward pass, fused per cycle.

    Sergeev and Del Balso, 2018, arXiv 1802.05799. Defaults are those of Horovod 0.28.1;
    `accumulate` is its backward_passes_per_step. Virtual runs are charged by Horovod's
    rule: one serial stream, on which the tensors ready at a cycle are fused.
    """

    # HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME, which Horovod reads at its start.
    fusion_threshold_mib: float = Field(
        128.0, ge=0, description="tensors ready together are fused up to this size"
    )
    cycle_time_ms: float = Field(
        1.0, gt=0, description="how often the background thread looks for ready tensors"
    )
    compression: Literal["none", "fp16"] = Field(
        "none", description="dtype of the gradients on the wire"
    )

    name = "horovod"
    summary = "the real hvd.DistributedOptimizer: gradients averaged every batch, behind backward"
    source = "Sergeev and Del Balso, 2018, arXiv 1802.05799; Horovod 0.28.1"
    engines = providing(Capability.HOROVOD_OPTIMIZER)
    requires = frozenset({Capability.OVERLAP})

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        cast(OverlapCommunicator, worker.comm).overlapped_mean_(
            worker.gradients, self.overlap
        )
        # Their scale is known behind the backward pass, in which they were averaged.
        if scale != 1.0:
            worker.gradients.mul_(scale)
        worker.update()

    @property
    def overlap(self) -> Overlap:
        # A threshold of 0 fuses nothing: each tensor travels alone.
        fusion = max(1, int(self.fusion_threshold_mib * _MIB))
        wire = "float16" if self.compression == "fp16" else None
        # Both bounds are the same: only DDP has a small first bucket.
        return Overlap(self.engines[0], fusion, fusion, self.cycle_time_ms / 1e3, wire)

    @property
    def traits(self) -> Traits:
        return replace(
            compressed(super().traits, self.compression, start=0),
            cycle_s=self.overlap.cycle_s,
        )

    def check(self, setting: Setting) -> list[str]:
        if setting.training.dtype == "bfloat16":
            raise StudyError(
                "strategy horovod: Horovod has no bfloat16 for torch; use --set dtype=float32, or another strategy"
            )
        return []

    def arithmetic(self, workers: int) -> str | None:
        return (
            mean_of_gradients(workers)
            if self.compression == "none" and self.accumulate == 1
            else None
        )


@register()
class Horovod(VirtualHorovod):
    """The real hvd.DistributedOptimizer. `comm_s` holds the time in its `synchronize`."""

    requires = frozenset({Capability.HOROVOD_OPTIMIZER})

    def setup(self, worker: Worker) -> None:
        import horovod.torch as hvd

        compression = (
            hvd.Compression.fp16 if self.compression == "fp16" else hvd.Compression.none
        )

        def wrap(optimizer: Any) -> Any:
            named = [
                (name, p)
                for name, p in worker.model.named_parameters()
                if p.requires_grad
            ]
            return hvd.DistributedOptimizer(
                optimizer,
                named_parameters=named,
                compression=compression,
                backward_passes_per_step=self.accumulate,
            )

        worker.use_optimizer(wrap)

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        optimizer: Any = worker.optimizer
        # at the end of an epoch it sends gradients not yet sent
        optimizer.synchronize()
        if self.compression == "fp16":
            take_back_gradients(worker)
        if scale != 1.0:
            worker.gradients.mul_(scale)
        comm = cast(LibraryCommunicator, worker.comm)
        sent = worker.gradients.nbytes
        if self.compression == "fp16":
            sent = 2 * worker.gradients.numel()
        comm.carried(comm.operation(Kind.ALLREDUCE, sent))
        with optimizer.skip_synchronize():
            worker.update()

    @property
    def traits(self) -> Traits:
        threshold, cycle = (
            str(int(self.fusion_threshold_mib * _MIB)),
            str(self.cycle_time_ms),
        )
        return replace(
            super().traits,
            environment={
                "HOROVOD_FUSION_THRESHOLD": threshold,
                "HOROVOD_CYCLE_TIME": cycle,
            },
        )


def take_back_gradients(worker: Worker) -> None:
    """Into the flat buffer, which is set to zero before each step: decompressing leaves them in tensors of its own."""
    from scalebench.models.flat import views

    trainable = [
        parameter for parameter in worker.model.parameters() if parameter.requires_grad
    ]
    for parameter, view in zip(
        trainable, views(trainable, worker.gradients), strict=True
    ):
        assert parameter.grad is not None
        view.copy_(parameter.grad)
        parameter.grad = view
