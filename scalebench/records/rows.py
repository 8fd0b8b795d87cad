"""The rows of a run, from its outcome; of an elastic one, with the deaths after which it went on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from scalebench.cluster.cluster_file import own_file
from scalebench.records.provenance import redact
from scalebench.records.schema import ElasticRow, EpochRow, RunRow
from scalebench.strategies import registry
from scalebench.strategies.base import Strategy
from scalebench.study.spec import SIMULATED, Component, Run
from scalebench.training.outcome import EpochReport, Outcome, RunFacts, WorkerReport

R = TypeVar("R", RunRow, ElasticRow)
_SECONDS_PER_HOUR = 3600
_MAY_HOLD_PATHS = (
    "error",
    "cluster",
    "model",
    "dataset",
    "strategy_options",
)
# share of steps; above it a paced run counts as oversubscribed
PACED_OVERRUN_LIMIT = 0.01


def without_owners(row: R) -> R:
    """Return `row` without secrets, and without names of people in paths that its texts hold."""
    texts = {
        name: redact(text, names=False)
        for name in _MAY_HOLD_PATHS
        if (text := getattr(row, name, None))
    }
    cluster = getattr(row, "cluster", None)
    if cluster and own_file(cluster):
        # the file itself can be named after its owner
        texts["cluster"] = redact(cluster)
    return row.model_copy(update=texts)


def rows_of(
    run: Run,
    outcome: Outcome,
    *,
    attempt: int,
    oversubscribed: bool,
    started_utc: str,
    provenance: dict[str, Any],
) -> tuple[RunRow, list[EpochRow]]:
    """The run's row and its epochs' rows. Times are the slowest worker's, their parts means over workers."""
    facts, workers = outcome.facts, outcome.workers
    strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
    # A run lasts until its slowest worker has finished.
    train_s = max((worker.train_s for worker in workers), default=None)
    # Ranks that miss their pace are oversubscribed, whatever the number of cores.
    overrun = _mean(worker.paced_overrun for worker in workers)
    measured: dict[str, Any] = {
        "attempt": attempt,
        "status": outcome.status,
        "error": outcome.error or None,
        "oversubscribed": oversubscribed or (overrun or 0.0) > PACED_OVERRUN_LIMIT,
        "paced_overrun": overrun,
        "optimizer_steps": max(
            (worker.optimizer_steps for worker in workers), default=None
        ),
        # of worker 0, as the schedule of its program has them
        "syncs": workers[0].syncs if workers else None,
        "collective_calls": workers[0].collective_calls if workers else None,
        "bytes_sent_per_worker": _mean(worker.bytes_sent for worker in workers),
        "train_s": train_s,
        "hidden_comm_s": _mean(worker.hidden_comm_s for worker in workers),
        "straggler_factor": _straggler_factor(workers),
        "worker_weights": _worker_weights(strategy, run, outcome),
        "staleness_histogram": _histogram(workers, "staleness"),
        "lead_histogram": _histogram(workers, "lead_at_push"),
        "eval_s": outcome.eval_s,
        "final_train_loss": _mean_loss(
            [worker.epochs[-1] for worker in workers if worker.epochs]
        ),
        "started_utc": started_utc,
    }
    parts = _parts(workers, train_s) | _metrics(run, outcome)
    parts |= _resources(run, facts, workers, train_s)
    # of virtual workers there is one machine, whose clock rates say nothing of a run
    if run.execution not in SIMULATED:
        parts |= _of_each_worker(workers)
    if strategy.traits.mesh(run.workers).pipeline > 1:
        parts["bubble_s"] = _bubble(workers, train_s)
    row = RunRow(
        **(
            _equally_named(run, facts, strategy)
            | _synchronisation(strategy, run)
            | measured
            | parts
            | provenance
        )
    )
    return row, _epoch_rows(strategy.synchronisation.epochs or 1, run, outcome, attempt)


def _equally_named(run: Run, facts: RunFacts, strategy: Strategy) -> dict[str, Any]:
    """Return the columns named like a key of the run or a fact of its outcome; a known fact counts before a key."""
    known = {name: value for name, value in vars(facts).items() if value is not None}
    values = {
        name: known.get(name, getattr(run, name, None))
        for name in RunRow.model_fields
        if name != "schema_version"
    }
    values |= {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, Component)
    }
    traits = strategy.traits
    mesh = traits.mesh(run.workers)
    # workers of a replica share its batch
    if values["batch_global"] is None and values["batch_per_worker"]:
        values["batch_global"] = values["batch_per_worker"] * mesh.data
    division = {
        "data_parallel": mesh.data,
        "pipeline_parallel": mesh.pipeline,
        "tensor_parallel": mesh.tensor,
        "micro_batches": traits.micro_batches if mesh.parts > 1 else 1,
    }
    return values | division | {"tuned": run.tuned or None}


def _synchronisation(strategy: Strategy, run: Run) -> dict[str, Any]:
    named = {"strategy": run.strategy.name, "strategy_options": run.strategy.options}
    return named | strategy.synchronisation.columns()


