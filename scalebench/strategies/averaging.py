"""What every averaging strategy says of itself: what is averaged, by which weights, what optimizers keep, and what
becomes of an interval that the end of training cuts short."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Communicator
from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.replica_state import average_, floating_buffers, optimizer_tensors
from scalebench.strategies.traffic import every, every_epochs

if TYPE_CHECKING:
    from torch import Tensor

    from scalebench.study.spec import Training


class Averaging(Strategy):
    """Replicas that average what they have become; published comparisons disagree where these policies are not said.

    Only floating-point buffers (BatchNorm's statistics) are averaged; counters stay. Weighted by samples the mean is
    sum_i n_i w_i / sum_i n_i with n_i the size of worker i's shard. A partial interval that is left as it is at the end
    of training is not synchronised within it; the model handed out is the mean of the replicas all the same.
    """

    buffers: Literal["average", "keep"] = Field(
        "average", description="what becomes of the model's floating-point buffers: BatchNorm's statistics"
    )
    optimizer_state: Literal["keep", "average", "reset"] = Field(
        "keep", description="momentum and the like stay local, are averaged too, or are forgotten at each average"
    )
    weighting: Literal["uniform", "samples"] = Field(
        "uniform", description="weight of a worker in the mean: 1, or n_i, the samples of its shard"
    )
    trailing: Literal["synchronise", "leave"] = Field(
        "synchronise", description="a partial interval at the end of training is synchronised, or left as it is"
    )

    combination: ClassVar[str] = "mean"  # how replicas are combined, in a word or two

    @property
    def averaged_state(self) -> str:
        buffers = "+buffers" if self.buffers == "average" else ""
        return f"parameters{buffers}{'+optimizer' if self.optimizer_state == 'average' else ''}"

    @property
    def optimizer_state_policy(self) -> str:
        return self.optimizer_state

    @property
    def merge_policy(self) -> str:
        by = " by samples" if self.weighting == "samples" else ""
        return f"{self.combination}{by}{', partial interval left' if self.trailing == 'leave' else ''}"

    def weight(self, worker: Worker) -> float | None:
        return float(worker.samples) if self.weighting == "samples" else None

    def samples_of_all(self, worker: Worker) -> list[int]:
        """By which every worker weighs: the size of its shard, or 1."""
        if self.weighting == "uniform":
            return [1] * worker.size
        import torch

        mine = torch.tensor([worker.samples], device=worker.parameters.device)
        return [int(each) for each in worker.comm.allgather(mine)]

    def averaged(self, worker: Worker) -> list[Tensor]:
        """What is averaged, as the options say, the flat parameters first."""
        tensors = [worker.parameters]
        if self.buffers == "average":
            tensors += floating_buffers(worker)
        if self.optimizer_state == "average":
            tensors += optimizer_tensors(worker)
        return tensors

    def average(self, worker: Worker, comm: Communicator | None = None) -> None:
        """Average over `comm` (default: all workers) what the options say, in one collective."""
        if worker.size > 1:
            self.form_mean(comm or worker.comm, worker)
        self.after_average(worker)

    def form_mean(self, comm: Communicator, worker: Worker) -> None:
        average_(comm, self.averaged(worker), self.weight(worker))

    def after_average(self, worker: Worker) -> None:
        if self.optimizer_state == "reset":
            worker.reset_optimizer()

    @property
    def state_bytes(self) -> str:
        """Bytes of `averaged`: a formula of traffic.py."""
        buffers = " + n_b" if self.buffers == "average" else ""
        optimizer = " + n_o" if self.optimizer_state == "average" else ""
        return f"(n{buffers}{optimizer})" if buffers or optimizer else "n"


class Periodic(Averaging):
    """Local steps, and a synchronisation every `steps` of them.

    Steps are counted through the whole training: an interval may reach over the end of an epoch.
    """

    steps: int = Field(8, ge=1, description="H: local steps between two synchronisations, counted through all epochs")
    first: int | None = Field(None, ge=1, description="local steps before the first synchronisation; default: H")

    sync_unit: ClassVar[str] = "batch"

    @property
    def sync_every(self) -> int:
        return self.steps

    def first_interval(self, steps: int) -> tuple[int, int]:
        return 0, self.first or self.steps

    def due(self, taken: int) -> bool:
        """Whether replicas synchronise after `taken` steps."""
        first = self.first or self.steps
        return taken >= first and (taken - first) % self.steps == 0

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        last = last_step(self, worker, epoch)
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
        ended = worker.is_last(epoch) and self.trailing == "synchronise"
        return worker.size == 1 or ended or self.due(worker.state.taken)

    @property
    def syncs_formula(self) -> str:
        return every("steps", "first" if self.first else "", partial=self.trailing == "synchronise")


class LocalEpochs(Averaging):
    """Whole epochs alone, and a synchronisation after every `every` of them."""

    every: int = Field(1, ge=1, description="epochs between two synchronisations")
    optimizer_state: Literal["keep", "average", "reset", "reset_per_block"] = Field(  # type: ignore[assignment]
        "keep",
        description="momentum and the like stay local, are averaged too, or are forgotten: at each average, or at each "
        "ds-tensor block",
    )

    sync_unit: ClassVar[str] = "epoch"

    @property
    def sync_every(self) -> int:
        return self.every

    def advice(self, training: Training) -> list[str]:
        return too_seldom("every", self.every, training.epochs)

    def due(self, epoch: int, epochs: int) -> bool:
        """Whether `epoch` (0-based) of `epochs` ends with a synchronisation."""
        return (epoch + 1) % self.every == 0 or (epoch == epochs - 1 and self.trailing == "synchronise")

    def batches(self, worker: Worker, epoch: int) -> Iterator[Batch]:
        """What a worker trains on in `epoch`."""
        return worker.batches(epoch)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in self.batches(worker, epoch):
            if batch.first_of_block and self.optimizer_state == "reset_per_block":
                worker.reset_optimizer()
            worker.local_step(batch)
        if self.due(epoch, worker.epochs):
            self.synchronise(worker)

    def synchronise(self, worker: Worker) -> None:
        self.average(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.size == 1 or self.due(epoch, worker.epochs)

    @property
    def syncs_formula(self) -> str:
        return every_epochs("every", self.trailing == "synchronise")


def too_seldom(option: str, period: int, epochs: int) -> list[str]:
    """A warning where not one period of so many epochs fits into the training."""
    if period <= epochs:
        return []
    training = f"the {epochs} epoch{'s' * (epochs > 1)}"
    return [f"{option} {period} is more than {training}: replicas do not meet before training ends"]


def last_step(strategy: Averaging, worker: Worker, epoch: int) -> int:
    """The step of `epoch` after which even a partial interval is synchronised; -1: there is none."""
    return worker.steps_in(epoch) - 1 if worker.is_last(epoch) and strategy.trailing == "synchronise" else -1
