"""SparseLoCo: local steps, then the strongest entries of what was not yet sent, in two bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from scalebench.strategies.base import Setting, Synchronisation, Worker
from scalebench.strategies.block_momentum import unlike_the_papers_optimizer
from scalebench.strategies.local_sgd import LocalSgd
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_, parameter_shapes
from scalebench.strategies.tiles import MOST, StrongestOfTiles
from scalebench.strategies.traits import Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHT_BYTES = 8  # float64, behind a message


@register()
class SparseLoCo(LocalSgd):
    """After every H local steps from w0, with e_i what worker i has not sent yet:

        e_i <- b e_i + (w0 - w_i);   s_i = Q(the strongest entries of e_i);   e_i <- e_i - s_i
        w <- w0 - lr mean s_i

    Sarfi et al., 2025, arXiv 2508.15706. The entries are round(keep c) of each tile of
    c = 64 x 64 numbers, largest in magnitude; Q puts them into 2 bits, parameter by
    parameter (few_bits.by_bins). The old that stays in e does what an outer momentum
    does. keep = 1 in 32 bits leaves nothing in e: `diloco` with outer_momentum 0, and
    with lr = 1 `local_sgd`, but for rounding. K k (2 + bits / 8) bytes for k entries in
    all, from each worker to all others. Trap: the authors' code divides an entry by the
    number of workers that sent it, their text by all workers, as here.
    """

    keep: float = Field(
        0.03125, gt=0, le=1, description="share of the entries of a tile that is sent"
    )
    tile: int = Field(
        64,
        ge=1,
        le=MOST,
        description="longest side of a tile; places in it have 16 bits",
    )
    bits: Literal[32, 8, 4, 2] = Field(
        2, description="of an entry on the wire; 32: as the study has it"
    )
    decay: float = Field(
        0.95,
        ge=0,
        le=1,
        description="b: share of what was not sent that each average keeps",
    )
    outer_lr: float = Field(
        1.0, gt=0, description="lr: how far along the mean of what was sent"
    )

    name = "sparse_loco"
    summary = "local steps, then the strongest entries of what was not sent yet, in 2 bits (option keep)"
    source = "Sarfi et al., 2025, arXiv 2508.15706"

    @property
    def traits(self) -> Traits:
        return super().traits  # when is as in local_sgd

    @property
    def synchronisation(self) -> Synchronisation:
        return self.averaged_every(
            self.steps, merge="strongest entries with error feedback"
        )

    def setup(self, worker: Worker) -> None:
        super().setup(worker)
        worker.state.anchor = worker.parameters.clone()
        worker.state.unsent = Unsent(worker, self)

    def synchronise(self, worker: Worker) -> None:
        anchor, unsent = worker.state.anchor, worker.state.unsent
        if worker.size == 1:
            worker.clock.work(self._restart, worker, anchor - worker.parameters)
            return
        share = anchor.new_tensor([self.weight(worker) or 1.0], dtype=torch.float64)
        message, unsent.entries = worker.comm.by_rows(
            unsent.message, [unsent.entries, anchor, worker.parameters, share]
        )
        mean = worker.comm.allgather_combined(message, unsent.mean)
        worker.clock.work(self._restart, worker, mean)
        # Buffers and states are small, or not sparse: they travel whole.
        if rest := self.averaged(worker)[1:]:
            average_(worker.comm, rest, self.weight(worker))
        self.after_average(worker)

    def _restart(self, worker: Worker, move: Tensor) -> None:
        worker.state.anchor.sub_(move, alpha=self.outer_lr)
        worker.parameters.copy_(worker.state.anchor)

    def check(self, setting: Setting) -> list[str]:
        return super().check(setting) + unlike_the_papers_optimizer(setting)


class Unsent:
    """What a worker has not sent yet, in the order of tiles."""

    def __init__(self, worker: Worker, policies: SparseLoCo) -> None:
        shapes = parameter_shapes(worker)
        count = lambda entries: round(policies.keep * entries)  # noqa: E731
        self._strongest = StrongestOfTiles(
            shapes, policies.tile, count, worker.parameters, bits=policies.bits
        )
        self._decay = policies.decay
        self.entries = worker.parameters.clone().zero_()

    def message(
        self, unsent: Tensor, anchors: Tensor, weights: Tensor, shares: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return messages (k, b), and what is not sent, (k, n), of `unsent` (k, n) and the moves from the anchors.

        Behind a message is the share (k, 1) of its worker in the mean.
        """
        # What stays here and comes back later does what an outer momentum does.
        grown = unsent.mul(self._decay).add_(self._strongest.tiled(anchors - weights))
        strongest = self._strongest.take_(grown)
        return torch.cat([strongest, shares.view(torch.uint8)], -1), grown

    def mean(self, messages: list[Tensor]) -> Tensor:
        """Return the mean of what all sent, by their weights."""
        every = torch.stack(messages)
        behind = every[:, -_WEIGHT_BYTES:].clone(memory_format=torch.contiguous_format)
        weights = behind.view(torch.float64).to(self.entries.dtype)
        entries, places = self._strongest.taken(every[:, :-_WEIGHT_BYTES])
        # Added in the order of the workers.
        total = torch.zeros_like(self.entries).index_add_(
            0, places.flatten(), entries.mul_(weights).flatten()
        )
        return self._strongest.vector(total.div_(weights.sum()))