def _parts(
    workers: list[WorkerReport], train_s: float | None
) -> dict[str, float | None]:
    """Mean parts of the training time; idle time after finishing counts as communication and as waiting."""
    if train_s is None:
        return {}
    idle = fmean(train_s - worker.train_s for worker in workers)
    comm = _mean(worker.comm_s for worker in workers)
    wait = _mean(worker.wait_s for worker in workers)
    return {
        "compute_s": _mean(worker.compute_s for worker in workers),
        "comm_s": None if comm is None else comm + idle,
        "wait_s": None if wait is None else wait + idle,
        "data_s": _mean(worker.data_s for worker in workers),
        "other_s": _mean(worker.other_s for worker in workers),
    }


def _of_each_worker(workers: list[WorkerReport]) -> dict[str, list[Any] | None]:
    """The columns that list a value for each worker, None where no worker has one."""
    columns: dict[str, list[Any]] = {
        "worker_step_s": [_step_s(worker) for worker in workers],
        "worker_nodes": [worker.node for worker in workers],
        "worker_cores": [worker.cores for worker in workers],
        "worker_mhz_before": [worker.mhz_before for worker in workers],
        "worker_mhz_after": [worker.mhz_after for worker in workers],
        "worker_throttles": [worker.throttles for worker in workers],
        "worker_gpu_mhz_before": [worker.gpu_mhz_before for worker in workers],
        "worker_gpu_mhz_after": [worker.gpu_mhz_after for worker in workers],
        "worker_gpu_slowdowns": [worker.gpu_slowdowns for worker in workers],
        "worker_clock_offset_s": [worker.clock_offset_s for worker in workers],
        "worker_clock_error_s": [worker.clock_error_s for worker in workers],
    }
    return {
        name: None if values.count(None) == len(values) else values
        for name, values in columns.items()
    }


def _bubble(workers: list[WorkerReport], train_s: float | None) -> float | None:
    """Mean time of a stage without work; idle time after its last micro-batch belongs to it."""
    waited = _mean(worker.bubble_s for worker in workers)
    if train_s is None or waited is None:
        return None
    return waited + fmean(train_s - worker.train_s for worker in workers)


def _hours(train_s: float | None, held: int | None) -> float | None:
    """Hours of `held` cores or GPUs during the training."""
    return (
        None if train_s is None or held is None else train_s * held / _SECONDS_PER_HOUR
    )


def _straggler_factor(workers: list[WorkerReport]) -> float | None:
    """Straggler factor max_i c_i / mean_i c_i with c_i = compute_s / optimizer_steps of worker i.

    Per step, as a worker that skips rounds or is chosen less often computes less, and
    is not faster for that. Over the workers that took a step; None where compute is not
    measured apart, or no worker computed.
    """
    each = [_step_s(worker) for worker in workers if worker.optimizer_steps]
    mean = _mean(each)
    return max(seconds or 0.0 for seconds in each) / mean if mean else None


def _step_s(worker: WorkerReport) -> float | None:
    """Compute time of one optimizer step; None without a step, or where compute is not measured apart."""
    if worker.compute_s is None or not worker.optimizer_steps:
        return None
    return worker.compute_s / worker.optimizer_steps


def _worker_weights(
    strategy: Strategy, run: Run, outcome: Outcome
) -> list[float] | None:
    merges, final_weights = _merges(outcome), strategy.traits.final_weights
    if merges is None or final_weights is None:
        return None
    weights = final_weights(
        merges, run.epochs, [worker.samples for worker in outcome.workers]
    )
    # digits beyond these are of rounding
    return [float(f"{weight:.6g}") for weight in weights]


def _merges(outcome: Outcome) -> list[list[int]] | None:
    """Places of each worker's merges among all merges of an asynchronous run."""
    found = [
        sorted(map(int, worker.histograms.get("merge_position", ())))
        for worker in outcome.workers
    ]
    return found if any(found) else None


def _merge_positions(
    every: int, run: Run, outcome: Outcome, epoch: int
) -> list[int] | None:
    """Places of the merges after `epoch` among all merges, one per worker, if there is one `every` so many epochs."""
    merges = _merges(outcome)
    if merges is None:
        return None
    # The merge that belongs to this epoch, if there is one.
    count, rest = divmod(epoch + 1, every)
    if rest:  # a partial interval is merged at the end of training or not at all
        return (
            [own[-1] for own in merges]
            if epoch == run.epochs - 1 and len(merges[0]) > count
            else None
        )
    return [own[count - 1] for own in merges]


def _histogram(workers: list[WorkerReport], name: str) -> dict[int, int] | None:
    """The sum of the workers' histograms `name`; None without any."""
    total: Counter[int] = Counter()
    for worker in workers:
        for value, times in worker.histograms.get(name, {}).items():
            # keys came through JSON, as text
            total[int(value)] += times
    return dict(sorted(total.items())) or None


