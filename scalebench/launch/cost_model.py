"""What virtual runs are charged by: measured once per study, kept beside its results, used again by later commands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict, ValidationError

from scalebench.cluster.engine_costs import EngineCosts, joined
from scalebench.cluster.spec import Cluster
from scalebench.data.dataset import open_dataset
from scalebench.errors import ClusterError, EngineError, ResultsError
from scalebench.launch import engines
from scalebench.launch.engine_costs import measure_between_nodes, measure_engine_costs
from scalebench.launch.hosts import reachable
from scalebench.launch.preparation import Preparation
from scalebench.study.spec import Run, Study
from scalebench.system.atomic_write import write_whole
from scalebench.virtual.calibration import Budget, loads_up_to, measure_steps
from scalebench.virtual.engine import CostModel
from scalebench.virtual.operation_costs import measure_operations
from scalebench.virtual.operation_times import OperationTimes
from scalebench.virtual.stated import stated_table
from scalebench.virtual.step_times import StepTable

THIS_MACHINE = "this-machine"  # the cluster whose nodes and links are those that are here
FILE = "calibration.json"
_OF_ENGINES = 0.4  # of the time for a calibration
_FROM_ELSEWHERE = f"virtual runs go on by {FILE}, which another machine or another torch measured"
Note = Callable[[str], None]


class Calibration(BaseModel):
    """The numbers, and what they are numbers of. Without `tables` where a study states its step times."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    tables: list[StepTable]
    engines: EngineCosts
    operations: OperationTimes = {}
    reference_s: float | None = None  # the reference step at the machine speed of all these

    def at(self, reference_s: float) -> Calibration:
        """The same numbers at the machine speed at which the reference step takes `reference_s`."""
        if self.reference_s is None:
            return self
        factor = reference_s / self.reference_s
        return Calibration(
            key=self.key,
            tables=[table.scaled(factor) for table in self.tables],
            engines=self.engines.at(reference_s),
            operations={
                name: {operation: time.scaled(factor) for operation, time in own.items()}
                for name, own in self.operations.items()
            },
            reference_s=reference_s,
        )


