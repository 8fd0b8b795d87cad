"""Synchronous data parallelism by one fused allreduce of the gradients per batch (BSP)."""

from __future__ import annotations

from typing import ClassVar

from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.registry import register


class PerBatch(Strategy):
    """Replicas that step together: they agree after every batch."""

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            self.step(worker, batch)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.step(worker, batch)

    def step(self, worker: Worker, batch: Batch) -> None:
        raise NotImplementedError

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True


def mean_of_gradients(workers: int) -> str:
    """The name of the arithmetic that all plain per-batch strategies share; a lone worker's is serial's."""
    return "serial" if workers == 1 else "mean of gradients"


@register()
class Allreduce(PerBatch):
    """w <- w - eta * sum_i n_i g_i / sum_i n_i after each batch, over one flat buffer.

    n_i is the number of samples in worker i's batch; with equal batches it is the plain mean of the gradients.
    """

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "gradients averaged after every batch in one fused collective"
    source: ClassVar[str] = "bulk-synchronous parallel SGD; Goyal et al., 2017, arXiv 1706.02677"

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        worker.comm.allreduce_(worker.gradients, "mean")
        worker.update()

    def arithmetic(self, workers: int) -> str | None:
        return mean_of_gradients(workers)
