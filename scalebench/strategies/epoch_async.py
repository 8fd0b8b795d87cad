"""Asynchronous epoch averaging: after an epoch, merge with a shared model and continue without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.strategies import averaging
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_, packed, unpack_
from scalebench.strategies.traits import Stretch, Traits

if TYPE_CHECKING:
    from torch import Tensor


@register()
class EpochAsync(averaging.Averaging):
    """With exclusive access to the shared model g, which starts as the initial weights, worker j merges

        half:       g <- (g + w_j) / 2,          then w_j <- g
        inverse_k:  g <- (1 - 1/K) g + w_j / K,  then w_j <- g

    at the end of each epoch e with (e + 1) mod `every` = 0. After all epochs the model
    is the plain mean of the w_j. Vazquez-Novoa et al., WACCPD 2025 (`half`). In one
    round of `half` the last merger weighs 1/2, the first 2^-K. Weighted by samples, 1/K
    is n_j / sum_i n_i, in `inverse_k` and in the final mean. Buffers and optimizer
    state, where they are averaged, lie beside the weights in g and are merged as they
    are. The order of the merges, each one's staleness (merges of others since the
    worker's own last) and every worker's weight in the final model are recorded.
    """

    every: int = Field(1, ge=1, description="epochs between two synchronisations")
    optimizer_state: averaging.PerBlock = "keep"  # type: ignore[assignment]
    merge: Literal["half", "inverse_k"] = Field(
        "half", description="weight of the merging worker: 1/2 or 1/K"
    )
    trailing: Literal["synchronise", "leave"] = Field(
        "leave",
        description="a partial interval at the end is merged before the final mean, or not (the paper's rule)",
    )

    name = "epoch_async"
    summary = "weights merged into a shared model every n epochs, without a barrier"
    source = "Vazquez-Novoa et al., WACCPD 2025, asynchronous"
    requires = frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE})
    engines = ("mpi",)
    deterministic = False

    def setup(self, worker: Worker) -> None:
        worker.state.shared = worker.share(packed(self.averaged(worker)).clone())
        # position, among all merges, of the model this worker last took
        worker.state.fetched = -1
        worker.state.share = self.share_of(worker.rank, self.weights_of_all(worker))

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        averaging.train_shard(worker, epoch, self.optimizer_state)
        if (epoch + 1) % self.every == 0 or self.ends_training(worker, epoch):
            self.merge_with_shared(worker)

    def merge_with_shared(self, worker: Worker) -> None:
        shared, state = worker.state.shared, worker.state
        with shared.exclusive() as model:
            position = shared.merges
            # Reading and writing are one access: of two at once one would be lost.
            worker.clock.work(self._merge, worker, model)
        worker.observe("staleness", position - state.fetched - 1)
        worker.observe("merge_position", position)
        state.fetched = position
        self.after_average(worker)
        # K merges make a round; what the last of them left stands for its epoch.
        if (position + 1) % worker.size == 0:
            rounds = (position + 1) // worker.size
            worker.snapshot(
                min(rounds * self.every, worker.epochs) - 1, worker.parameters
            )

    def _merge(self, worker: Worker, model: Tensor) -> None:
        replica = self.averaged(worker)
        model.lerp_(packed(replica), worker.state.share)  # g <- g + share (w_j - g)
        unpack_(model, replica)

    def finish(self, worker: Worker) -> None:
        if worker.size > 1:
            average_(worker.comm, self.averaged(worker), self.weight(worker))

    def in_agreement(self, worker: Worker, epoch: int) -> None:
        return None

    def share_of(self, worker: int, samples: Sequence[int]) -> float:
        """Weight of `worker` in its merges."""
        # In a round of halves the last merger weighs 1/2, the first 2^-K.
        return 0.5 if self.merge == "half" else samples[worker] / sum(samples)

    def final_weights(
        self, merges: Sequence[Iterable[int]], epochs: int, samples: Sequence[int]
    ) -> list[float]:
        """(workers,) weight of each worker's training in the final model.

        `merges`: positions of each worker's merges among all; `samples`: sizes of their
        shards.
        """
        counted = [1] * len(merges) if self.weighting == "uniform" else samples
        shares = [self.share_of(worker, counted) for worker in range(len(merges))]
        return final_weights(
            merge_order(merges), len(merges), epochs, self.every, shares, counted
        )

    @property
    def traits(self) -> Traits:
        stated = self.repeated(
            Stretch(period=self.every, unit="epoch"), interval="every"
        )
        return replace(stated, final_weights=self.final_weights)

    @property
    def synchronisation(self) -> Synchronisation:
        by = " by samples" if self.weighting == "samples" else ""
        partial = ", partial interval merged" if self.trailing == "synchronise" else ""
        return replace(
            self.averaged_every(self.every, "epoch"), merge=f"{self.merge}{by}{partial}"
        )

    def check(self, setting: Setting) -> list[str]:
        return averaging.too_few_epochs(setting, "every", self.every)


def merge_order(positions: Sequence[Iterable[int]]) -> list[int]:
    """The worker of each merge, first to last, from each worker's 0-based `positions` among all merges."""
    merged = sorted(
        (position, worker) for worker, own in enumerate(positions) for position in own
    )
    return [worker for _, worker in merged]


def final_weights(
    order: Sequence[int],
    workers: int,
    epochs: int,
    every: int,
    shares: float | Sequence[float],
    samples: Sequence[int] | None = None,
) -> list[float]:
    """(workers,) weight of each worker's training in the final model; 1/K in a plain average.

    A worker's training between two merges is an increment to its weights. Merging, g <-
    g + a_j (w_j - g), w_j <- g, and the mean in the end (by `samples`; default: plain)
    are linear: the final model is the initial one plus the sum of all increments, each
    times a factor. A worker's weight is the mean of its factors over its epochs. They
    sum to 1 in synchronous averaging, and to less here by what merging discards: only
    a_j (`shares`) of an increment gets into the shared model. A merge takes up to
    `every` epochs: the last one of a training may take fewer.
    """
    share = np.broadcast_to(shares, workers)
    # of replica i, the factor of worker j's training, 1 for all its epochs
    held = np.zeros((workers, workers))
    shared = np.zeros(workers)
    left = np.full(workers, epochs)
    for worker in order:
        taken = min(every, left[worker])
        left[worker] -= taken
        held[worker, worker] += taken / epochs
        shared += share[worker] * (held[worker] - shared)
        held[worker] = shared
    held[np.arange(workers), np.arange(workers)] += left / epochs
    factors: list[float] = np.average(held, axis=0, weights=samples).tolist()
    return factors
