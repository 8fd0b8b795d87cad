"""Synchronous epoch averaging: train alone for whole epochs, then average the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from scalebench.strategies import averaging
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_at_master_
from scalebench.strategies.traits import Stretch, Traits


@register()
class EpochAverage(averaging.Averaging):
    """Average the weights of all replicas every `every` epochs, and after the last one.

    w <- (1/K) sum_j w_j, then all restart from w. Vazquez-Novoa, Lopez, Flich and
    Badia, WACCPD 2025, "Epoch-Synchronous" (every = 1). `master`: worker 0 gathers all
    weights, adds them in the order of the workers and sends the mean to each: (K - 1) n
    bytes in and as many out over its link, (K - 1) (2 (a + n/B) + n gamma) seconds.
    This serial cost limits the reference at many workers. K: workers, n: bytes of the
    weights, a: latency, B: bandwidth, gamma: time to add a byte.
    """

    every: int = Field(1, ge=1, description="epochs between two synchronisations")
    aggregation: Literal["allreduce", "master"] = Field(
        "allreduce", description="how the mean is formed"
    )
    optimizer_state: averaging.PerBlock = "keep"  # type: ignore[assignment]

    name = "epoch_average"
    summary = "weights averaged every n epochs"
    source = "Vazquez-Novoa et al., WACCPD 2025, Epoch-Synchronous"

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        averaging.train_shard(worker, epoch, self.optimizer_state)
        if self.ends_interval(worker, epoch):
            self.average_all(worker)

    def ends_interval(self, worker: Worker, epoch: int) -> bool:
        return (epoch + 1) % self.every == 0 or self.ends_training(worker, epoch)

    def average_all(self, worker: Worker) -> None:
        if self.aggregation == "allreduce" or worker.size == 1:
            self.average(worker)
        else:
            # As the reference does it; K n bytes at one link are its limit.
            average_at_master_(worker.comm, self.averaged(worker), self.weight(worker))
            self.after_average(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.size == 1 or self.ends_interval(worker, epoch)

    @property
    def traits(self) -> Traits:
        return replace(
            self.repeated(Stretch(period=self.every, unit="epoch"), interval="every"),
            resumes=True,
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.every, "epoch")

    def check(self, setting: Setting) -> list[str]:
        return averaging.too_few_epochs(setting, "every", self.every)

    def arithmetic(self, workers: int) -> str | None:
        return (
            "serial"
            # A lone worker that forgets its momentum is not serial.
            if workers == 1 and self.optimizer_state in ("keep", "average")
            else None
        )
