"""Synchronous data parallelism by one fused allreduce of the gradients per batch (BSP)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from scalebench.comm.base import Capability
from scalebench.strategies.base import Batch, Strategy, Worker
from scalebench.strategies.compression import WIRES, Plain, PowerSgd, Reducer, TopK
from scalebench.strategies.registry import register
from scalebench.strategies.trees import Tree, TwoLevel


class PerBatch(Strategy):
    """Replicas that step together: they agree after every batch."""

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            self.step(worker, batch)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.step(worker, batch)

    def step(self, worker: Worker, batch: Batch) -> None:
        raise NotImplementedError

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True


def uncompressed(updates: str) -> str:
    """A formula: how many of an epoch's `updates` lie before PowerSGD's `start`."""
    return f"min({updates}, max(0, start - e * {updates}))"


def mean_of_gradients(workers: int) -> str:
    """The name of the arithmetic that all plain per-batch strategies share; a lone worker's is serial's."""
    return "serial" if workers == 1 else "mean of gradients"


@register()
class Allreduce(PerBatch):
    """w <- w - eta * sum_i n_i g_i / sum_i n_i after each batch, over one flat buffer.

    n_i is the number of samples in worker i's batch; with equal batches it is the plain mean of the gradients.
    `accumulate` = a: the sums run over a batches of each worker, one step for all of them; the last step of an epoch
    may have fewer. What travels: compression.py. How: trees.py.
    """

    compression: Literal["none", "fp16", "bf16", "topk", "powersgd"] = Field(
        "none", description="what travels: the gradient, half its bits, its largest entries, or low-rank factors"
    )
    keep: float = Field(0.01, gt=0, le=1, description="topk: share of the entries that is sent")
    rank: int = Field(1, ge=1, le=4096, description="powersgd: rank of the factors")
    start: int = Field(2, ge=0, description="powersgd: first steps that are not compressed")
    collective: Literal["auto", "tree", "hierarchical"] = Field(
        "auto", description="the engine's own allreduce, a binomial tree (Besch and Pohl), or node by node"
    )
    accumulate: int = Field(1, ge=1, description="batches per optimizer step and synchronisation")

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "gradients averaged after every batch in one fused collective"
    source: ClassVar[str] = "bulk-synchronous parallel SGD; Goyal et al., 2017, arXiv 1706.02677"

    @field_validator("collective")
    @classmethod
    def _carries(cls, collective: str, info: ValidationInfo) -> str:
        if collective != "auto" and info.data.get("compression", "none") != "none":
            raise ValueError(f"expected 'auto' with compression {info.data['compression']}, got {collective!r}")
        return collective

    @property
    def sync_every(self) -> int:
        return self.accumulate

    @property
    def needs(self) -> frozenset[Capability]:
        extra = {"tree": {Capability.POINT_TO_POINT}, "hierarchical": {Capability.SPLIT}}
        return self.requires | extra.get(self.collective, set())

    def check(self, workers: int, workers_per_node: int) -> list[str]:
        if self.collective == "hierarchical" and 1 < workers <= workers_per_node:
            return ["collective hierarchical on one node is a reduce and a broadcast there, slower than an allreduce"]
        return []

    def setup(self, worker: Worker) -> None:
        worker.state.reducer = self._reducer(worker)
        if self.accumulate > 1:
            worker.state.sum, worker.state.samples = worker.gradients.new_zeros(worker.gradients.numel()), 0.0

    def _reducer(self, worker: Worker) -> Reducer:
        if worker.size == 1:
            return Plain(worker)
        if self.collective == "tree":
            return Tree(worker)
        if self.collective == "hierarchical":
            return TwoLevel(worker)
        if self.compression == "topk":
            return TopK(worker, self.keep)
        if self.compression == "powersgd":
            return PowerSgd(worker, self.rank, self.start)
        return Plain(worker, WIRES.get(self.compression))

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        last = worker.steps_in(epoch) - 1
        for batch in worker.batches(epoch):
            if self.accumulate == 1:
                self.step(worker, batch)
                continue
            self._gather(worker, batch)
            if (batch.step + 1) % self.accumulate == 0 or batch.step == last:
                self._step_on_sum(worker)

    def step(self, worker: Worker, batch: Batch) -> None:
        worker.gradient(batch, batch.weight)
        worker.state.reducer.mean_(worker.gradients)
        worker.update()

    def _gather(self, worker: Worker, batch: Batch) -> None:
        """Add this batch's gradient, in proportion to the samples that all workers have in this step."""
        worker.gradient(batch, batch.weight)
        samples = len(batch.x) * worker.size / batch.weight
        worker.state.sum.add_(worker.gradients, alpha=samples)
        worker.state.samples += samples

    def _step_on_sum(self, worker: Worker) -> None:
        worker.gradients.copy_(worker.state.sum).div_(worker.state.samples)
        worker.state.sum.zero_()
        worker.state.samples = 0.0
        worker.state.reducer.mean_(worker.gradients)
        worker.update()

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.step(worker, batch)
        worker.state.reducer.forget()

    def arithmetic(self, workers: int) -> str | None:
        plain = self.accumulate == 1 and (workers == 1 or (self.compression == "none" and self.collective == "auto"))
        return mean_of_gradients(workers) if plain else None

    @property
    def _updates(self) -> str:
        return "S" if self.accumulate == 1 else "ceil(S / accumulate)"

    @property
    def syncs_formula(self) -> str:
        """Of worker 0; `hierarchical`: where there are several nodes of several workers."""
        if self.compression == "powersgd":
            return f"2 * {self._updates} - {uncompressed(self._updates)}"
        return f"3 * {self._updates}" if self.collective == "hierarchical" else self._updates

    @property
    def bytes_formula(self) -> str:
        """`hierarchical`: of full nodes."""
        if self.compression == "powersgd":
            first = uncompressed(self._updates)
            return f"n * {first} + f(rank) * ({self._updates} - {first})"
        if self.compression == "topk":
            return "ceil(keep * P) * (4 + n / P) * syncs"
        if self.compression != "none":
            return "2 * P * syncs"
        if self.collective == "hierarchical":
            return f"n * ((G > 1) * (1 + 1 / G) + (K > G) / G) * {self._updates}"
        return "2 * (K - 1) / K * n * syncs" if self.collective == "tree" else "n * syncs"
