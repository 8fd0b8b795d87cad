"""A worker that repeats a run without its arithmetic: same steps, same messages, its own time.

Virtual time of a strategy whose arithmetic does not depend on time follows from its program alone. A `ReplayWorker`
walks through the same batches and meetings on tensors without data (torch's meta device), is charged for each, and
takes losses and metrics over from the run that was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scalebench.comm.base import Communicator, Server, ServerRule, SharedState
from scalebench.data.plan import Plan
from scalebench.data.shard import equal_batches
from scalebench.strategies.base import Batch
from scalebench.study.spec import Run
from scalebench.system.clock import Clock, Task
from scalebench.training.meters import Meters
from scalebench.training.optimizers import build_optimizer
from scalebench.training.outcome import Evaluation, Outcome


@dataclass(frozen=True)
class Trace:
    """Results of the computed run: the loss of each worker and epoch, and the metric after each evaluated epoch."""

    losses: list[list[float | None]]
    metrics: dict[int, float]

    @classmethod
    def of(cls, outcome: Outcome) -> Trace:
        return cls(
            losses=[[epoch.train_loss for epoch in worker.epochs] for worker in outcome.workers],
            metrics={evaluation.epoch: evaluation.metric for evaluation in outcome.evaluations},
        )


class ReplayWorker:
    """Implements `strategies.base.Worker` without arithmetic; `model` is on torch's meta device.

    Strategies that read a number out of a tensor, share a model or ask a server cannot be replayed: torch raises
    RuntimeError, or this class NotImplementedError.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        comm: Communicator,
        clock: Clock,
        trace: Trace,
        workers_per_node: int,
        model: torch.nn.Module,
    ) -> None:
        self.run, self.plan, self.comm, self.clock = run, plan, comm, clock
        self.rank, self.size, self.epochs, self.seed = comm.rank, comm.size, run.epochs, run.seed
        self.workers_per_node = min(workers_per_node, comm.size)
        self.model: Any = model
        numbers = sum(parameter.numel() for parameter in model.parameters())
        dtype = getattr(torch, run.dtype)
        self.parameters = torch.empty(numbers, dtype=dtype, device="meta")
        self.gradients = torch.empty_like(self.parameters)
        self.last_loss = torch.empty((), dtype=dtype, device="meta")
        parameter = torch.nn.Parameter(self.parameters)
        parameter.grad = self.gradients
        self.optimizer: Any = build_optimizer(run.optimizer, [parameter], run.lr, flat=True)
        self.forward: Callable[[Tensor], Tensor] = lambda x: x
        self.state = SimpleNamespace()
        self.on_epoch: Callable[[int], None] | None = None
        self.meters = Meters(comm.rank, clock, comm)
        self.steps = 0
        self.evaluations: list[Evaluation] = []
        self._trace, self._epoch = trace, 0

    @property
    def samples(self) -> int:
        return int(self.plan.shard_sizes(self._epoch)[self.rank])

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        raise NotImplementedError("a replay has no model to share")

    def server(self, rule: ServerRule) -> Server:
        raise NotImplementedError("a replay has no model to serve")

    def steps_in(self, epoch: int) -> int:
        return self.plan.steps(epoch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        bounds = self.plan.bounds(epoch, self.rank).tolist()
        return self._walk(epoch, list(pairwise(bounds)))

    def block_batches(self, epoch: int) -> Iterator[Batch]:
        starts = self.plan.block_starts(epoch, self.rank)
        return self._walk(epoch, equal_batches(starts, self.samples, self.plan.batch_size)[0])

    def _walk(self, epoch: int, bounds: list[tuple[int, int]]) -> Iterator[Batch]:
        self._epoch = epoch
        firsts = set(self.plan.block_starts(epoch, self.rank).tolist())
        self.clock.did(Task.SHUFFLE, self.samples)
        for step, (low, high) in enumerate(bounds):
            self.clock.did(Task.DATA, high - low)
            nothing = _nothing(high - low)
            yield Batch(nothing, nothing, 1.0, step, any(low <= first < high for first in firsts))

    def gradient(self, batch: Batch, weight: float = 1.0, *, add: bool = False) -> None:
        self.clock.did(Task.FORWARD, len(batch.x))
        self.clock.did(Task.BACKWARD, len(batch.x))

    @property
    def learning_rate(self) -> float:
        return self.run.lr

    def adopt(self, weights: Tensor) -> None:
        raise NotImplementedError("a replay has no weights of its own")

    def observe(self, name: str, value: int) -> None:
        self.meters.observe(name, value)

    def update(self) -> None:
        self.steps += 1
        self.clock.did(Task.UPDATE)

    def local_step(self, batch: Batch) -> None:
        self.gradient(batch)
        self.update()

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def use_optimizer(self, wrap: Any) -> None:
        raise NotImplementedError("a replay has no gradients for a real optimizer")

    def is_last(self, epoch: int) -> bool:
        return epoch == self.epochs - 1

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        self.meters.close_epoch(epoch, self.clock.elapsed(), self._trace.losses[self.rank][epoch])
        if epoch in self._trace.metrics and not self.is_last(epoch):
            self.keep(epoch, self.clock.elapsed(), True)
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None:
        """Stamp the metric of the computed run with this run's time."""
        if self.rank == 0 and epoch in self._trace.metrics:
            self.evaluations.append(Evaluation(epoch, elapsed_s, self._trace.metrics[epoch]))

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        raise NotImplementedError("a replay has no model to keep")


@cache
def _nothing(samples: int) -> Tensor:
    return torch.empty(samples, device="meta")
