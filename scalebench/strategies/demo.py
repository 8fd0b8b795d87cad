"""DeMo: momentum stays with its worker, and its strongest cosines are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from scalebench.strategies.allreduce import GradientAveraging
from scalebench.strategies.base import Batch, Setting, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import parameter_shapes
from scalebench.strategies.tiles import MOST, StrongestOfTiles
from scalebench.strategies.traits import Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@register()
class DeMo(GradientAveraging):
    """Decoupled momentum. In each step, with eta the learning rate and C the cosine transform of tiles:

        m_i <- b m_i + eta g_i;   q_i = the k strongest entries of each tile of C m_i;   m_i <- m_i - C^-1 q_i
        w <- w - eta sign(C^-1 q),   an entry of q: the mean of q_i over the workers that sent it

    Peng, Quesnelle and Kingma, 2024, arXiv 2411.19870; constants, and the mean over
    those that sent, as in its code (bloc97/DeMo). A tile has as sides the largest
    divisors of a matrix's that are at most 64; a parameter with more axes is a matrix,
    its first by all others, which their code refuses. The sign is handed to the study's
    optimizer as the gradient: plain SGD takes the paper's step, with weight decay as
    theirs. A lone worker sends nothing, and takes the same step. k (2 + element size)
    bytes a tile, from each worker to all others.
    """

    k: int = Field(32, ge=1, description="entries of a tile that are sent")
    tile: int = Field(
        64,
        ge=1,
        le=MOST,
        description="longest side of a tile; places in it have 16 bits",
    )
    decay: float = Field(
        0.999, ge=0, lt=1, description="b: share of the momentum that each step keeps"
    )

    name = "demo"
    summary = "the sign of the strongest cosines of each worker's momentum, every batch (option k)"
    source = "Peng, Quesnelle and Kingma, 2024, arXiv 2411.19870"

    def setup(self, worker: Worker) -> None:
        worker.state.cosines = Cosines(worker, self)

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        cosines = worker.state.cosines
        # Of all virtual workers in one call: transforms of one worker are small.
        message, cosines.momentum = worker.comm.by_rows(
            cosines.message,
            [cosines.momentum, worker.gradients],
            worker.learning_rate * scale,
        )
        if worker.size > 1:
            sign = worker.comm.allgather_combined(message, cosines.sign)
        else:
            sign = worker.clock.work(cosines.sign, [message])
        worker.gradients.copy_(sign)
        worker.update()

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        super().warm_up(worker, batch)
        # Training begins without the move of a step that is taken back.
        worker.state.cosines.momentum.zero_()

    @property
    def traits(self) -> Traits:
        return replace(super().traits, mean_over_global_batch=False, takes_signs=True)

    def check(self, setting: Setting) -> list[str]:
        optimizer = setting.training.optimizer
        if optimizer.name == "sgd" and not optimizer.options.get("momentum"):
            return []
        return [
            f"the optimizer is {optimizer}, which takes the sign for a gradient; the paper's step is plain SGD: say "
            "optimizer: sgd, and a learning rate that fits a sign, such as lr: 1e-3"
        ]


class Cosines:
    """The cosines C m of a worker's momentum, and its messages.

    The momentum stays transformed, as C is linear: a step needs C g_i, and C^-1 of the
    mean, once for all workers.
    """

    def __init__(self, worker: Worker, options: DeMo) -> None:
        shapes = parameter_shapes(worker)
        self._strongest = StrongestOfTiles(
            shapes, options.tile, lambda _: options.k, worker.parameters, cosines=True
        )
        self._decay = options.decay
        self.momentum = worker.parameters.clone().zero_()

    def message(
        self, momenta: Tensor, gradients: Tensor, rate: float
    ) -> tuple[Tensor, Tensor]:
        """Return messages (k, b) of the strongest of momenta (k, n) with new gradients (k, n), and the rest (k, n)."""
        grown = momenta.mul(self._decay)
        grown.add_(self._strongest.tiled(gradients), alpha=rate)
        return self._strongest.take_(grown), grown

    def sign(self, messages: list[Tensor]) -> Tensor:
        """Return the sign of the mean of messages, each entry over those that have it."""
        # Added in the order of the workers.
        entries, places = (
            each.flatten() for each in self._strongest.taken(torch.stack(messages))
        )
        total, senders = torch.zeros_like(self.momentum).repeat(2, 1)
        total.index_add_(0, places, entries)
        senders.index_add_(0, places, torch.ones_like(entries))
        # By the senders, as in the authors' code: by all workers an entry that few sent
        # would be lost among the others. What none sent is 0.
        mean = total / senders.clamp(min=1.0)
        return self._strongest.vector(mean).sign_()
