"""Times of lock-step runs, whose arithmetic does not depend on time: train once, price always.

The schedules of a run are recorded and priced on a machine; losses and metrics are
those of its `Trace`.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.pricing.charges import Charges, carrier, gradients
from scalebench.pricing.held_parts import meta_model, trainable_numbers
from scalebench.pricing.machine import Machine
from scalebench.pricing.price import NotLockStepError, Priced, TimeArrays, price
from scalebench.pricing.recording import batches_of, record_each
from scalebench.pricing.schedule import Schedule
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.spec import Run
from scalebench.training.outcome import (
    EpochReport,
    Evaluation,
    Outcome,
    RunFacts,
    WorkerReport,
)

Weights = Mapping[str, Tensor]


def strategy_of(run: Run) -> Strategy:
    """Return the strategy of a virtual run."""
    return registry.create(run.strategy.name, run.strategy.options, "virtual")


def is_lock_step(run: Run) -> bool:
    """Return True if the arithmetic of `run` does not depend on time and moves no rows: it is timed without it."""
    strategy = strategy_of(run)
    return strategy.deterministic and not strategy.traits.adapts and rows_stay(run)


def rows_stay(run: Run) -> bool:
    """Return True if workers keep their rows: those that travel are charged from what they are."""
    return run.shuffle in ("none", "in_block")


def time(
    runs: Sequence[Run], dataset: Dataset, machine: Machine, traces: Sequence[Trace]
) -> list[Outcome]:
    """Return the outcomes of `runs`, equal up to seed and jitter, with the losses and metrics of `traces`.

    Nothing is computed. Schedules that do not depend on the seed are recorded and
    walked through once, also for the time without jitter of runs that ask for it.

    Raises:
        NotLockStepError: the schedules depend on time, or are not those of the trace.
        RuntimeError: the strategy reads values of tensors.
    """
    # Priced beside the runs: their schedules are walked through once for all.
    steady = {
        place: without_jitter(run)
        for place, run in enumerate(runs)
        if run.also_without_jitter
    }
    prepared = Prepared([*runs, *steady.values()], dataset, machine)
    schedules = prepared.schedules()
    drawn = (
        any(schedule.reads_seed for schedule in schedules)
        or not prepared.have_same_batches()
    )
    if drawn and len(runs) > 1:
        one_by_one = zip(runs, traces, strict=True)
        return [
            outcome
            for run, trace in one_by_one
            for outcome in time([run], dataset, machine, [trace])
        ]
    for trace in traces:
        trace.require_same_arithmetic(schedules, machine.cluster.node.workers_per_node)
    parameters = trainable_numbers(meta_model(prepared.run, dataset))
    outcomes = []
    times = price(schedules, prepared.charges)
    for run, trace, priced in zip(runs, traces, times[: len(runs)], strict=True):
        reports = {
            schedule.rank: trace.report(schedule, priced) for schedule in schedules
        }
        evaluations = trace.evaluations(priced.moments())
        outcome = prepared.outcome(run, reports, evaluations, 0.0, parameters)
        outcome.add_facts(**trace.facts)
        outcomes.append(outcome)
    for place, priced in zip(steady, times[len(runs) :], strict=True):
        outcomes[place].add_facts(train_s_no_jitter=priced.train_s)
    return outcomes


def without_jitter(run: Run) -> Run:
    """Return `run` with steps that all take equally long."""
    virtual = run.virtual.model_copy(update={"jitter": "none"})
    return run.model_copy(update={"virtual": virtual, "also_without_jitter": False})


@dataclass(frozen=True)
class Trace:
    """Results of a computed run: the loss of each worker and epoch, its evaluations, and its weights.

    `weights` are the vectors `initial` and `final` (n,), empty if they are not known.
    `eval_s` are the seconds that the evaluations took.
    """

    losses: list[list[float | None]]
    evaluated: list[Evaluation]  # the moments are those of the computed run
    # where they were computed; None for the same as now
    workers_per_node: int | None = None
    arithmetic: str | None = None  # that computed the gradients
    # synchronisations of worker 0 and bytes per worker, if they are known
    sent: tuple[int, float] | None = None
    weights: Weights = field(default_factory=dict)
    eval_s: float | None = None
    is_trained: bool = True
    why_single: str = ""  # each worker computed its own gradients

    @classmethod
    def of(cls, outcome: Outcome, weights: Weights | None = None) -> Trace:
        return cls(
            losses=[
                [epoch.train_loss for epoch in worker.epochs]
                for worker in outcome.workers
            ],
            evaluated=outcome.evaluations,
            arithmetic=outcome.facts.arithmetic,
            weights=weights or {},
            eval_s=outcome.eval_s,
            why_single=outcome.facts.why_single,
        )

    @classmethod
    def untrained(cls, run: Run) -> Trace:
        """Return the trace of a run that is not computed, of which only the time is asked for."""
        return cls([[None] * run.epochs] * run.workers, [], is_trained=False)

    @property
    def facts(self) -> dict[str, Any]:
        """How the gradients were computed."""
        return {"arithmetic": self.arithmetic, "why_single": self.why_single}

    def require_same_arithmetic(
        self, schedules: Sequence[Schedule], workers_per_node: int
    ) -> None:
        """Refuse schedules whose arithmetic may differ from that of the computed run.

        Raises:
            NotLockStepError: they depend on the training loss, or on the workers of a node, which were others, or send
                other bytes.
        """
        if not self.is_trained:
            return
        if any(schedule.reads_loss for schedule in schedules):
            raise NotLockStepError("its schedule depends on the training loss")
        moved = self.workers_per_node not in (
            None,
            min(workers_per_node, len(schedules)),
        )
        if moved and any(schedule.reads_placement for schedule in schedules):
            raise NotLockStepError("its groups depend on the workers of a node")
        sent = sum(schedule.bytes_sent for schedule in schedules) / len(schedules)
        if self.sent is not None and not (
            schedules[0].syncs == self.sent[0] and math.isclose(sent, self.sent[1])
        ):
            raise NotLockStepError("it sends other bytes than before")

    def with_losses(self, report: WorkerReport) -> WorkerReport:
        """Return the report of a worker with the loss of each epoch."""
        of_epochs = zip(report.epochs, self.losses[report.rank], strict=True)
        return replace(
            report,
            epochs=[replace(epoch, train_loss=loss) for epoch, loss in of_epochs],
        )

    def report(self, schedule: Schedule, priced: Priced) -> WorkerReport:
        """Return the report of the worker of `schedule`: its counts, the priced times, and these losses."""
        assert schedule.report is not None
        recorded, rank = self.with_losses(schedule.report), schedule.rank
        epochs: list[EpochReport] = []
        before, since = TimeArrays.empty(len(priced.end.now)).of(rank), 0.0
        for counted, ended in zip(recorded.epochs, priced.epochs, strict=True):
            elapsed_s, after = float(ended.now[rank]), ended.of(rank)
            counted = replace(counted, elapsed_s=elapsed_s, epoch_s=elapsed_s - since)
            for column in ("compute_s", "comm_s", "wait_s", "data_s"):
                setattr(counted, column, after[column] - before[column])
            epochs.append(counted)
            before, since = after, elapsed_s
        report = replace(recorded, train_s=float(priced.end.now[rank]), epochs=epochs)
        for column, seconds in priced.end.of(rank).items():
            setattr(report, column, seconds)
        return report

    def evaluations(self, moments: Mapping[int, float]) -> list[Evaluation]:
        """Return the evaluations at the `moments` of their epochs."""
        in_order = sorted(self.evaluated, key=lambda one: one.epoch)
        return [replace(one, elapsed_s=moments[one.epoch]) for one in in_order]


class Prepared:
    """Repetitions of a run on a machine: its strategy, the batches of its workers, and the charges on what they do."""

    def __init__(self, runs: Sequence[Run], dataset: Dataset, machine: Machine) -> None:
        run = runs[0]
        # Sums are divided among threads, and rounded otherwise by another number of them.
        torch.set_num_threads(run.threads_per_worker)
        self.runs, self.run, self.dataset, self.machine = runs, run, dataset, machine
        self.strategy = strategy_of(run)
        self.mesh = self.strategy.traits.mesh(run.workers)
        self.plan = BatchPlan.of(run, run.workers, run.seed, dataset, self.mesh.parts)
        self.table = machine.table_for(run.workers)
        self.charges = Charges.of(runs, machine)
        self.costs = self.charges.costs
        self.workers_per_node = machine.cluster.node.workers_per_node

    def have_same_batches(self) -> bool:
        """Return True if the workers take batches of the same sizes in all runs."""
        plans = [
            BatchPlan.of(run, run.workers, run.seed, self.dataset, self.mesh.parts)
            for run in self.runs
            if run.seed != self.run.seed
        ]
        return all(
            batches_of(plan, rank, self.run.epochs)
            == batches_of(self.plan, rank, self.run.epochs)
            for plan in plans
            for rank in range(self.mesh.data)
        )

    def schedules(self) -> list[Schedule]:
        """Return the schedules of all workers.

        Raises:
            NotLockStepError: that of the first one depends on time; the others are not recorded.
        """
        each = self._schedules()
        first = next(each)
        if not first.is_lock_step:
            raise NotLockStepError("the order of its operations depends on time")
        return [first, *each]

    def _schedules(self) -> Iterator[Schedule]:
        model, shape = self.without_arithmetic(), self.dataset.input_shape
        return record_each(
            self.run,
            self.strategy,
            self.plan,
            model,
            self.workers_per_node,
            input_shape=shape,
        )

    def without_arithmetic(self) -> torch.nn.Module:
        """Return the model on the meta device, whose gradients are then those that are charged."""
        model = meta_model(self.run, self.dataset)
        self.charge_gradients_of(model)
        return model

    def charge_gradients_of(self, model: torch.nn.Module) -> None:
        """Charge communication that overlaps a backward pass by the gradients of `model`."""
        self.costs.gradients = gradients(
            model, self.table.release_at(self.plan.batch_size)
        )

    def outcome(
        self,
        run: Run,
        reports: Mapping[int, WorkerReport],
        evaluations: list[Evaluation],
        eval_s: float,
        parameters: int,
        **facts: Any,
    ) -> Outcome:
        """Return the outcome of a completed run; `facts` are those of its arithmetic and its servers."""
        ordered = [reports[rank] for rank in sorted(reports)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for report in ordered:
            report.peak_rss_mib = peak
        cluster = self.machine.cluster
        loads = [
            load
            for load in (self.table.others_load, self.machine.engines.others_load)
            if load is not None
        ]
        known = RunFacts.of(
            self.dataset,
            self.plan,
            parameters=parameters,
            nodes=cluster.nodes_for(self.run.workers),
            workers_per_node=min(self.run.workers, self.workers_per_node),
            device=self.table.source,
            gpus=self.run.workers if cluster.node.gpus else None,
            launcher="in-process",
            binding="none",
            reference_step_s=self.machine.reference_s,
            others_load=max(loads, default=None),
            calibration=self._calibration(),
            **facts,
        )
        return Outcome(run.run_id, "completed", "", ordered, evaluations, eval_s, known)

    def _calibration(self) -> str | None:
        """How well the times that charge the run could be measured; None where nothing was measured."""
        if self.machine.cluster.compute != "this-machine":
            return None
        engine = carrier(self.run) if self.run.workers > 1 else ""
        return (
            "disturbed"
            if self.table.disturbed or engine in self.machine.engines.disturbed
            else "quiet"
        )
