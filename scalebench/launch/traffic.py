"""The recorded schedules of a study's strategies: as traffic, as a graph of tasks, as a check of what runs counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from scalebench.comm.engines import of_tasks
from scalebench.data.dataset import Dataset
from scalebench.errors import StudyError
from scalebench.launch.engine_choice import check_provided
from scalebench.launch.planning import StudyPlan
from scalebench.pricing.held_parts import meta_model
from scalebench.pricing.recording import record
from scalebench.pricing.schedule import Schedule, TaskNode, task_graph
from scalebench.records.schema import RunRow
from scalebench.strategies import registry
from scalebench.study.spec import Run


@dataclass(frozen=True)
class Traffic:
    """Means per epoch; synchronisations of worker 0, bytes over the workers."""

    workers: int
    steps: int
    syncs: float
    bytes_sent: float
    rows_bytes: float  # of rows that a shuffle moves, on top
    memory_bytes: int  # of a worker's model, optimizer and strategy, at most


def traffic_of(plan: StudyPlan) -> list[Traffic]:
    """Traffic of the first strategy of the plan at each of its worker counts."""
    study, dtype = plan.study, getattr(torch, plan.study.dtype)
    runs = {
        run.workers: run
        for run in plan.sweep.runs
        if run.strategy == study.strategies[0]
    }
    found = []
    for workers, run in sorted(runs.items()):
        dataset, shards = plan.prepared.datasets[workers], plan.prepared.plan_of(run)
        schedules = schedules_of(plan, run, meta_model(study, dataset))
        moved = sum(
            int(shards.moved(epoch).sum()) for epoch in range(study.epochs)
        ) * bytes_of_row(dataset, dtype)
        sent = sum(schedule.bytes_sent for schedule in schedules)
        mean = 1 / study.epochs / workers
        memory = max(schedule.memory_bytes for schedule in schedules)
        # of worker 0, as rows count them
        syncs = schedules[0].syncs / study.epochs
        found.append(
            Traffic(workers, shards.steps(0), syncs, sent * mean, moved * mean, memory)
        )
    return found


def schedules_of(plan: StudyPlan, run: Run, model: torch.nn.Module) -> list[Schedule]:
    """The schedules of the workers of `run`, as virtual runs have them."""
    strategy = registry.create(run.strategy.name, run.strategy.options, "virtual")
    per_node = plan.cluster.node.workers_per_node
    prepared = plan.prepared
    shape = prepared.datasets[run.workers].input_shape
    return record(run, strategy, prepared.plan_of(run), model, per_node, shape)


def tasks_of(plan: StudyPlan) -> tuple[Run, list[TaskNode]]:
    """Return the only run of `plan`, and the graph of its tasks.

    Raises:
        StudyError: the plan has several runs.
        EngineError: the strategy exchanges something between the batches of an epoch.
    """
    run = only_run(plan)
    strategy = registry.create(run.strategy.name, run.strategy.options, of_tasks())
    check_provided(strategy, of_tasks())
    dataset = plan.prepared.datasets[run.workers]
    return run, task_graph(schedules_of(plan, run, meta_model(plan.study, dataset)))


def only_run(plan: StudyPlan) -> Run:
    """Return the only run of `plan`.

    Raises:
        StudyError: the plan has several runs.
    """
    if len(plan.sweep.runs) != 1:
        found = ", ".join(
            sorted(
                {
                    f"{run.strategy} at {run.workers} ({run.execution})"
                    for run in plan.sweep.runs
                }
            )
        )
        raise StudyError(
            f"a timeline, or a graph of tasks, is of one run, the study has {len(plan.sweep.runs)}: {found}; "
            "choose with --strategy, --workers and --execution"
        )
    return plan.sweep.runs[0]


def bytes_of_row(dataset: Dataset, dtype: torch.dtype) -> int:
    """Bytes of a row that moves to another worker: x in the run's dtype, y too or as a label of 8 bytes."""
    label = 8 if dataset.task == "classification" else dtype.itemsize
    return (
        math.prod(dataset.x_train.shape[1:]) * dtype.itemsize
        + math.prod(dataset.y_train.shape[1:]) * label
    )


class TrafficCheck:
    """Compares the counts of completed runs with the schedule of their program.

    Each strategy is checked at the first worker count that completes, on each engine
    whose class has the same program as the virtual one, unless its traffic depends on
    time or on the loss.
    """

    def __init__(self, plan: StudyPlan) -> None:
        self._plan = plan
        self._checked: set[tuple[str, str]] = set()

    def differences(self, run: Run, row: RunRow) -> list[str]:
        """One line for each count that differs from the program's."""
        key = (str(run.strategy), run.engine)
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        # a library's own program sends by other calls than the virtual one
        same = registry.runs_as_simulated(run.strategy.name, run.engine)
        timeless = (
            strategy.deterministic
            and not strategy.traits.adapts
            and run.shuffle in ("none", "in_block")
        )
        # repetitions run the same program
        first = run.workers > 1 and run.repetition == 0 and key not in self._checked
        if not first or not same or not timeless or row.status != "completed":
            return []
        self._checked.add(key)
        model = meta_model(self._plan.study, self._plan.prepared.datasets[run.workers])
        try:
            schedules = schedules_of(self._plan, run, model)
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a strategy of the user's own raises, the run is kept
            return [
                f"{run.strategy}: its schedule cannot be recorded: {type(error).__name__}: {error}"
            ]
        # its program follows losses, which a recording without data has not
        if schedules[0].reads_loss:
            return []
        sent = sum(schedule.bytes_sent for schedule in schedules) / run.workers
        counts = (
            ("synchronisations", row.syncs, schedules[0].syncs),
            ("bytes of a worker", row.bytes_sent_per_worker, sent),
        )
        return [
            f"{run.strategy} at {run.workers} workers on {run.engine}: {counted:,.0f} {what} were counted, its program "
            f"makes {recorded:,.0f}"
            for what, counted, recorded in counts
            if counted is not None and not math.isclose(counted, recorded, rel_tol=1e-9)
        ]
