"""Times of a run whose arithmetic is known: its schedule priced, losses and metrics taken over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalebench.pricing.price import NotLockStepError, Priced, TimeArrays
from scalebench.pricing.schedule import Schedule
from scalebench.study.spec import Run
from scalebench.training.outcome import EpochReport, Evaluation, Outcome, WorkerReport


@dataclass(frozen=True)
class Trace:
    """Results of a computed run: the loss of each worker and epoch, and its evaluations."""

    losses: list[list[float | None]]
    evaluated: list[Evaluation]  # the moments are those of the computed run
    workers_per_node: int | None = None  # where they were computed; None for the same as now
    arithmetic: str | None = None  # that computed the gradients
    sent: tuple[int, float] | None = None  # synchronisations of worker 0 and bytes per worker, if they are known

    @classmethod
    def of(cls, outcome: Outcome) -> Trace:
        return cls(
            losses=[[epoch.train_loss for epoch in worker.epochs] for worker in outcome.workers],
            evaluated=outcome.evaluations,
            arithmetic=outcome.facts.arithmetic,
        )

    @classmethod
    def untrained(cls, run: Run) -> Trace:
        return cls([[None] * run.epochs] * run.workers, [])

    def require_same_arithmetic(self, schedules: Sequence[Schedule], workers_per_node: int) -> None:
        """Refuse schedules whose arithmetic may differ from that of the computed run.

        Raises:
            NotLockStepError: they depend on the training loss, or on the workers of a node, which were others, or send
                other bytes.
        """
        if any(schedule.reads_loss for schedule in schedules):
            raise NotLockStepError("its schedule depends on the training loss")
        moved = self.workers_per_node not in (None, min(workers_per_node, len(schedules)))
        if moved and any(schedule.reads_placement for schedule in schedules):
            raise NotLockStepError("its groups depend on the workers of a node")
        sent = sum(schedule.bytes_sent for schedule in schedules) / len(schedules)
        if self.sent is not None and not (schedules[0].syncs == self.sent[0] and math.isclose(sent, self.sent[1])):
            raise NotLockStepError("it sends other bytes than before")

    def report(self, schedule: Schedule, priced: Priced) -> WorkerReport:
        """Return the report of the worker of `schedule`: its counts, the priced times, and these losses."""
        recorded, rank = schedule.report, schedule.rank
        assert recorded is not None
        epochs: list[EpochReport] = []
        before, since = TimeArrays.empty(len(priced.end.now)).of(rank), 0.0
        for counted, ended, loss in zip(recorded.epochs, priced.epochs, self.losses[rank], strict=True):
            elapsed_s, after = float(ended.now[rank]), ended.of(rank)
            counted = replace(counted, elapsed_s=elapsed_s, epoch_s=elapsed_s - since, train_loss=loss)
            for column in ("compute_s", "comm_s", "wait_s", "data_s"):
                setattr(counted, column, after[column] - before[column])
            epochs.append(counted)
            before, since = after, elapsed_s
        report = replace(recorded, train_s=float(priced.end.now[rank]), epochs=epochs)
        for column, seconds in priced.end.of(rank).items():
            setattr(report, column, seconds)
        return report

    def evaluations(self, priced: Priced) -> list[Evaluation]:
        """Return the evaluations at the priced moments of worker 0."""
        moments = [*(epoch.now[0] for epoch in priced.epochs[:-1]), priced.end.now[0]]
        in_order = sorted(self.evaluated, key=lambda one: one.epoch)
        return [replace(one, elapsed_s=float(moments[one.epoch])) for one in in_order]
