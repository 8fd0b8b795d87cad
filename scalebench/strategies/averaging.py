"""What every averaging strategy says of itself: which state is averaged, by which weights, and what optimizers keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Communicator
from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.traffic import every

if TYPE_CHECKING:
    from torch import Tensor


class Averaging(Strategy):
    """Replicas that average what they have become; published comparisons disagree where these policies are not said.

    Only floating-point buffers (BatchNorm's statistics) are averaged; counters stay. Weighted by samples the mean is
    sum_i n_i w_i / sum_i n_i with n_i the size of worker i's shard.
    """

    buffers: Literal["average", "keep"] = Field("average", description="what becomes of the model's buffers")
    optimizer_state: Literal["keep", "average", "reset"] = Field(
        "keep", description="momentum and the like stay local, are averaged too, or are forgotten at each average"
    )
    weighting: Literal["uniform", "samples"] = Field("uniform", description="weight of a worker in the mean")

    @property
    def averaged_state(self) -> str:
        buffers = "+buffers" if self.buffers == "average" else ""
        return f"parameters{buffers}{'+optimizer' if self.optimizer_state == 'average' else ''}"

    @property
    def optimizer_state_policy(self) -> str:
        return self.optimizer_state

    @property
    def merge_policy(self) -> str:
        return "mean" if self.weighting == "uniform" else "mean by samples"

    def average(self, worker: Worker, comm: Communicator | None = None) -> None:
        """Average over `comm` (default: all workers) what the options say, in one collective."""
        tensors = [worker.parameters]
        if self.buffers == "average":
            tensors += floating_buffers(worker)
        if self.optimizer_state == "average":
            tensors += optimizer_tensors(worker)
        average_(comm or worker.comm, tensors, float(worker.samples) if self.weighting == "samples" else None)
        if self.optimizer_state == "reset":
            worker.reset_optimizer()


class Periodic(Averaging):
    """Local steps, and a synchronisation every `steps` of them; a partial interval is synchronised at the very end.

    Steps are counted through the whole training: an interval may reach over the end of an epoch.
    """

    steps: int = Field(8, ge=1, description="H: local steps between two synchronisations")
    first: int | None = Field(None, ge=1, description="local steps before the first synchronisation; default: H")

    sync_unit: ClassVar[str] = "batch"

    @property
    def sync_every(self) -> int:
        return self.steps

    def due(self, taken: int) -> bool:
        """Whether replicas synchronise after `taken` steps."""
        first = self.first or self.steps
        return taken >= first and (taken - first) % self.steps == 0

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        last = worker.steps_in(epoch) - 1 if worker.is_last(epoch) else -1
        for batch in worker.batches(epoch):
            self.step(worker, batch)
            worker.state.taken += 1
            self.after_step(worker, worker.state.taken, batch.step == last)

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.local_step(batch)

    def after_step(self, worker: Worker, taken: int, ends: bool) -> None:
        if ends or self.due(taken):
            self.synchronise(worker)

    def synchronise(self, worker: Worker) -> None:
        self.average(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.size == 1 or worker.is_last(epoch) or self.due(worker.state.taken)

    @property
    def syncs_formula(self) -> str:
        return every("steps", "first" if self.first else "")


def average_(comm: Communicator, tensors: Sequence[Tensor], weight: float | None = None) -> None:
    """The mean of each of `tensors` over the workers, in one collective; `weight` is this worker's."""
    if len(tensors) == 1:
        comm.allreduce_(tensors[0], "mean", weight=weight)
        return
    import torch

    fused = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
    comm.allreduce_(fused, "mean", weight=weight)
    for tensor, piece in zip(tensors, torch.split(fused, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def floating_buffers(worker: Worker) -> list[Tensor]:
    """BatchNorm's running statistics and the like."""
    return [buffer for buffer in worker.model.buffers() if buffer.is_floating_point()]


def optimizer_tensors(worker: Worker) -> list[Tensor]:
    """What the optimizer remembers of each parameter; step counters are the same everywhere."""
    return list(_per_parameter(worker))


def _per_parameter(worker: Worker) -> Iterator[Tensor]:
    import torch

    for remembered in worker.optimizer.state.values():
        for value in remembered.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield value
