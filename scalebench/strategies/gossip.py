"""Gossip: every worker mixes its weights with a few others', and no operation involves all."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Capability
from scalebench.errors import StudyError
from scalebench.strategies.base import Strategy, Worker
from scalebench.strategies.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register()
class Gossip(Strategy):
    """w_i <- sum_j W_ij w_j - eta g_i,  g_i: the gradient at w_i before mixing (by whatever optimizer the study has).

        ring:  W = 1/3 for a worker and its two neighbours (1/2 where there are two workers)
        pair:  W = 1/2 for a worker and a partner drawn anew; with an odd number one worker sits out

    Lian et al., NeurIPS 2017, arXiv 1705.09056 (D-PSGD) and ICML 2018, arXiv 1710.06952 (AD-PSGD). `pair` is a
    reconstruction: a round of a round-robin tournament, drawn from the study's seed, tells both partners whom to meet,
    so that a worker waits for its partner and for nobody else; in the paper a partner answers from a second thread.
    The model handed out is the mean of all, which the end of training forms.
    """

    peers: Literal["ring", "pair"] = Field("ring", description="whom a worker mixes with")
    every: int = Field(1, ge=1, description="batches between two mixings")

    name: ClassVar[str] = "gossip"
    summary: ClassVar[str] = "weights mixed with neighbours on a ring, or with a random partner"
    source: ClassVar[str] = "Lian et al., NeurIPS 2017, arXiv 1705.09056 and ICML 2018, arXiv 1710.06952"
    requires: ClassVar[frozenset[Capability]] = frozenset({Capability.COLLECTIVES, Capability.POINT_TO_POINT})
    engines: ClassVar[tuple[str, ...]] = ("mpi", "gloo", "nccl")

    @property
    def sync_every(self) -> int:
        return self.every

    @property
    def merge_policy(self) -> str:
        return f"{self.peers} mean"

    def check(self, workers: int, workers_per_node: int) -> list[str]:
        if workers == 1:
            raise StudyError("strategy gossip at 1 worker: there is nobody to mix with; start at 2 workers")
        return []

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        worker.state.draw = random.Random(worker.seed)  # noqa: S311  the same on every worker
        worker.state.received = worker.parameters.clone()

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            worker.gradient(batch)
            worker.state.taken += 1
            if worker.state.taken % self.every == 0:
                self._mix(worker)
            worker.update()
        if worker.is_last(epoch):
            worker.comm.allreduce_(worker.parameters, "mean")

    def _mix(self, worker: Worker) -> None:
        if self.peers == "ring":
            mixed, members = worker.parameters.clone(), 1
            for step in (1, -1)[: worker.size - 1]:  # two workers are one another's only neighbour
                mixed.add_(_passed_on(worker, step))
                members += 1
            worker.parameters.copy_(mixed.div_(members))
            worker.comm.count(0)
            return
        partner = partner_of(worker.rank, worker.size, worker.state.draw)
        if partner == worker.rank:
            return
        if worker.rank < partner:
            worker.comm.send(worker.parameters, partner)
            worker.comm.recv_(worker.state.received, partner)
        else:
            worker.comm.recv_(worker.state.received, partner)
            worker.comm.send(worker.parameters, partner)
        worker.parameters.add_(worker.state.received).mul_(0.5)
        worker.comm.count(0)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return worker.is_last(epoch)

    @property
    def syncs_formula(self) -> str:
        """Mixings of one worker, each as one, and the mean at the end; a `pair` that sits out has fewer."""
        return "floor((e + 1) * S / every) - floor(e * S / every) + last"

    @property
    def bytes_formula(self) -> str:
        if self.peers == "ring":
            return "n * (min(2, K - 1) * (syncs - last) + last)"
        return "n * ((K - K % 2) / K * (syncs - last) + last)"


def _passed_on(worker: Worker, step: int) -> Tensor:
    """What one neighbour has, while ours goes to the other. Even ranks send first, so that no ring of waits forms."""
    to, source = (worker.rank + step) % worker.size, (worker.rank - step) % worker.size
    received: Tensor = worker.state.received
    if worker.rank % 2 == 0:
        worker.comm.send(worker.parameters, to)
        worker.comm.recv_(received, source)
    else:
        worker.comm.recv_(received, source)
        worker.comm.send(worker.parameters, to)
    return received


def partner_of(rank: int, size: int, draw: random.Random) -> int:
    """Whom `rank` meets in a random round of a round-robin tournament; itself where it sits out.

    Every pair meets in exactly one round, so that each partner is equally likely.
    """
    rounds = size - 1 if size % 2 == 0 else size
    this = draw.randrange(rounds)
    if size % 2 == 0 and rank == size - 1:
        return next(other for other in range(rounds) if 2 * other % rounds == this)
    partner = (this - rank) % rounds
    return size - 1 if partner == rank and size % 2 == 0 else partner
