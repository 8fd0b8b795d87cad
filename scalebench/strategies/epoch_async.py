"""Asynchronous epoch averaging: after an epoch, merge with a shared model and go on, waiting for nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.registry import register


@register()
class EpochAsync(Strategy):
    """With exclusive access to the shared model g, which starts as the initial weights, worker j merges

        half:       g <- (g + w_j) / 2,          then w_j <- g
        inverse_k:  g <- (1 - 1/K) g + w_j / K,  then w_j <- g

    at the end of each epoch e with (e + 1) mod `every` = 0. After all epochs the model is the plain mean of the w_j.
    Vazquez-Novoa et al., WACCPD 2025 (`half`). In one round of `half` the last merger weighs 1/2, the first 2^-K.
    The order of the merges, each one's staleness (merges of others since the worker's own last) and every worker's
    weight in the final model (`merge_order.final_weights`) are recorded.
    """

    every: int = Field(1, ge=1, description="epochs between two merges of a worker")
    merge: Literal["half", "inverse_k"] = Field("half", description="weight of the merging worker: 1/2 or 1/K")
    optimizer_state: Literal["keep", "reset", "reset_per_block"] = Field(
        "keep", description="momentum stays local, is forgotten at each merge, or at each ds-tensor block"
    )

    name: ClassVar[str] = "epoch_async"
    summary: ClassVar[str] = "weights merged into a shared model every n epochs, without a barrier"
    source: ClassVar[str] = "Vazquez-Novoa et al., WACCPD 2025, asynchronous"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE})
    engines: ClassVar[tuple[str, ...]] = ("mpi",)
    asynchronous: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False
    sync_unit: ClassVar[str] = "epoch"

    @property
    def optimizer_state_policy(self) -> str:
        return self.optimizer_state

    @property
    def sync_every(self) -> int:
        return self.every

    @property
    def merge_policy(self) -> str:
        return self.merge

    def setup(self, worker: Worker) -> None:
        worker.state.shared = worker.shared
        worker.state.fetched = -1  # the place among all merges of what this worker goes on from

    def batches(self, worker: Worker, epoch: int) -> Iterator[Batch]:
        """What a worker trains on in `epoch`."""
        return worker.batches(epoch)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in self.batches(worker, epoch):
            if batch.first_of_block and self.optimizer_state == "reset_per_block":
                worker.reset_optimizer()
            worker.local_step(batch)
        if (epoch + 1) % self.every == 0:
            self._merge(worker)

    def _merge(self, worker: Worker) -> None:
        shared = worker.state.shared
        with shared.exclusive() as model:
            position = shared.merges
            model.lerp_(worker.parameters, self.weight(worker.size))
            worker.parameters.copy_(model)
        worker.observe("staleness", position - worker.state.fetched - 1)
        worker.observe("merge_position", position)
        worker.state.fetched = position
        if self.optimizer_state == "reset":
            worker.reset_optimizer()
        if (position + 1) % worker.size == 0:
            rounds = (position + 1) // worker.size
            worker.snapshot(rounds * self.every - 1, worker.parameters)

    def weight(self, workers: int) -> float:
        """Of the worker that merges."""
        return 0.5 if self.merge == "half" else 1.0 / workers

    def final_weights(self, merges: Sequence[Iterable[int]], epochs: int) -> list[float]:
        from scalebench.strategies.merge_order import final_weights, merge_order

        workers = len(merges)
        return final_weights(merge_order(merges), workers, epochs, self.every, self.weight(workers))

    def finish(self, worker: Worker) -> None:
        worker.comm.allreduce_(worker.parameters, "mean")

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.is_last(epoch)

    @property
    def syncs_formula(self) -> str:
        return "(1 if (e + 1) % every == 0 else 0) + last"