def _resources(
    run: Run, facts: RunFacts, workers: list[WorkerReport], train_s: float | None
) -> dict[str, float | None]:
    """Return the most memory that a worker used, and the time that cores and GPUs were held."""
    host = [worker.peak_rss_mib for worker in workers]
    device = [worker.peak_device_mib for worker in workers]
    return {
        "peak_rss_mib": max((mib for mib in host if mib is not None), default=None),
        "peak_device_mib": max(
            (mib for mib in device if mib is not None), default=None
        ),
        "cost_core_hours": _hours(train_s, run.workers * run.threads_per_worker),
        "cost_gpu_hours": _hours(train_s, facts.gpus),
    }


def _metrics(run: Run, outcome: Outcome) -> dict[str, Any]:
    """Return the metrics at the end and the best one, and when the target was reached where the run has one."""
    # Asynchronous workers report in any order.
    evaluations = sorted(
        outcome.evaluations, key=lambda evaluation: evaluation.elapsed_s
    )
    last = evaluations[-1] if evaluations else None
    metrics = {
        "final_metric": last.metric if last else None,
        "final_train_metric": last.train_metric if last else None,
        "best_metric": max((each.metric for each in evaluations), default=None),
    }
    if run.target_metric is None:
        return metrics
    first = next((e for e in evaluations if e.metric >= run.target_metric), None)
    return metrics | {
        "time_to_target_s": first.elapsed_s if first else None,
        "epochs_to_target": first.epoch + 1 if first else None,
    }


def _epoch_rows(every: int, run: Run, outcome: Outcome, attempt: int) -> list[EpochRow]:
    metrics = {
        evaluation.epoch: evaluation.metric for evaluation in outcome.evaluations
    }
    # After a failure some workers are an epoch ahead: rows are of epochs that all have.
    epochs = min((len(worker.epochs) for worker in outcome.workers), default=0)
    rows = []
    for index in range(epochs):
        reports = [worker.epochs[index] for worker in outcome.workers]
        rows.append(
            EpochRow(
                run_id=run.run_id,
                attempt=attempt,
                epoch=reports[0].epoch,
                elapsed_s=max(report.elapsed_s for report in reports),
                epoch_s_max=max(report.epoch_s for report in reports),
                epoch_s_min=min(report.epoch_s for report in reports),
                epoch_s_mean=fmean(report.epoch_s for report in reports),
                **{
                    name: _over(reports, name)
                    for name in ("compute_s", "comm_s", "wait_s", "data_s")
                },
                train_loss=_mean_loss(reports),
                test_metric=metrics.get(reports[0].epoch),
                syncs=reports[0].syncs,
                bytes_sent=_over(reports, "bytes_sent"),
                mean_staleness=_over(reports, "mean_staleness"),
                max_staleness=_over(reports, "max_staleness", max),
                merge_positions=_merge_positions(every, run, outcome, reports[0].epoch),
            )
        )
    return rows


def _over(
    reports: list[EpochReport],
    name: str,
    join: Callable[[Iterable[float]], float] | None = None,
) -> float | None:
    values = [getattr(report, name) for report in reports]
    if any(value is None for value in values):
        return None
    return (join or fmean)(values)


def _mean_loss(reports: list[EpochReport]) -> float | None:
    """Mean over the workers that trained in the epoch."""
    return _mean(
        report.train_loss for report in reports if report.train_loss is not None
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    if not found or any(value is None for value in found):
        return None
    return fmean(value for value in found if value is not None)


@dataclass(frozen=True)
class RankDeath:
    """The death of a rank after which a run went on: it lost `lost_s` of training in `epoch`, and `pause_s`."""

    utc: str
    rank: int | None  # None: the launcher did not name it
    host: str
    epoch: int
    lost_s: float
    pause_s: float


@dataclass(frozen=True)
class ElasticOutcome:
    """What came of an elastic run; its time and the workers at its end are None where it did not begin."""

    outcome: Outcome
    deaths: Sequence[RankDeath] = ()
    workers_at_end: int | None = None
    total_s: float | None = None


def elastic_row(run: Run, ended: ElasticOutcome, **others: Any) -> ElasticRow:
    """Return the row of `run`; `others` are columns that neither it nor its outcome have."""
    outcome, deaths = ended.outcome, ended.deaths
    values = {
        name: value
        for name, value in vars(run).items()
        if name in ElasticRow.model_fields
    }
    values |= {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, Component)
    }
    values |= {
        "status": outcome.status,
        "error": outcome.error or None,
        "strategy": run.strategy.name,
        "strategy_options": run.strategy.options,
        "workers_at_end": ended.workers_at_end,
        "dealt_anew": ended.workers_at_end is not None
        and ended.workers_at_end < run.workers,
        "interruptions": len(deaths),
        "total_s": ended.total_s,
        "metric_name": outcome.facts.metric_name,
        "final_metric": outcome.evaluations[-1].metric if outcome.evaluations else None,
    }
    if deaths:
        # a list in a cell for each: deaths are few, and a row is one run
        names = ("utc", "rank", "host", "epoch", "lost_s", "pause_s")
        values |= {
            f"interrupted_{name}": [vars(death)[name] for death in deaths]
            for name in names
        }
    return ElasticRow(**(values | others))