def scenery_for(
    study: Study,
    cluster: Cluster,
    runs: list[Run],
    prepared: Preparation,
    *,
    folder: Path,
    cache: Path,
    host: str,
    charged: bool = False,
    note: Note = lambda _: None,
) -> CostModel:
    """The step times and engine costs for the virtual `runs`; what is measured, or given by a file, stays in `folder`.

    Where runs were `charged` already, the numbers that lie there charge all further ones, on whatever machine: only
    batch sizes and loads that they lack are measured, on the machine that measured them. Where step times are stated
    for this machine, the engines' costs alone are measured, given and kept.

    Raises:
        ClusterError: a calibration cannot be read, or is none of this study's kind.
        ResultsError: runs were charged by numbers that are lost, have changed, or cannot be completed here.
    """
    given = given_calibration(study, cluster)
    if cluster.compute != "this-machine":  # another machine's engines were not measured: its network alone is charged
        return CostModel(cluster, EngineCosts(), [_stated(study, cluster, runs, prepared)])
    stated = study.device_step_time is not None
    path = folder / FILE
    kept = read_calibration(path) if path.exists() else None
    if study.calibration is not None and given is not None:
        if charged and kept is not None and kept != given:
            raise ResultsError(
                f"{study.calibration} has changed since it charged the virtual runs in {folder}; "
                f"put it back, or give them new times with: scalebench recalibrate {folder}"
            )
        _keep(given.model_dump_json(indent=1) if stated else study.calibration.read_text(), path)
        if not stated and (free := sorted({str(run.strategy) for run in _without_operations(given, runs)})):
            for name in free:
                note(
                    f"{study.calibration} does not say what {name} computes beside its steps: nothing is charged for it"
                )
        return _from(cluster, given, study, runs, prepared)
    if charged and kept is None:
        raise ResultsError(
            f"{folder} holds virtual runs but not {FILE}, which they were charged by; "
            f"put it back, or give them new times with: scalebench recalibrate {folder}"
        )
    key = _key(study, cluster, prepared, host)
    if stated:
        if not charged or kept is None:
            kept = Calibration(key=key, tables=[], engines=_engine_costs(cache, note, study, cluster))
            _keep(kept.model_dump_json(indent=1), path)
        elif kept.key != key:
            note(_FROM_ELSEWHERE)
        return _from(cluster, kept, study, runs, prepared)
    workers = {run.workers for run in runs}
    sizes = prepared.batch_sizes(study.epochs, workers)
    most = min(max(workers), cluster.node.workers_per_node)
    usable = kept if kept is not None and (charged or kept.key == key) else None
    if usable is not None and not (lacking := _lacking(usable, sizes, most)):
        if usable.key != key:
            note(_FROM_ELSEWHERE)
        else:
            usable = _with_operations(usable, cluster, runs, prepared, path)
        return _from(cluster, usable, study, runs, prepared)
    if usable is not None and usable.key != key:
        raise ResultsError(
            f"{path} was measured on another machine or by another torch and has no step times for {lacking}: "
            f"go on there, or measure all of it here with: scalebench recalibrate {folder}"
        )
    smallest = min(workers)
    budget = Budget((1 - _OF_ENGINES) * study.calibration_budget_s, study.noisy)
    example = next(run for run in runs if run.workers == smallest)
    measured = measure_steps(example, prepared.folders[smallest], sizes, most, budget)
    if measured.imprecise:
        note(f"measured as well as {study.calibration_budget_s:g} s allow: {'; '.join(measured.imprecise)}")
    reference_s = measured.reference_s
    if usable is not None and charged:
        note(f"{FILE} lacked {lacking}: measured now, beside what it holds")
        factor = usable.reference_s / reference_s if usable.reference_s else 1.0
        calibration = _completed(usable, [table.scaled(factor) for table in measured.tables])
    else:
        costs = _engine_costs(cache, note, study, cluster).at(reference_s)
        calibration = Calibration(key=key, tables=measured.tables, engines=costs, reference_s=reference_s)
    _keep(calibration.model_dump_json(indent=1), path)
    calibration = _with_operations(calibration, cluster, runs, prepared, path)
    return _from(cluster, calibration, study, runs, prepared)


def at_the_speed_of(study: Study, cost_model: CostModel, references: list[float], folder: Path) -> CostModel:
    """The calibration at the machine speed of the real runs of this study, kept as what charges its virtual runs.

    `references` are the times of the reference step beside those runs, in seconds.
    """
    if not references or study.calibration is not None or not (folder / FILE).exists():
        return cost_model
    calibration = read_calibration(folder / FILE).at(fmean(references))
    if study.device_step_time is None:
        _keep(calibration.model_dump_json(indent=1), folder / FILE)
        return replace(
            cost_model,
            engines=calibration.engines,
            tables=calibration.tables,
            operations=calibration.operations,
            reference_s=calibration.reference_s,
        )
    return cost_model


def _with_operations(
    kept: Calibration, cluster: Cluster, runs: list[Run], prepared: Preparation, path: Path
) -> Calibration:
    """`kept` with the operations of those strategies of `runs` that it lacks, measured now."""
    lacking = _without_operations(kept, runs)
    if not lacking:
        return kept
    datasets = {run.workers: open_dataset(prepared.folders[run.workers]) for run in lacking}
    further = measure_operations(lacking, datasets, CostModel(cluster, EngineCosts(), kept.tables))
    completed = kept.model_copy(update={"operations": kept.operations | further})
    _keep(completed.model_dump_json(indent=1), path)
    return completed


def _without_operations(kept: Calibration, runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.workers > 1 and str(run.strategy) not in kept.operations]


def _keep(text: str, path: Path) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}") from None


