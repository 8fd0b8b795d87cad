"""AD-PSGD: each step averages with one random neighbour, which continues to compute meanwhile."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging, too_few_steps
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import packed, unpack_
from scalebench.strategies.traits import Stretch, Traits
from scalebench.system.clock import Task

if TYPE_CHECKING:
    from torch import Tensor


@register()
class AdPsgd(Averaging):
    """Every worker hosts its model x_i, into which others merge. In a step, with g_i the gradient at the x_i last read,

        x_i, x_j <- (x_i + x_j) / 2       a random neighbour j, exclusive access to both, taken in order of rank
        x_i <- x_i - eta g_i              exclusive access to x_i, by whatever optimizer the study has, weight decay
                                          of the x_i last read; read again

    Lian et al., ICML 2018, arXiv 1710.06952, algorithm 1. j takes no part: it finds its
    model changed when it updates. A worker waits only for an access under way, whereas
    partners in `gossip` with `peers: pair` meet and wait for each other. Staleness:
    merges of others into x_i between the read that g_i was computed at and the update.
    Weighted by samples, the mean of two is (n_i x_i + n_j x_j) / (n_i + n_j). Buffers
    and optimizer state, where they are averaged, lie beside the weights; what a forward
    pass adds to the statistics is added to what lies there. The model handed out is the
    mean of all, formed when the last worker has done its last step.
    """

    neighbours: Literal["any", "ring"] = Field(
        "any", description="who may be drawn: any worker, or two on a ring"
    )
    every: int = Field(
        1, ge=1, description="batches between two averagings of a worker"
    )

    name = "ad_psgd"
    summary = "weights averaged with a random neighbour's, who does not wait"
    source = "Lian et al., ICML 2018, arXiv 1710.06952"
    requires = frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE})
    engines = ("mpi",)
    deterministic = False

    def setup(self, worker: Worker) -> None:
        state, initial = worker.state, packed(self.averaged(worker)).clone()
        state.models = [worker.share(initial, host) for host in range(worker.size)]
        state.samples = self.weights_of_all(worker)
        state.draw = random.Random(worker.seed * 1_000_003 + worker.rank)  # noqa: S311  each worker its own
        state.neighbours = neighbours_of(worker.rank, worker.size, self.neighbours)
        state.taken = 0
        state.read, state.accesses = (
            initial,
            0,
        )  # x_i as last read, and how many accesses to it came before

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            worker.gradient(batch)
            worker.state.taken += 1
            averages = worker.state.taken % self.every == 0
            if averages:
                self._average_with(
                    worker, worker.state.draw.choice(worker.state.neighbours)
                )
            self._update(worker, int(averages))
        if worker.is_last(epoch):
            # until then others may merge into this worker's model
            worker.comm.barrier()
            with worker.state.models[worker.rank].exclusive(counted=False) as model:
                unpack_(model, self.averaged(worker))
            if self.trailing == "synchronise":
                self.average(worker)

    def _average_with(self, worker: Worker, neighbour: int) -> None:
        models, samples = worker.state.models, worker.state.samples
        low, high = sorted((worker.rank, neighbour))
        with models[low].exclusive(counted=low == neighbour) as mean:
            # the first access, before the second one begins to count
            worker.clock.did(Task.COMM)
            with models[high].exclusive(counted=high == neighbour) as other:
                worker.clock.work(
                    _meet, mean, other, samples[high] / (samples[low] + samples[high])
                )
        self.after_average(worker)

    def _update(self, worker: Worker, own: int) -> None:
        """Update x_i, into which this worker itself merged `own` times since it read it."""
        state, tensors, model = (
            worker.state,
            self.averaged(worker),
            worker.state.models[worker.rank],
        )
        with model.exclusive(counted=False) as x:
            worker.clock.did(Task.COMM)
            since = model.merges - state.accesses
            if since:
                weights = worker.parameters.numel()
                if len(tensors) > 1:
                    # the statistics of the forward pass; weights are as read
                    x.add_(packed(tensors) - state.read)
                    unpack_(x[weights:], tensors[1:])
                # The gradient, and with it the weight decay, is of the weights as read.
                worker.update(onto=x[:weights])
            else:
                worker.update()
            worker.clock.work(self._write, worker, x)
            if len(tensors) > 1:
                state.read = x.clone()
            state.accesses = model.merges + 1
        worker.observe("staleness", since - own)

    def _write(self, worker: Worker, x: Tensor) -> None:
        x.copy_(packed(self.averaged(worker)))

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return self.ends_training(worker, epoch)

    @property
    def traits(self) -> Traits:
        return self.repeated(Stretch(period=self.every), interval="every")

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.every, merge="asynchronous pair mean")

    def check(self, setting: Setting) -> list[str]:
        if setting.workers == 1:
            raise StudyError(
                "strategy ad_psgd at 1 worker: there is nobody to average with; start at 2 workers"
            )
        return too_few_steps(setting, self.every)


def _meet(mean: Tensor, other: Tensor, share: float) -> None:
    mean.lerp_(other, share)
    other.copy_(mean)


def neighbours_of(rank: int, size: int, kind: str) -> list[int]:
    """Ranks that `rank` may average with: all others, or those beside it on a ring (one, of two workers)."""
    if kind == "ring":
        return sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return [other for other in range(size) if other != rank]
