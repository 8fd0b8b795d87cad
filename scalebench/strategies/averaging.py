"""Base of the strategies that average replicas: averaged state, weights of the mean, state of the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from scalebench.comm.base import Communicator
from scalebench.strategies.base import Setting, Strategy, Synchronisation, Worker
from scalebench.strategies.replica_state import (
    average_,
    floating_buffers,
    optimizer_tensors,
)
from scalebench.strategies.traits import Stretch, Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor


PerBlock = Annotated[
    Literal["keep", "average", "reset", "reset_per_block"],
    Field(
        description="momentum and the like stay local, are averaged too, or are forgotten: at each average, or at each "
        "ds-tensor block"
    ),
]


class Averaging(Strategy):
    """Replicas that average their state; published comparisons disagree where these policies are not given.

    Only floating-point buffers (BatchNorm's statistics) are averaged; counters stay.
    Weighted by samples the mean is sum_i n_i w_i / sum_i n_i with n_i the size of
    worker i's shard. `trailing: leave`: no average after a partial last interval of the
    training; the final model is still the mean of the replicas.
    """

    # Statistics left local fail silently: weights agree, and what normalises them does
    # not. PyTorch's post-local SGD once lost 7 points of ImageNet accuracy to faults of
    # its averager.
    buffers: Literal["average", "keep"] = Field(
        "average",
        description="what becomes of the model's floating-point buffers: BatchNorm's statistics",
    )
    optimizer_state: Literal["keep", "average", "reset"] = Field(
        "keep",
        description="momentum and the like stay local, are averaged too, or are forgotten at each average",
    )
    weighting: Literal["uniform", "samples"] = Field(
        "uniform",
        description="weight of a worker in the mean: 1, or n_i, the samples of its shard",
    )
    # Torch's averagers leave it: their replicas differ when training ends.
    trailing: Literal["synchronise", "leave"] = Field(
        "synchronise",
        description="a partial interval at the end of training is synchronised, or left as it is",
    )

    def averaged_every(
        self, every: int, unit: Literal["batch", "epoch"] = "batch", merge: str = "mean"
    ) -> Synchronisation:
        """The synchronisation by these policies, every `every` batches or epochs."""
        buffers = "+buffers" if self.buffers == "average" else ""
        optimizer = "+optimizer" if self.optimizer_state == "average" else ""
        by = " by samples" if self.weighting == "samples" else ""
        left = ", partial interval left" if self.trailing == "leave" else ""
        averaged = f"parameters{buffers}{optimizer}"
        return Synchronisation(
            every, unit, averaged, self.optimizer_state, f"{merge}{by}{left}"
        )

    @property
    def traits(self) -> Traits:
        return Traits(local_steps=True, averages_buffers=self.buffers == "average")

    def repeated(self, *stretches: Stretch, interval: str | None = None) -> Traits:
        """Return the traits of replicas whose program consists of `stretches`; `interval`: the option of the last."""
        averages = self.buffers == "average"
        return Traits(
            stretches,
            local_steps=True,
            averages_buffers=averages,
            options={} if interval is None else {"interval": interval},
        )

    def averaged(self, worker: Worker) -> list[Tensor]:
        """The tensors that are averaged, the flat parameters first."""
        tensors = [worker.parameters]
        if self.buffers == "average":
            tensors += floating_buffers(worker)
        if self.optimizer_state == "average":
            tensors += optimizer_tensors(worker)
        return tensors

    def average(self, worker: Worker, comm: Communicator | None = None) -> None:
        """Average over `comm` (default: all workers): x <- sum_i weight_i x_i / sum_i weight_i, in one collective."""
        if worker.size > 1:
            average_(comm or worker.comm, self.averaged(worker), self.weight(worker))
        self.after_average(worker)

    def after_average(self, worker: Worker) -> None:
        if self.optimizer_state == "reset":
            worker.reset_optimizer()

    def weight(self, worker: Worker) -> float | None:
        """Weight of this worker in the mean; None: all weigh the same."""
        return float(worker.samples) if self.weighting == "samples" else None

    def weights_of_all(self, worker: Worker) -> list[int]:
        """Weight of every worker: the size of its shard, or 1. Collective."""
        if self.weighting == "uniform":
            return [1] * worker.size

        mine = torch.tensor(
            [worker.samples],
            # NCCL carries no tensors of the host.
            device=worker.gradients.device if worker.gradients.is_cuda else "cpu",
        )
        return [int(each) for each in worker.comm.allgather(mine)]

    def last_step(self, worker: Worker, epoch: int) -> int:
        """The step of `epoch` after which even a partial interval is synchronised; -1: there is none."""
        return worker.steps_in(epoch) - 1 if self.ends_training(worker, epoch) else -1

    def ends_training(self, worker: Worker, epoch: int) -> bool:
        """Return True after the last epoch, where even a partial interval is synchronised."""
        return worker.is_last(epoch) and self.trailing == "synchronise"

    def consensus(self, worker: Worker) -> Tensor:
        """The weighted mean of the replicas; their buffers are averaged in place."""
        vector = worker.parameters.detach().clone()
        if worker.size > 1:
            worker.comm.allreduce_(vector, "mean", weight=self.weight(worker))
            # Those of one replica fit its own weights, not the mean.
            if self.buffers == "average" and (statistics := floating_buffers(worker)):
                average_(worker.comm, statistics, self.weight(worker))
        return vector


def train_shard(worker: Worker, epoch: int, optimizer_state: str) -> None:
    """Take the local steps of `epoch`, with a new optimizer for each ds-tensor block if `optimizer_state` says so."""
    # As dislib, each task of which makes an optimizer for its block.
    resets = optimizer_state == "reset_per_block"
    worker.local_steps(worker.batches(epoch), reset_per_block=resets)


def local_intervals(
    worker: Worker, epoch: int, due: Callable[[int], bool]
) -> Iterator[bool]:
    """Take the local steps of `epoch`, and stop where `due(steps so far)` says so and at the end, which is True.

    `worker.state.taken` counts the steps through all epochs.
    """
    state, batches, left = worker.state, worker.batches(epoch), worker.steps_in(epoch)
    while left:
        steps = next(
            (count for count in range(1, left) if due(state.taken + count)), left
        )
        # As one call, in which virtual runs compute the steps of all workers together.
        worker.local_steps(batches, steps)
        state.taken += steps
        left -= steps
        yield left == 0


def too_few_steps(setting: Setting, interval: int, start: int = 0) -> list[str]:
    """Warning where training ends before the first synchronisation, `interval` local steps after `start` steps."""
    if setting.workers == 1 or setting.steps is None:
        return []
    steps, first = setting.training.epochs * setting.steps, start + interval
    if first <= steps:
        return []
    return [
        f"the first average of weights comes after {first} steps, but the training has {steps}"
    ]


def too_few_epochs(setting: Setting, option: str, interval: int) -> list[str]:
    """Warning where `interval` epochs, the value of `option`, are more than the training has."""
    epochs = setting.training.epochs
    if setting.workers == 1 or interval <= epochs:
        return []
    training = f"the {epochs} epoch{'s' * (epochs > 1)}"
    return [
        f"{option} {interval} is more than {training}: replicas do not meet before training ends"
    ]
