"""NoLoCo: outer steps in random pairs, and no operation of all workers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pydantic import Field

from scalebench.cluster.operation import BY_MESSAGES
from scalebench.comm.base import Capability
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.block_momentum import unlike_the_papers_optimizer
from scalebench.strategies.gossip import exchanged, partner_of
from scalebench.strategies.local_sgd import LocalSgd
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import packed, unpack_
from scalebench.strategies.traits import Traits

if TYPE_CHECKING:
    from torch import Tensor


@register()
class NoLoCo(LocalSgd):
    """After every H local steps from a_i, each worker i with a random partner, over whom the means are:

        D_i <- m D_i + lr mean (w - a) + gamma (mean a - a_i);   a_i <- a_i + D_i;   w_i <- a_i

    Kolehmainen et al., 2025, arXiv 2506.10911; the signs and gamma = lr are those of
    its authors' code (jkolehm/noloco, sparse_optimizer_c), lr = 0.7 and m = 0.5 of its
    runs. The term with gamma draws slow weights together, which differ from worker to
    worker. Partners are a round of a round-robin tournament, drawn from the study's
    seed, as in `gossip`: a worker waits for its partner and for no other; with an odd
    number one has itself as partner. With two workers it is `bmuf` with block_momentum
    m and block_lr lr, as a is then common.

    The model handed out is the mean of all, which the end of training forms, by the
    study's weights; within a pair both count the same. Buffers and optimizer state,
    where they are averaged, take the pair's mean.
    """

    outer_lr: float = Field(
        0.7, gt=0, description="lr: how far along the pair's mean move"
    )
    outer_momentum: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="m: share of its last move that each outer step keeps",
    )
    gamma: float | None = Field(
        None,
        ge=0,
        description="how far towards the pair's mean slow weights; default: lr",
    )

    name = "noloco"
    summary = (
        "local steps, then an outer step with one random partner, without a collective"
    )
    source = "Kolehmainen et al., 2025, arXiv 2506.10911"
    requires = frozenset({Capability.COLLECTIVES, Capability.POINT_TO_POINT})
    engines = providing(Capability.POINT_TO_POINT)

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in local_sgd

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(self.steps, merge="outer step in pairs")

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        worker.state.anchor = worker.parameters.clone()
        worker.state.move = worker.parameters.clone().zero_()
        worker.state.draw = random.Random(worker.seed)  # noqa: S311  the same on every worker

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        super().train_epoch(worker, epoch)
        if self.ends_training(worker, epoch):
            self.average(worker)

    def synchronise(self, worker: Worker) -> None:
        state = worker.state
        partner = partner_of(worker.rank, worker.size, state.draw)
        worker.comm.count(BY_MESSAGES)
        own = packed([*self.averaged(worker), state.anchor])
        # With an odd number of workers one sits out, and steps by itself.
        theirs = own
        if partner != worker.rank:
            theirs = exchanged(worker, own, partner, partner, worker.rank < partner)
        worker.clock.work(self._step, worker, own, theirs)
        self.after_average(worker)

    def _step(self, worker: Worker, own: Tensor, theirs: Tensor) -> None:
        """Take the pair's outer step; both messages are the averaged state, weights first, then the slow weights."""
        n, state = worker.parameters.numel(), worker.state
        mean = (own + theirs) / 2
        unpack_(mean[:-n], self.averaged(worker))
        # The paper's third term, which draws the slow weights of partners together.
        gamma = self.outer_lr if self.gamma is None else self.gamma
        state.move.mul_(self.outer_momentum).add_(
            mean[:n] - mean[-n:], alpha=self.outer_lr
        )
        state.move.add_(mean[-n:] - state.anchor, alpha=gamma)
        state.anchor.add_(state.move)
        worker.parameters.copy_(state.anchor)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return self.ends_training(worker, epoch)

    def check(self, setting: Setting) -> list[str]:
        if setting.workers == 1:
            raise StudyError(
                "strategy noloco at 1 worker: there is no partner to step with; start at 2 workers"
            )
        return super().check(setting) + unlike_the_papers_optimizer(setting)
