"""Federated averaging: in each round some clients train on data that never leave them, and are averaged."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging, too_few_epochs
from scalebench.strategies.base import Batch, Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_
from scalebench.strategies.traits import Stretch, Traits


@register()
class FedAvg(Averaging):
    """A round: the chosen clients S train `local_epochs` epochs from w; then w <- sum_S n_i w_i / sum_S n_i.

    McMahan et al., AISTATS 2017, arXiv 1602.05629. floor(fraction K) clients are drawn
    from the study's seed and the round; n_i is the number of client i's samples. The
    others do nothing in that round and get the new model. Clients begin each round
    without momentum unless told otherwise. Partition: `iid`, or `dirichlet` by label.
    """

    fraction: float = Field(
        1.0, gt=0, le=1, description="of the clients that are chosen in each round"
    )
    local_epochs: int = Field(1, ge=1, description="epochs of a round")
    optimizer_state: Literal["keep", "average", "reset"] = Field(
        "reset",
        description="momentum and the like stay local, are averaged too, or are forgotten with each round",
    )
    weighting: Literal["uniform", "samples"] = Field(
        "samples",
        description="weight of a client in the mean: 1, or n_i, the samples of its shard",
    )

    name = "fedavg"
    summary = (
        "a sample of clients trains some epochs, weights averaged by their samples"
    )
    source = "McMahan et al., AISTATS 2017, arXiv 1602.05629"

    def chosen_of(self, workers: int) -> int:
        """Number of clients of a round."""
        # 0.29 of 100 is 28.999999999999996 in floating point.
        return int(self.fraction * workers + 1e-9)

    def clients(self, seed: int, round_: int, workers: int) -> Collection[int]:
        """The clients of a round, the same on every worker."""
        chosen = self.chosen_of(workers)
        if chosen == workers:
            return range(workers)
        # By seed and round alone, so that workers agree without a message.
        draw = random.Random(f"{seed} {round_}")  # noqa: S311
        return set(draw.sample(range(workers), chosen))

    def setup(self, worker: Worker) -> None:
        worker.state.anchor = worker.parameters.clone()

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        takes_part = worker.rank in self.clients(
            worker.seed, epoch // self.local_epochs, worker.size
        )
        batches = worker.batches(epoch)
        if takes_part:
            self.take_steps(worker, batches)
        else:
            next(batches)  # its rows may go to other workers
        if self.in_agreement(worker, epoch):
            if worker.size > 1:
                # The others take part in the collective with weight 0, and get the new
                # model by it.
                mine = float(worker.samples) if self.weighting == "samples" else 1.0
                average_(
                    worker.comm, self.averaged(worker), mine if takes_part else 0.0
                )
            worker.state.anchor.copy_(worker.parameters)
            self.after_average(worker)

    def take_steps(self, worker: Worker, batches: Iterator[Batch]) -> None:
        worker.local_steps(batches)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return (epoch + 1) % self.local_epochs == 0 or self.ends_training(worker, epoch)

    @property
    def traits(self) -> Traits:
        return replace(
            self.repeated(Stretch(period=self.local_epochs, unit="epoch")),
            fraction=self.fraction,
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.local_epochs, "epoch", merge="mean of a sample")

    def check(self, setting: Setting) -> list[str]:
        workers, shuffle = setting.workers, setting.training.shuffle
        if shuffle not in ("none", "in_block"):
            raise StudyError(
                f"strategy {self.name}: shuffle {shuffle} moves rows between clients, whose data never leave them; "
                "write shuffle: in_block or none"
            )
        if self.chosen_of(workers) < 1:
            raise StudyError(
                f"strategy {self.name}: option 'fraction' {self.fraction:g} of {workers} workers selects nobody; use "
                f"{1 / workers:.3g} or more, or start at {int(-(-1 // self.fraction))} workers"
            )
        return too_few_epochs(setting, "local_epochs", self.local_epochs)


@register()
class FedProx(FedAvg):
    """`fedavg` whose clients are held near the model they began with: the gradient gains mu (w_i - w).

    Li et al., MLSys 2020, arXiv 1812.06127. mu = 0 is `fedavg`.
    """

    mu: float = Field(
        0.01, ge=0, description="of the proximal term, mu/2 times the squared distance"
    )

    name = "fedprox"
    summary = "fedavg with a proximal term that holds clients near the common model"

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in fedavg

    source = "Li et al., MLSys 2020, arXiv 1812.06127"
    requires = frozenset({Capability.BATCHES, Capability.COLLECTIVES})

    def take_steps(self, worker: Worker, batches: Iterator[Batch]) -> None:
        for batch in batches:
            worker.gradient(batch)
            worker.clock.work(self._hold, worker)
            worker.update()

    def _hold(self, worker: Worker) -> None:
        worker.gradients.add_(worker.parameters - worker.state.anchor, alpha=self.mu)
