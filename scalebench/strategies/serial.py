"""The plain loop at one worker: base of every speedup."""

from __future__ import annotations

from typing import ClassVar

from scalebench.comm.base import Capability
from scalebench.strategies.base import Strategy, Worker
from scalebench.strategies.registry import register


@register()
class Serial(Strategy):
    """w <- w - eta g, one worker, no communication."""

    name: ClassVar[str] = "serial"
    summary: ClassVar[str] = "the plain training loop at one worker"
    source: ClassVar[str] = "base of speedup"
    requires: ClassVar[frozenset[Capability]] = frozenset()
    engines: ClassVar[tuple[str, ...]] = ("mpi",)
    single_worker: ClassVar[bool] = True
    sync_unit: ClassVar[str] = "none"

    @property
    def sync_every(self) -> int:
        return 0

    @property
    def merge_policy(self) -> str:
        return "none"

    def arithmetic(self, workers: int) -> str | None:
        return "serial"

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            worker.local_step(batch)

    @property
    def syncs_formula(self) -> str:
        return "0"

    @property
    def bytes_formula(self) -> str:
        return "0"