def _lacking(kept: Calibration, sizes: set[int], most: int) -> str:
    """Which of the batch `sizes`, and of the loads up to `most` workers a node, `kept` does not hold, in words."""
    known = [{batch.samples for batch in table.batches} for table in kept.tables]
    missing = sorted({size for own in known for size in sizes - own})
    loads = sorted(set(loads_up_to(most)) - {table.busy_workers for table in kept.tables})
    parts = [f"batches of {', '.join(map(str, missing))} samples"] if missing else []
    parts += [f"{', '.join(map(str, loads))} busy workers"] if loads else []
    return " and ".join(parts)


def _completed(kept: Calibration, measured: list[StepTable]) -> Calibration:
    """`kept` with the batch sizes and loads of `measured` that it lacks."""
    own = {table.busy_workers: table for table in kept.tables}
    for table in measured:
        if (before := own.get(table.busy_workers)) is None:
            own[table.busy_workers] = table
            continue
        known = {batch.samples for batch in before.batches}
        further = [batch for batch in table.batches if batch.samples not in known]
        own[table.busy_workers] = before.model_copy(update={"batches": [*before.batches, *further]})
    return kept.model_copy(update={"tables": [own[busy] for busy in sorted(own)]})


def given_calibration(study: Study, cluster: Cluster) -> Calibration | None:
    """What the study names to charge virtual runs by, None if it names nothing; only the engines if it states steps.

    Raises:
        ClusterError: the file cannot be read or is none, has no step times although the study states none, or charges
            nothing, as the cluster states all.
    """
    if study.calibration is None:
        return None
    found = read_calibration(study.calibration)
    if cluster.compute != "this-machine":
        raise ClusterError(
            f"calibration: {study.calibration} holds what this machine costs, of which cluster {cluster.name} has "
            "nothing; leave the calibration out"
        )
    if study.device_step_time is not None:
        return found.model_copy(update={"tables": []})
    if not found.tables:
        raise ClusterError(
            f"calibration: {study.calibration} has no step times, as it is of a study that states them; "
            "name another, or state them with --device-step-time"
        )
    return found


def read_calibration(path: Path) -> Calibration:
    """A calibration that was kept.

    Raises:
        ClusterError: the file cannot be read or is none.
    """
    try:
        return Calibration.model_validate_json(path.read_text())
    except OSError as error:
        raise ClusterError(f"calibration: cannot read {path}: {error.strerror}") from None
    except (ValidationError, UnicodeDecodeError):
        raise ClusterError(
            f"calibration: {path} is not a calibration of this version; delete it or name another"
        ) from None


def _stated(study: Study, cluster: Cluster, runs: list[Run], prepared: Preparation) -> StepTable:
    return stated_table(study, cluster, max(prepared.plans[run.workers].batch_size for run in runs))


def _engine_costs(cache: Path, note: Note, study: Study, cluster: Cluster) -> EngineCosts:
    """The costs of the engines on this host; between the nodes of an allocation too, if they are the `cluster`'s.

    A cluster with links of its own is charged by these.
    """
    here = [name for name in ("mpi", "horovod", "gloo") if engines.available(name) is None]
    if not here:
        return EngineCosts()
    seconds = _OF_ENGINES * study.calibration_budget_s
    inside = measure_engine_costs(cache, here, seconds=seconds, note=note)
    if cluster.name != THIS_MACHINE or len(reachable().hosts) == 1:
        return inside
    try:
        between = measure_between_nodes(here, seconds=seconds)
    except EngineError as error:
        note(f"between nodes the network model is charged, as {error}")
        return inside
    return joined([inside, between])


def _from(
    cluster: Cluster, calibration: Calibration, study: Study, runs: list[Run], prepared: Preparation
) -> CostModel:
    tables = calibration.tables if study.device_step_time is None else [_stated(study, cluster, runs, prepared)]
    operations = calibration.operations if study.device_step_time is None else {}
    return CostModel(cluster, calibration.engines, tables, operations, calibration.reference_s)


def _key(study: Study, cluster: Cluster, prepared: Preparation, host: str) -> str:
    import torch

    checksum = next(iter(prepared.datasets.values())).sha256
    parts = (
        host,
        torch.__version__,
        study.model,
        checksum,
        study.dtype,
        study.optimizer,
        study.threads_per_worker,
        cluster.node.workers_per_node,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
