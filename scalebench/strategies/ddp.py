"""The other baseline that users run: PyTorch's own DistributedDataParallel, and its model for virtual runs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from scalebench.comm.base import Capability, Overlap
from scalebench.strategies.allreduce import PerBatch, mean_of_gradients
from scalebench.strategies.base import Batch, Worker
from scalebench.strategies.registry import register

_MIB = 1 << 20


class DdpOptions(PerBatch):
    """Gradients are averaged in buckets, in backward order, as soon as each bucket is complete.

    Li et al., VLDB 2020, arXiv 2006.15704. Defaults are those of PyTorch.
    """

    bucket_cap_mb: float = Field(25.0, gt=0, description="size of a gradient bucket in MiB; the first holds 1 MiB")

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "the real DistributedDataParallel: gradients averaged every batch in overlapped buckets"
    source: ClassVar[str] = "Li et al., VLDB 2020, arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel"
    engines: ClassVar[tuple[str, ...]] = ("gloo", "nccl")


@register("virtual")
class VirtualDdp(DdpOptions):
    """The same arithmetic, charged by DDP's rule: fixed buckets on one stream beside the backward pass."""

    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.OVERLAP})

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        cap = int(self.bucket_cap_mb * _MIB)
        worker.comm.overlapped_mean_(worker.gradients, Overlap("gloo", cap, min(cap, _MIB)))  # type: ignore[attr-defined]
        worker.update()

    def arithmetic(self, workers: int) -> str | None:
        return mean_of_gradients(workers)


@register()
class Ddp(DdpOptions):
    """The real thing. It communicates inside backward, so compute and communication are not told apart."""

    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.PROCESS_GROUP})
    split_is_measured: ClassVar[bool] = False

    def setup(self, worker: Worker) -> None:
        from torch.nn.parallel import DistributedDataParallel

        group = worker.comm.process_group  # type: ignore[attr-defined]
        worker.use_optimizer(lambda optimizer: optimizer)
        worker.forward = DistributedDataParallel(
            worker.model, process_group=group, bucket_cap_mb=self.bucket_cap_mb, broadcast_buffers=False
        )

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        if worker.size > 1:
            worker.comm.count(worker.gradients.nbytes)
        worker.update()
