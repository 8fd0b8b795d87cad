"""Synchronous epoch averaging: train alone for whole epochs, then average the weights."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from scalebench.comm.base import Communicator
from scalebench.strategies.averaging import LocalEpochs
from scalebench.strategies.base import Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import average_, average_at_master_


@register()
class EpochAverage(LocalEpochs):
    """Average the weights of all replicas every `every` epochs, and after the last one.

    w <- (1/K) sum_j w_j, then all restart from w.
    Vazquez-Novoa, Lopez, Flich and Badia, WACCPD 2025, "Epoch-Synchronous" (every = 1).
    `master`: worker 0 gathers all weights, adds them in the order of the workers and sends the mean to each: (K - 1) n
    bytes in and as many out over its link, (K - 1) (2 (a + n/B) + n gamma). What limits the reference at many workers.
    """

    aggregation: Literal["allreduce", "master"] = Field("allreduce", description="how the mean is formed")

    name: ClassVar[str] = "epoch_average"
    summary: ClassVar[str] = "weights averaged every n epochs"
    source: ClassVar[str] = "Vazquez-Novoa et al., WACCPD 2025, Epoch-Synchronous"

    def arithmetic(self, workers: int) -> str | None:
        return "serial" if workers == 1 and self.optimizer_state in ("keep", "average") else None

    def form_mean(self, comm: Communicator, worker: Worker) -> None:
        through = average_ if self.aggregation == "allreduce" else average_at_master_
        through(comm, self.averaged(worker), self.weight(worker))

    @property
    def syncs_formula(self) -> str:
        """Through a master: there and back."""
        whole = super().syncs_formula
        return whole.replace("1 if", "2 if", 1) if self.aggregation == "master" else whole

    @property
    def bytes_formula(self) -> str:
        """A master takes n (and a weight, by samples) from every other worker, and sends n to each of them."""
        if self.aggregation == "allreduce":
            return super().bytes_formula
        weight = " + n / P / 2 * (1 - 1 / K) * syncs" if self.weighting == "samples" else ""
        return f"{self.state_bytes} * (1 - 1 / K) * syncs{weight}"
