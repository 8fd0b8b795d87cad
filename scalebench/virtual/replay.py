"""A worker that repeats a run without its arithmetic: the same schedule, its own time.

Virtual time of a strategy whose arithmetic does not depend on time follows from its program alone. A `ReplayWorker`
is charged for each operation of the program and takes losses and metrics over from the computed run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scalebench.comm.base import Communicator, Server, ServerRule, SharedState
from scalebench.data.plan import BatchPlan
from scalebench.pricing.recording import RecordingWorker
from scalebench.study.spec import Run
from scalebench.system.clock import Clock
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


class ReplayWorker(RecordingWorker):
    """Implements `strategies.base.Worker` without arithmetic.

    Strategies that read a number out of a tensor, share a model or ask a server cannot be replayed: torch raises
    RuntimeError, or this class NotImplementedError.
    """

    def __init__(
        self,
        run: Run,
        plan: BatchPlan,
        comm: Communicator,
        clock: Clock,
        trace: Trace,
        workers_per_node: int,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(run, plan, comm, clock, workers_per_node, model)
        self.last_loss = torch.empty((), dtype=self.dtype, device="meta")
        self.evaluations: list[Evaluation] = []
        self._trace = trace

    def share(self, initial: Tensor, host: int = 0) -> SharedState:
        raise NotImplementedError("a replay has no model to share")

    def server(self, rule: ServerRule) -> Server:
        raise NotImplementedError("a replay has no model to serve")

    def epoch_done(self, epoch: int, agreed: bool | None) -> None:
        self.meters.close_epoch(epoch, self.clock.elapsed(), self._trace.losses[self.rank][epoch])
        if not self.is_last(epoch):
            self.keep(epoch, self.clock.elapsed(), True)
        if self.on_epoch is not None:
            self.on_epoch(epoch)

    def keep(self, epoch: int, elapsed_s: float, agreed: bool) -> None:
        """Stamp the metric of the computed run with this run's time."""
        if self.rank == 0 and epoch in self._trace.metrics:
            self.evaluations.append(Evaluation(epoch, elapsed_s, self._trace.metrics[epoch]))

    def snapshot(self, epoch: int, vector: Tensor) -> None:
        raise NotImplementedError("a replay has no model to keep")
