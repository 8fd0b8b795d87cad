"""Synchronous data parallelism by one fused allreduce of the gradients per batch (BSP), or by smaller operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from scalebench.cluster.operation import BY_MESSAGES
from scalebench.comm.base import Capability
from scalebench.strategies.base import Batch, Setting, Strategy, Synchronisation, Worker
from scalebench.strategies.compression import (
    WIRES,
    Plain,
    PowerSgd,
    Reducer,
    TopK,
    compressed,
    options_have_an_effect,
    require_matrices,
)
from scalebench.strategies.registry import register
from scalebench.strategies.traits import Stretch, Traits

if TYPE_CHECKING:
    from torch import Tensor


class GradientAveraging(Strategy):
    """One step, and one exchange, for the gradients of `accumulate` = a batches of each worker.

    w <- w - eta * sum n_i g_i / sum n_i over a batches; the last step of an epoch may
    have fewer. Batches are weighted by the samples that all workers have in them, so
    that one larger batch would give the same step.
    """

    accumulate: int = Field(
        1, ge=1, description="a: batches per optimizer step and synchronisation"
    )

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        last, first, total = worker.steps_in(epoch) - 1, 0.0, 0.0
        for batch in worker.batches(epoch):
            # The samples of a step are known behind its last batch only: until then weights
            # are relative to those of the first.
            samples, place = (
                len(batch.x) * worker.size / batch.weight,
                batch.step % self.accumulate,
            )
            first, total = (
                (samples, samples) if place == 0 else (first, total + samples)
            )
            ends = place == self.accumulate - 1 or batch.step == last
            self.gather(
                worker,
                batch,
                batch.weight * (samples / first),
                add=place > 0,
                ends=ends,
            )
            if ends:
                self.exchange(worker, first / total)

    def gather(
        self, worker: Worker, batch: Batch, weight: float, *, add: bool, ends: bool
    ) -> None:
        """Compute one batch's gradient, the first of a step or added to it; `ends`: an exchange follows."""
        worker.gradient(batch, weight, add=add)

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        """Average the gathered gradients, times `scale`, and step."""
        raise NotImplementedError

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.gather(worker, batch, batch.weight, add=False, ends=True)
        self.exchange(worker)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        return Traits(
            stretches=(Stretch(period=self.accumulate, restarts=True),),
            mean_over_global_batch=self.accumulate == 1,
            options={"interval": "accumulate"},
        )

    @property
    def synchronisation(self) -> Synchronisation:
        return Synchronisation(every=self.accumulate)


def mean_of_gradients(workers: int) -> str:
    """Name of the arithmetic that all plain per-batch strategies share; a lone worker's is serial's."""
    return "serial" if workers == 1 else "mean of gradients"


