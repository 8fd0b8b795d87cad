"""Gossip: every worker mixes its weights with a few others', and no operation involves all."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scalebench.cluster.operation import BY_MESSAGES
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.averaging import Averaging, too_few_steps
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import packed, unpack_
from scalebench.strategies.traits import Stretch, Traits

if TYPE_CHECKING:
    from torch import Tensor


@register()
class Gossip(Averaging):
    """w_i <- sum_j W_ij w_j - eta g_i,  g_i: the gradient at w_i before mixing (by whatever optimizer the study has,
    whose weight decay is of w_i before mixing too).

        ring:  W = 1/3 for a worker and its two neighbours (1/2 where there are two workers)
        pair:  W = 1/2 for a worker and a partner drawn anew; with an odd number one worker sits out

    Lian et al., NeurIPS 2017, arXiv 1705.09056 (D-PSGD) and ICML 2018, arXiv 1710.06952 (AD-PSGD). `pair` is a
    reconstruction: a round of a round-robin tournament, drawn from the study's seed, tells both partners whom to meet,
    so that a worker waits for its partner and for nobody else; in the paper a partner does not wait: that is `ad_psgd`.
    The model handed out is the mean of all, which the end of training forms. Weighted by samples, W_ij is n_j over the
    sum of those who mix; buffers and optimizer state, where they are averaged, are mixed as the weights are.
    """

    peers: Literal["ring", "pair"] = Field(
        "ring", description="whom a worker mixes with"
    )
    every: int = Field(1, ge=1, description="batches between two mixings")

    name = "gossip"
    summary = "weights mixed with neighbours on a ring, or with a random partner"
    source = (
        "Lian et al., NeurIPS 2017, arXiv 1705.09056 and ICML 2018, arXiv 1710.06952"
    )
    requires = frozenset({Capability.COLLECTIVES, Capability.POINT_TO_POINT})
    engines = providing(Capability.POINT_TO_POINT)

    def setup(self, worker: Worker) -> None:
        worker.state.taken = 0
        # Partners know each other without a message.
        worker.state.draw = random.Random(worker.seed)  # noqa: S311  the same on every worker

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            worker.gradient(batch)
            worker.state.taken += 1
            mixes = worker.state.taken % self.every == 0
            # The gradient, and with it the weight decay, is of the weights before.
            worker.update(onto=self._mixed(worker) if mixes else None)
        if self.ends_training(worker, epoch):
            self.average(worker)

    def _mixed(self, worker: Worker) -> Tensor | None:
        """Mix with others; return the weights of the mix, or None where a worker sits out.

        Buffers and optimizer state are mixed in place.
        """
        state = self.averaged(worker)
        mine = self._message(worker, packed(state))
        if self.peers == "ring":
            received = [
                exchanged(
                    worker,
                    mine,
                    to=(worker.rank + step) % worker.size,
                    source=(worker.rank - step) % worker.size,
                    # Even ranks send first, so that no ring of waits forms.
                    first=worker.rank % 2 == 0,
                )
                # two workers are one another's only neighbour
                for step in (1, -1)[: worker.size - 1]
            ]
        else:
            partner = partner_of(worker.rank, worker.size, worker.state.draw)
            if partner == worker.rank:
                return None
            first = worker.rank < partner
            received = [exchanged(worker, mine, partner, partner, first)]
        mixed = mine + received[0]
        for each in received[1:]:
            mixed.add_(each)
        members = 1 + len(received)
        mean = (
            mixed.div_(members)
            if self.weighting == "uniform"
            else mixed[:-1] / mixed[-1]
        )
        n = worker.parameters.numel()
        if len(state) > 1:
            unpack_(mean[n:], state[1:])
        self.after_average(worker)
        # Messages, not a collective: their bytes are counted where they are sent.
        worker.comm.count(BY_MESSAGES)
        return mean[:n]

    def _message(self, worker: Worker, vector: Tensor) -> Tensor:
        """Message to a neighbour: the state, or n_i times the state with n_i behind it."""
        weight = self.weight(worker)
        return (
            vector
            if weight is None
            else packed([vector * weight, vector.new_tensor([weight])])
        )

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return self.ends_training(worker, epoch)

    @property
    def traits(self) -> Traits:
        return self.repeated(Stretch(period=self.every), interval="every")

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.every, merge=f"{self.peers} mean")

    def check(self, setting: Setting) -> list[str]:
        if setting.workers == 1:
            raise StudyError(
                "strategy gossip at 1 worker: there is nobody to mix with; start at 2 workers"
            )
        return too_few_steps(setting, self.every)


def exchanged(
    worker: Worker, mine: Tensor, to: int, source: int, first: bool
) -> Tensor:
    """Send `mine` to `to` and return the vector of `source`; `first`: send before receiving."""
    if first:
        worker.comm.send(mine, to)
    received = worker.comm.recv_like(mine, source)
    if not first:
        worker.comm.send(mine, to)
    return received


def partner_of(rank: int, size: int, draw: random.Random) -> int:
    """Partner of `rank` in a random round of a round-robin tournament; `rank` itself if it sits out.

    Every pair meets in exactly one round, so that each partner is equally likely.
    """
    rounds = size - 1 if size % 2 == 0 else size
    this = draw.randrange(rounds)
    if size % 2 == 0 and rank == size - 1:
        return next(other for other in range(rounds) if 2 * other % rounds == this)
    partner = (this - rank) % rounds
    return size - 1 if partner == rank and size % 2 == 0 else partner
