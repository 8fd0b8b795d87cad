"""A worker that repeats another's arithmetic without doing it: same steps, same numbers, its own time.

Under `horovod`, `ddp` and `allreduce` replicas compute the very same weights and differ in when. One run is computed;
the others walk through the same batches and meetings, are charged for each, and take losses and metrics over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scalebench.books import Books
from scalebench.clock import Clock, Task
from scalebench.comm.base import Communicator, Server, ServerRule, SharedState
from scalebench.data.plan import Plan
from scalebench.outcome import Evaluation, Outcome
from scalebench.strategies.base import Batch
from scalebench.study.spec import Run


@dataclass(frozen=True)
class Trace:
    """What the computed run found: the loss of each worker and epoch, the metric at each moment."""

    losses: list[list[float | None]]
    metrics: dict[int, float]
    parameters: int

    @classmethod
    def of(cls, outcome: Outcome) -> Trace:
        return cls(
            losses=[[epoch.train_loss for epoch in worker.epochs] for worker in outcome.workers],
            metrics={evaluation.epoch: evaluation.metric for evaluation in outcome.evaluations},
            parameters=outcome.facts["parameters"],
        )


class Shadow:
    """Implements `strategies.base.Worker` for strategies that only step and average gradients."""

    def __init__(
        self, run: Run, plan: Plan, comm: Communicator, clock: Clock, trace: Trace, workers_per_node: int
    ) -> None:
        self.run, self.plan, self.comm, self.clock = run, plan, comm, clock
        self.rank, self.size, self.epochs, self.seed = comm.rank, comm.size, run.epochs, run.seed
        self.workers_per_node = min(workers_per_node, comm.size)
        dtype = getattr(torch, run.dtype)
        self.parameters = self.gradients = torch.empty(trace.parameters, dtype=dtype, device="meta")
        self.last_loss = torch.empty((), dtype=dtype, device="meta")
        self.model: Any = None
        self.optimizer: Any = None
        self.forward: Callable[[Tensor], Tensor] = lambda x: x
        self.state = SimpleNamespace()
        self.on_epoch: Callable[[int], None] | None = None
        self.books = Books(comm.rank, clock, comm)
        self.steps = 0
        self.evaluations: list[Evaluation] = []
        self._trace = trace

    @property
    def samples(self) -> int:
        return int(self.plan.shard_sizes(0)[self.rank])

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        raise NotImplementedError("a shadow has no model to share")

    def server(self, rule: ServerRule) -> Server:
        raise NotImplementedError("a shadow has no model to serve")

    def steps_in(self, epoch: int) -> int:
        return self.plan.steps(epoch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        self.clock.did(Task.SHUFFLE, self.samples)
        for step, size in enumerate(self.plan.batch_sizes(epoch)[self.rank].tolist()):
            self.clock.did(Task.DATA, size)
            yield Batch(_nothing(size), _nothing(size), 1.0, step, step == 0)

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        raise NotImplementedError("a shadow walks through the plan's own batches")

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        self.clock.did(Task.FORWARD, len(batch.x))
        self.clock.did(Task.BACKWARD, len(batch.x))

    @property
    def learning_rate(self) -> float:
        return self.run.lr

    def adopt(self, weights: Tensor) -> None:
        raise NotImplementedError("a shadow has no model of its own")

    def observe(self, name: str, value: int) -> None:
        self.books.observe(name, value)

    def update(self) -> None:
        self.steps += 1
        self.clock.did(Task.UPDATE)

    def local_step(self, batch: Batch) -> None:
        self.gradient(batch)
        self.update()

    def reset_optimizer(self) -> None:
        """There is no optimizer."""

    def use_optimizer(self, wrap: Any) -> None:
        """There is no optimizer."""

    def is_last(self, epoch: int) -> bool:
        return epoch == self.epochs - 1

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        self.books.close_epoch(epoch, self.clock.elapsed(), self._trace.losses[self.rank][epoch])
        if epoch in self._trace.metrics and not self.is_last(epoch):
            self.keep(epoch, self.clock.elapsed(), True)
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None:
        """Stamp the metric of the computed run with this run's time."""
        if self.rank == 0:
            self.evaluations.append(Evaluation(epoch, elapsed_s, self._trace.metrics[epoch]))

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        raise NotImplementedError("a shadow has no model to keep")


@cache
def _nothing(samples: int) -> Tensor:
    return torch.empty(samples, device="meta")