@register()
class Allreduce(GradientAveraging):
    """w <- w - eta * sum_i n_i g_i / sum_i n_i after each batch, over one flat buffer.

    n_i: samples in worker i's batch. With `accumulate` = a the sums run over a batches of each worker, so that one
    larger batch would give the same step; the last step of an epoch may have fewer. What may travel instead of g:

        topk:      c = g + e;  the ceil(keep d) of its d entries largest in magnitude;  e <- c - sent
        powersgd:  M = g + e, matrix by matrix;  P <- mean M Q, orthonormal;  Q <- mean M^T P;  P Q^T;  e <- M - P Q^T
    """

    compression: Literal["none", "fp16", "bf16", "topk", "powersgd"] = Field(
        "none",
        description="what travels: the gradient, half its bits, its largest entries, or low-rank factors",
    )
    keep: float = Field(
        0.01, gt=0, le=1, description="topk: share of the entries that is sent"
    )
    rank: int = Field(1, ge=1, le=4096, description="powersgd: rank of the factors")
    start: int = Field(
        2, ge=0, description="powersgd: first steps that are not compressed"
    )
    collective: Literal["auto", "tree", "hierarchical"] = Field(
        "auto",
        description="the engine's own allreduce, a binomial tree (Besch and Pohl), or node by node",
    )

    name = "allreduce"
    summary = "gradients averaged after every batch in one fused collective"
    source = "bulk-synchronous parallel SGD; Goyal et al., 2017, arXiv 1706.02677"

    @field_validator("collective")
    @classmethod
    def _carries(cls, collective: str, info: ValidationInfo) -> str:
        if collective != "auto" and info.data.get("compression", "none") != "none":
            raise ValueError(
                f"expected 'auto' with compression {info.data['compression']}, got {collective!r}"
            )
        return collective

    # An option of another compression would be a setting without effect.
    _stated = model_validator(mode="after")(options_have_an_effect)

    def setup(self, worker: Worker) -> None:
        reducer: Reducer = Plain(
            worker, WIRES.get(self.compression) if worker.size > 1 else None
        )
        if worker.size > 1:
            if self.collective != "auto":
                reducer = (
                    Tree(worker) if self.collective == "tree" else TwoLevel(worker)
                )
            elif self.compression == "topk":
                reducer = TopK(worker, self.keep)
            elif self.compression == "powersgd":
                reducer = PowerSgd(worker, self.rank, self.start)
        worker.state.reducer = reducer

    def exchange(self, worker: Worker, scale: float = 1.0) -> None:
        # Weights were relative to the first batch of the step.
        if scale != 1.0:
            worker.gradients.mul_(scale)
        worker.state.reducer.mean_(worker.gradients)
        worker.update()

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        super().warm_up(worker, batch)
        # The error of a step that is taken back must not return.
        worker.state.reducer.forget()

    @property
    def needs(self) -> frozenset[Capability]:
        extra = {
            "tree": {Capability.POINT_TO_POINT},
            "hierarchical": {Capability.SPLIT},
        }
        return self.requires | extra.get(self.collective, set())

    def check(self, setting: Setting) -> list[str]:
        if (
            self.compression == "powersgd"
            and setting.workers > 1
            and setting.shapes is not None
        ):
            require_matrices(setting.shapes, self.rank)
        if (
            self.collective == "hierarchical"
            and 1 < setting.workers <= setting.workers_per_node
        ):
            return [
                "collective hierarchical on one node is a reduce and a broadcast there, slower than an allreduce"
            ]
        return []

    @property
    def traits(self) -> Traits:
        return compressed(super().traits, self.compression, self.start)

    def arithmetic(self, workers: int) -> str | None:
        plain = self.accumulate == 1 and (
            workers == 1 or (self.compression == "none" and self.collective == "auto")
        )
        return mean_of_gradients(workers) if plain else None


class Tree(Reducer):
    """Binomial reduce to worker 0, then binomial broadcast: 2 ceil(lg p)(a + n/B) + ceil(lg p) n gamma.

    Besch and Pohl, PDP 1995 (only the abstract is public: a reconstruction). A virtual
    run charges exactly this where p is a power of two; elsewhere up to one message
    less, for a worker's sends do not wait for each other there.
    """

    def __init__(self, worker: Worker) -> None:
        self._comm = worker.comm

    def mean_(self, vector: Tensor) -> None:
        comm, rank, size = self._comm, self._comm.rank, self._comm.size
        comm.count(BY_MESSAGES)
        stride = 1
        while stride < size and rank % (2 * stride) == 0:
            # Where K is no power of two some branches are missing.
            if rank + stride < size:
                comm.recv_(vector, rank + stride, add=True)
            stride *= 2
        # `stride` is now the lowest set bit of the rank: where it hangs in the tree
        if rank > 0:
            comm.send(vector, rank - stride)
            comm.recv_(vector, rank - stride)
        else:
            vector.div_(size)
        stride //= 2
        while stride:
            if rank + stride < size:
                comm.send(vector, rank + stride)
            stride //= 2


class TwoLevel(Reducer):
    """Sum onto the first worker of each node, allreduce between those, broadcast inside each node.

    Inside the nodes the n bytes cross fast links only; between them each node sends
    once, however many workers it has.
    """

    def __init__(self, worker: Worker) -> None:
        self._size, node = worker.size, worker.workers_per_node
        self._node = worker.comm.split(lambda rank: rank // node)
        self._leaders = worker.comm.split(lambda rank: min(1, rank % node))

    def mean_(self, vector: Tensor) -> None:
        if self._node.size > 1:
            self._node.reduce_(vector, 0)
        if self._node.rank == 0 and self._leaders.size > 1:
            self._leaders.allreduce_(vector)
        if self._node.size > 1:
            self._node.broadcast_(vector, 0)
        # Once, as a flat allreduce does: a mean at each level would weigh small nodes
        # more.
        vector.div_(self._size)
