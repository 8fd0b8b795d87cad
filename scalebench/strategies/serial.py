"""The plain loop at one worker: base of every speedup."""

from __future__ import annotations

from scalebench.strategies.base import Strategy, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Stretch, Traits


@register()
class Serial(Strategy):
    """w <- w - eta g, one worker, no communication."""

    name = "serial"
    summary = "the plain training loop at one worker"
    source = "base of speedup"
    requires = frozenset()
    engines = ("mpi",)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        worker.local_steps(worker.batches(epoch))

    @property
    def traits(self) -> Traits:
        return Traits(
            stretches=(Stretch(unit="epoch"),),
            # The batches of one worker are all there are.
            mean_over_global_batch=True,
            resumes=True,
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return Synchronisation(every=0, unit="none", merge="none")

    def arithmetic(self, workers: int) -> str | None:
        return "serial"
