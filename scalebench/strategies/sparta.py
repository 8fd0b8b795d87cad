"""SPARTA: after every step a random share of the weights is averaged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from scalebench.strategies.averaging import Averaging
from scalebench.strategies.base import Batch, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_
from scalebench.strategies.traits import Stretch, Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@register()
class Sparta(Averaging):
    """After each local step  w_i[j] <- mean_i w_i[j]  for ceil(share n) of the n weights, drawn anew.

    EXO Labs, 2025 (exo-explore/gym): sparse parameter averaging. All workers draw the
    same weights, from the study's seed, so that their places do not travel. Here each
    draw is independent, and one of two equal draws is lost (their code draws each
    weight with probability `share`): s of n stands for 1 - (1 - 1/n)^(s n) of them,
    0.995 of s at s = 0.01. share n numbers a step, in one allreduce. Buffers, and
    optimizer state where it is averaged, take their mean with every step's draw. The
    model handed out is the mean of all.
    """

    share: float = Field(
        0.005,
        gt=0,
        le=1,
        description="share of the weights that is averaged after a step",
    )

    name = "sparta"
    summary = "a random share of the weights averaged after every batch (option share)"
    source = "EXO Labs, 2025, exo-explore/gym (SPARTA)"

    def setup(self, worker: Worker) -> None:
        # Of its own, as models draw from torch's as often as their batches ask for.
        worker.state.generator = torch.Generator().manual_seed(worker.seed)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            self._step(worker, batch)
        if self.ends_training(worker, epoch):
            self.average(worker)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self._step(worker, batch)
        # So that draws do not depend on whether there was a warm-up.
        worker.state.generator.manual_seed(worker.seed)

    def _step(self, worker: Worker, batch: Batch) -> None:
        worker.local_step(batch)
        if worker.size == 1:
            return
        # Places do not travel: all workers draw the same.
        places = worker.clock.work(self._draw, worker)
        chosen = worker.clock.work(worker.parameters.index_select, 0, places)
        average_(worker.comm, [chosen, *self.averaged(worker)[1:]], self.weight(worker))
        worker.clock.work(self._put_back, worker.parameters, places, chosen)
        self.after_average(worker)

    def _draw(self, worker: Worker) -> Tensor:
        """Return places of weights, the same on every worker."""
        n = worker.parameters.numel()
        places = torch.empty(
            math.ceil(self.share * n),
            dtype=torch.int64,
            device=_host(worker.parameters),
        )
        return places.random_(0, n, generator=worker.state.generator).to(
            worker.parameters.device
        )

    def _put_back(self, weights: Tensor, places: Tensor, chosen: Tensor) -> None:
        weights.index_copy_(0, places, chosen)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.size == 1 or self.ends_training(worker, epoch)

    @property
    def traits(self) -> Traits:
        return self.repeated(Stretch())

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(1, merge=f"mean of {self.share:g} of the weights")


def _host(like: Tensor) -> str:
    """Return the device to draw on: the same numbers come from every device; without values there are none."""
    return "meta" if like.is_meta else "cpu"
