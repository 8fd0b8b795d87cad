"""Adasum: steps of several workers are added where they are orthogonal and averaged where they agree."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from scalebench.cluster.operation import BY_MESSAGES, Kind
from scalebench.comm.base import Capability, LibraryCommunicator
from scalebench.comm.engines import providing
from scalebench.errors import StudyError
from scalebench.strategies.base import Batch, Setting, Strategy, Synchronisation, Worker
from scalebench.strategies.registry import register
from scalebench.strategies.replica_state import parameter_shapes
from scalebench.strategies.traits import Stretch, Traits
from scalebench.system.late import torch

if TYPE_CHECKING:
    from torch import Tensor

(_HOROVOD,) = providing(Capability.HOROVOD_OPTIMIZER)
# squared lengths below it count as zero, as in Horovod: the root of the smallest double
_TINY = 1.5e-154


@register()
class Adasum(Strategy):
    """Each worker makes a step d_i of its own optimizer; w <- w + Adasum(d_1, ..., d_K), parameter by parameter.

    Adasum(a, b) = (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b, and Adasum(a, b, c, d) =
    Adasum(Adasum(a, b), Adasum(c, d)), and so on: the number of workers is a power of
    two. Equal steps give that step, orthogonal ones their sum, so that the learning
    rate is a single worker's. Gradients are not weighted by samples. Momentum is each
    worker's own. Maleki et al., MLSys 2021, arXiv 2006.02924.

    Over point-to-point messages: lg K exchanges of the whole vector with ever farther
    partners, lg K (a + n/B) a step. Horovod halves the vectors on the way and so moves
    less, 2 (K-1)/K n/B.
    """

    name = "adasum"
    summary = (
        "steps merged every batch: added where orthogonal, averaged where parallel"
    )
    source = "Maleki et al., MLSys 2021, arXiv 2006.02924; hvd.DistributedOptimizer(op=hvd.Adasum)"
    requires = frozenset(
        {Capability.COLLECTIVES, Capability.POINT_TO_POINT, Capability.ADASUM}
    )
    engines = (_HOROVOD, *providing(Capability.ADASUM))

    def setup(self, worker: Worker) -> None:
        worker.state.before = worker.parameters.detach().clone()
        sizes = [math.prod(shape) for shape in parameter_shapes(worker)]
        worker.state.adasum_ = Merging(sizes, worker.parameters)

    def train_epoch(self, worker: Worker, epoch: int) -> None:
        for batch in worker.batches(epoch):
            self.step(worker, batch)

    def step(self, worker: Worker, batch: Batch) -> None:
        before, clock = worker.state.before, worker.clock
        # The optimizer steps in place: its step is the change of the weights.
        before.copy_(worker.parameters)
        worker.local_step(batch)
        if worker.size > 1:
            clock.work(worker.parameters.sub_, before)
            worker.comm.count(BY_MESSAGES)
            # In this order for all: Adasum is not associative.
            worker.comm.merge_(worker.parameters, worker.state.adasum_)
            clock.work(worker.parameters.add_, before)

    def warm_up(self, worker: Worker, batch: Batch) -> None:
        self.step(worker, batch)

    def in_agreement(self, worker: Worker, epoch: int) -> bool:
        return True

    @property
    def traits(self) -> Traits:
        return Traits(stretches=(Stretch(),))

    @property
    def synchronisation(self) -> Synchronisation:
        return Synchronisation(merge="adasum")

    def check(self, setting: Setting) -> list[str]:
        if setting.workers & (setting.workers - 1):
            raise StudyError(
                f"strategy adasum: {setting.workers} workers; expected a power of two: use --workers 1,2,4,8 ..."
            )
        return []


@register(_HOROVOD)
class HorovodAdasum(Adasum):
    """Adasum by Horovod, which steps and merges inside the backward pass: compute and communication are one."""

    requires = frozenset({Capability.HOROVOD_OPTIMIZER})

    @property
    def traits(self) -> Traits:
        return replace(super().traits, split_is_measured=False)

    def setup(self, worker: Worker) -> None:
        import horovod.torch as hvd

        def wrap(optimizer: Any) -> Any:
            named = [
                (name, p)
                for name, p in worker.model.named_parameters()
                if p.requires_grad
            ]
            return hvd.DistributedOptimizer(
                optimizer, named_parameters=named, op=hvd.Adasum
            )

        worker.use_optimizer(wrap)

    def step(self, worker: Worker, batch: Batch) -> None:
        for group in worker.optimizer.param_groups:
            # the step is made during the backward pass
            group["lr"] = worker.learning_rate
        worker.gradient(batch)
        if worker.size > 1:
            comm = cast(LibraryCommunicator, worker.comm)
            merged = comm.operation(Kind.MERGE, worker.gradients.nbytes)
            comm.overlapped(merged)
        worker.update()


class Merging:
    """a <- Adasum(a, b), each of consecutive pieces of `sizes` for itself; products in double precision.

    Pieces are widened into memory of their own, aligned alike, for a product's last bit
    depends on the alignment.
    """

    def __init__(self, sizes: list[int], like: Tensor) -> None:
        self._sizes = sizes
        self._wide = [
            [torch.empty(n, dtype=torch.float64, device=like.device) for n in sizes]
            for _ in "ab"
        ]

    def __call__(self, a: Tensor, b: Tensor) -> None:
        pieces = (
            a.split_with_sizes(self._sizes),
            b.split_with_sizes(self._sizes),
        )  # torch.split takes twice as long
        for wide, narrow in zip(self._wide, pieces, strict=True):
            torch._foreach_copy_(wide, narrow)
        for left, right, wide_left, wide_right in zip(
            *pieces, *self._wide, strict=True
        ):
            product = float(torch.dot(wide_left, wide_right))
            lengths = (
                float(torch.dot(wide_left, wide_left)),
                float(torch.dot(wide_right, wide_right)),
            )
            # Of vectors of no length nothing is taken away; the formula would divide by
            # zero.
            share, other = (
                1 - product / (2 * length) if length >= _TINY else 1.0
                for length in lengths
            )
            left.mul_(share).add_(right, alpha=other)
