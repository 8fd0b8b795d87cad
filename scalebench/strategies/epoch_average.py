"""Synchronous epoch averaging: train alone for whole epochs, then average the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.registry import register


@register()
class EpochAverage(Strategy):
    """Average the weights of all replicas every `every` epochs, and after the last one.

    w <- (1/K) sum_j w_j, then all restart from w.
    Vazquez-Novoa, Lopez, Flich and Badia, WACCPD 2025, "Epoch-Synchronous" (every = 1).
    Through a master the K vectors cross one node's link; by allreduce they do not.
    """

    every: int = Field(1, ge=1, description="epochs between two averages")
    aggregation: Literal["allreduce", "master"] = Field("allreduce", description="how the mean is formed")
    optimizer_state: Literal["keep", "reset", "reset_per_block"] = Field(
        "keep", description="momentum stays local, is forgotten at each average, or at each ds-tensor block"
    )

    name: ClassVar[str] = "epoch_average"
    summary: ClassVar[str] = "weights averaged every n epochs"
    source: ClassVar[str] = "Vazquez-Novoa et al., WACCPD 2025, Epoch-Synchronous"
    sync_unit: ClassVar[str] = "epoch"

    @property
    def optimizer_state_policy(self) -> str:
        return self.optimizer_state

    @property
    def sync_every(self) -> int:
        return self.every

    def arithmetic(self, workers: int) -> str | None:
        return "serial" if workers == 1 and self.optimizer_state == "keep" else None

    def batches(self, worker: Worker, epoch: int) -> Iterator[Batch]:
        """What a worker trains on in `epoch`."""
        return worker.batches(epoch)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in self.batches(worker, epoch):
            if batch.first_of_block and self.optimizer_state == "reset_per_block":
                worker.reset_optimizer()
            worker.local_step(batch)
        if self.averages_after(epoch, worker.epochs):
            self._average(worker)

    def averages_after(self, epoch: int, epochs: int) -> bool:
        return (epoch + 1) % self.every == 0 or epoch == epochs - 1

    def _average(self, worker: Worker) -> None:
        if self.aggregation == "allreduce":
            worker.comm.allreduce_(worker.parameters, "mean")
        else:
            worker.comm.reduce_(worker.parameters, 0, "mean")
            worker.comm.broadcast_(worker.parameters, 0)
        if self.optimizer_state == "reset":
            worker.reset_optimizer()

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.size == 1 or self.averages_after(epoch, worker.epochs)

    @property
    def syncs_formula(self) -> str:
        collectives = 2 if self.aggregation == "master" else 1
        return f"{collectives} if (e + 1) % every == 0 or last else 0"

    @property
    def bytes_formula(self) -> str:
        """A master takes n from every worker, itself among them, and sends n once."""
        return "n * (1 + 1 / K) * syncs / 2" if self.aggregation == "master" else super().bytes_formula
