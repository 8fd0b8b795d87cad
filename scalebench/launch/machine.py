"""The machine that charges virtual runs: measured once, kept beside the results, used again by later commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scalebench.analysis.environment import STATED_STEPS
from scalebench.calibration.calibration_file import (
    Calibration,
    Measurement,
    read_calibration,
    require_measured_cluster,
)
from scalebench.calibration.operation_costs import measure_operations
from scalebench.calibration.steps_under_load import Budget, measure_steps
from scalebench.cluster.engine_costs import EngineCosts
from scalebench.cluster.spec import Cluster
from scalebench.comm.launchers.choice import using
from scalebench.data.dataset import open_dataset
from scalebench.errors import ClusterError, DisturbedError, ResultsError, writing
from scalebench.launch.engine_costs import measure_engines
from scalebench.launch.kept_steps import KeptSteps
from scalebench.launch.planning import StudyPlan
from scalebench.launch.sweep import Detail
from scalebench.models.zoo.layers import layers_of
from scalebench.pricing.devices import Stated, step_table
from scalebench.pricing.machine import Machine
from scalebench.pricing.step_times import StepTable, Trained, stated_table
from scalebench.records.folder import CALIBRATION
from scalebench.records.machine import cpu_model
from scalebench.records.provenance import host_hash
from scalebench.study.load import to_home
from scalebench.study.spec import Run, Study
from scalebench.system import processors
from scalebench.system.atomic_write import write_atomic
from scalebench.system.background_load import BackgroundLoad, disturbed
from scalebench.system.bounded_read import read_text
from scalebench.system.parent_watch import start_forkserver

THIS_MACHINE = "this-machine"  # the cluster that repeats the nodes and links of this machine
ENGINES_SHARE = 0.4  # of the time for a calibration
_OTHER_MACHINE = f"virtual runs go on by {CALIBRATION}, which another machine or another torch measured"
_OF_THE_STUDY = ("model", "dtype")  # step times of others say nothing
_COMPARED = ("device", "cpu", "torch")  # where real and virtual times are compared
_OF_THE_MACHINE = ("device", "cpu", "cores", "torch", "optimizer", "threads_per_worker")
Note = Callable[[str], None]


def machine_for(
    plan: StudyPlan,
    runs: Sequence[Run],
    folder: Path,
    *,
    charged: bool = False,
    anew: bool = False,
    note: Note = lambda _: None,
) -> Machine:
    """Measure, or read, the step times and engine costs of the virtual `runs`; keep them in `folder`.

    Step times of an earlier study of the model are read, unless all is measured `anew`.
    Runs that were `charged` before fix the numbers: only batch sizes and loads that these lack are measured, on the
    machine that measured them. Where step times are stated for this machine, only engines' costs are measured.

    Raises:
        ClusterError: a calibration cannot be read, or does not fit the study.
        ResultsError: the numbers that charged earlier runs are lost, have changed, or cannot be completed here.
    """
    study, path = plan.study, folder / CALIBRATION
    given = given_calibration(plan)
    states = plan.cluster.compute != "this-machine" or study.device_step_time is not None
    if states and any(run.workers > 1 for run in runs):
        note(STATED_STEPS)
    if plan.cluster.compute != "this-machine":  # another machine's engines were not measured: its network is charged
        return Machine(plan.cluster, EngineCosts(), [_stated(plan, runs)])
    kept = read_calibration(path) if path.exists() else None
    if charged:
        _require_kept(study, folder, given, kept)
    if given is not None:
        return machine_of(_keep_given(plan, given, runs, path, note), plan, runs)
    return machine_of(_complete(plan, runs, path, kept, charged=charged, anew=anew, note=note), plan, runs)


def check_kept_calibration(plan: StudyPlan, folder: Path) -> None:
    """Check that what charged the virtual runs in `folder` is there, unchanged.

    Raises:
        ClusterError: as `given_calibration`.
        ResultsError: it is lost or has changed.
    """
    path = folder / CALIBRATION
    if plan.cluster.compute == "this-machine":
        kept = read_calibration(path) if path.exists() else None
        _require_kept(plan.study, folder, given_calibration(plan), kept)


def _require_kept(study: Study, folder: Path, given: Calibration | None, kept: Calibration | None) -> None:
    if given is not None and kept is not None and kept != given:
        raise ResultsError(
            f"{study.calibration} has changed since it charged the virtual runs in {folder}; "
            f"put it back, or give them new times with: scalebench recalibrate {folder}"
        )
    if given is None and kept is None:
        raise ResultsError(
            f"{folder} holds virtual runs but not {CALIBRATION}, which they were charged by; "
            f"put it back, or give them new times with: scalebench recalibrate {folder}"
        )


def given_calibration(plan: StudyPlan) -> Calibration | None:
    """Read the calibration file that a study names; only its engines' costs count if the study states step times.

    Raises:
        ClusterError: the file cannot be read or is not a calibration, lacks step times that the study does not state,
            is of another model or dtype, or charges nothing, as the cluster states everything.
    """
    study = plan.study
    if study.calibration is None:
        return None
    found = read_calibration(study.calibration)
    require_measured_cluster(study.calibration, plan.cluster)
    if study.device_step_time is not None:
        return found.model_copy(update={"tables": []})
    if found.measured and (other := found.measured.differences(measurement_of(plan), _OF_THE_STUDY)):
        raise ClusterError(
            f"calibration: {study.calibration} was measured for {found.measured}, which this study does not train "
            f"({'; '.join(other)}); name a calibration of this study, or leave it out to measure one"
        )
    if not found.tables:
        raise ClusterError(
            f"calibration: {study.calibration} has no step times, as it is of a study that states them; "
            "name another, or state them with --device-step-time"
        )
    return found


def check_calibration(plan: StudyPlan) -> None:
    """Check the calibration that a study names, if any.

    Raises:
        ClusterError: as `given_calibration`, or real runs here would be compared with times of another machine.
    """
    given, study = given_calibration(plan), plan.study
    real = len(plan.sweep.runs) > len(plan.sweep.simulated)
    if given is None or given.measured is None or not real:
        return
    if other := given.measured.differences(measurement_of(plan), _COMPARED):
        raise ClusterError(
            f"calibration: {study.calibration} is of another machine ({'; '.join(other)}), with whose times real runs "
            "here cannot be compared; add --execution virtual, or leave the calibration out to measure one"
        )


def _keep_given(plan: StudyPlan, given: Calibration, runs: Sequence[Run], path: Path, note: Note) -> Calibration:
    """Copy the given calibration to `path`; note the strategies without times of operations."""
    study = plan.study
    assert study.calibration is not None
    if given.measured and (other := given.measured.differences(measurement_of(plan), _OF_THE_MACHINE)):
        note(f"{study.calibration} is not of this machine and study: {'; '.join(other)}")
    if study.device_step_time is not None:
        given.save(path)
        return given
    text = read_text(study.calibration)
    content = json.loads(text)
    written = to_home(content)
    with writing(path, ""):
        write_atomic(path, text if written == content else json.dumps(written, indent=1))
    for name in sorted({str(run.strategy) for run in _without_operations(given, runs)}):
        note(f"{study.calibration} does not say what {name} computes beside its steps: nothing is charged for it")
    return given


def _complete(
    plan: StudyPlan,
    runs: Sequence[Run],
    path: Path,
    kept: Calibration | None,
    *,
    charged: bool,
    anew: bool,
    note: Note,
) -> Calibration:
    """The calibration at `path`, with everything measured now that it lacks for `runs`.

    Where the study states its step times, it holds the engines' costs alone.
    """
    study, key, workers = plan.study, key_of(plan), {run.workers for run in runs}
    stated = study.device_step_time is not None
    sizes = plan.batch_sizes(workers)
    most = _most_busy(plan, workers)
    usable = kept if kept is not None and (charged or kept.key == key) else None
    lacking = usable.lacking(sizes, most) if usable is not None and not stated else ""
    if usable is not None and usable.key != key:
        if lacking:
            raise ResultsError(
                f"{path} was measured on another machine or by another torch and has no step times for {lacking}: "
                f"go on there, or measure all of it here with: scalebench recalibrate {path.parent}"
            )
        note(_OTHER_MACHINE)
        return usable
    if usable is None or lacking:
        if usable is not None and charged:
            note(f"{CALIBRATION} lacked {lacking}: measured now, beside what it holds")
        before = usable if charged else None
        known = None if anew or before is not None or stated else _read_kept_steps(plan, runs, sizes, most, note)
        usable = known or _measured(plan, runs, sizes, most, before, study.calibration_budget_s, note)
        usable.save(path)
    return usable if stated else with_operations(plan, usable, runs, path, note)


def calibrate(plan: StudyPlan, path: Path, batches: Iterable[int], note: Note = lambda _: None) -> Calibration:
    """Measure what the calibration at `path` lacks for the model of `plan` at the sizes `batches`; save it there.

    These are step times under the loads 1, 2, 4, ... of a node, costs of the engines, and times of what the strategies
    of `plan` compute beside steps. The budget of the study is divided among the sizes, and the file is saved after
    each, so that an interrupted command goes on with what is missing.

    Raises:
        ClusterError: the file is of another model, machine or torch, or the cluster's compute is stated.
        DisturbedError: other programs disturbed what is required to be quiet.
    """
    study, runs, sizes = plan.study, plan.sweep.simulated, sorted(set(batches))
    if plan.cluster.compute != "this-machine":
        raise ClusterError(f"cluster {plan.cluster.name} states its step times: calibrate on it with this-machine")
    kept = read_calibration(path) if path.exists() else None
    if kept is not None and kept.key != key_of(plan):
        raise ClusterError(
            f"{path} was measured for {kept.measured or 'another study'}; this is {measurement_of(plan)}, with its "
            "own data: name another file with --output, or delete it"
        )
    if kept is not None and not kept.tables:  # of a study that states its step times
        kept = None
    start_forkserver()
    most = _most_busy(plan, {run.workers for run in runs})
    for size in sizes:
        if kept is None or kept.lacking({size}, most):
            kept = _measured(plan, runs, {size}, most, kept, study.calibration_budget_s / len(sizes), note)
            kept.save(path)
    assert kept is not None
    return kept if study.device_step_time is not None else with_operations(plan, kept, runs, path, note)


def _measured(
    plan: StudyPlan,
    runs: Sequence[Run],
    sizes: set[int],
    most: int,
    kept: Calibration | None,
    seconds: float,
    note: Note,
) -> Calibration:
    """Measure step times, unless stated, and engines' costs; only step times, at the speed of `kept` ones, if any."""
    study = plan.study
    if study.device_step_time is not None:
        return Calibration(key=key_of(plan), measured=measurement_of(plan), tables=[], engines=_engines_of(plan, note))
    example = min(runs, key=lambda run: run.workers)
    budget = Budget((1 - ENGINES_SHARE) * seconds, study.require_quiet)
    measured = measure_steps(example, plan.prepared.folders[example.workers], sizes, most, budget, plan.device)
    if measured.imprecise:
        note(Detail(f"measured as well as {seconds:.3g} s allow: {'; '.join(measured.imprecise)}"))
    on_gpu = plan.device == "cuda"  # its steps do not follow the speed of a core, and NCCL is charged by the links
    reference_s = None if on_gpu else measured.reference_s
    if kept is not None:
        factor = kept.reference_s / reference_s if kept.reference_s and reference_s else 1.0
        found = kept.with_tables([table.scaled(factor) for table in measured.tables])
    else:
        found = Calibration(
            key=key_of(plan),
            measured=measurement_of(plan),
            trained=trained_in(plan),
            tables=measured.tables,
            engines=EngineCosts() if reference_s is None else _engines_of(plan, note).at(reference_s),
            reference_s=reference_s,
        )
    KeptSteps(found.key, example).keep(found)
    return found


def _read_kept_steps(
    plan: StudyPlan, runs: Sequence[Run], sizes: set[int], most: int, note: Note
) -> Calibration | None:
    """Step times that an earlier study of this model measured here, at the speed of now, with the engines' costs."""
    found = KeptSteps(key_of(plan), runs[0]).read(sizes, most)
    if found is None or found.reference_s is None:
        return None
    note(Detail("step times are those of an earlier study of this model: scalebench recalibrate measures them anew"))
    return found.model_copy(update={"engines": _engines_of(plan, note).at(found.reference_s)})


def _engines_of(plan: StudyPlan, note: Note) -> EngineCosts:
    """Costs of the engines on this host; between the nodes of an allocation too, if the cluster is this machine.

    A cluster with links of its own is charged by these.
    """
    between = plan.cluster.name == THIS_MACHINE
    seconds = ENGINES_SHARE * plan.study.calibration_budget_s
    with using(plan.study.launcher):
        costs = measure_engines(seconds, between_nodes=between, note=note)
    if costs.disturbed and plan.study.require_quiet:
        raise DisturbedError(
            f"{', '.join(sorted(costs.disturbed))} could not be measured: other programs took the cores in nearly "
            "every window; run it on a quieter machine, or leave out --require-quiet"
        )
    return costs


def with_operations(plan: StudyPlan, kept: Calibration, runs: Sequence[Run], path: Path, note: Note) -> Calibration:
    """Add the operations of those strategies of `runs` that `kept` lacks, measured now; of GPUs none, with a note."""
    lacking = _without_operations(kept, runs)
    if lacking and plan.device == "cuda":
        note("on a GPU nothing is charged for what strategies compute beside their steps, such as merging models")
        return kept
    if not lacking:
        return kept
    datasets = {run.workers: open_dataset(plan.prepared.folders[run.workers]) for run in lacking}
    background = BackgroundLoad()
    further = measure_operations(
        lacking, datasets, Machine(plan.cluster, EngineCosts(), kept.tables, {}, kept.reference_s)
    )
    completed = kept.model_copy(update={"operations": kept.operations | further})
    completed.save(path)
    if kept.tables and not disturbed(background.cores()):
        own = {str(run.strategy) for run in runs if run.strategy_sha256 is None}  # a user's file may change
        keepable = {name: times for name, times in completed.operations.items() if name in own}
        KeptSteps(kept.key, runs[0]).keep(completed.model_copy(update={"operations": keepable}))
    return completed


def _without_operations(kept: Calibration, runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.workers > 1 and str(run.strategy) not in kept.operations]


def machine_of(calibration: Calibration, plan: StudyPlan, runs: Sequence[Run]) -> Machine:
    """Return what charges virtual `runs`: `calibration`, and the step times that the study or its cluster states."""
    if plan.study.device_step_time is not None or plan.cluster.compute != "this-machine":
        return Machine(plan.cluster, calibration.engines, [_stated(plan, runs)], {}, calibration.reference_s)
    return _charging(plan.cluster, calibration)


def _charging(cluster: Cluster, measured: Calibration) -> Machine:
    return Machine(cluster, measured.engines, measured.tables, measured.operations, measured.reference_s)


def _stated(plan: StudyPlan, runs: Sequence[Run]) -> StepTable:
    largest = max(plan.prepared.plan_of(run).batch_size for run in runs)
    layers, seconds = layers_of(plan.study.model), plan.study.device_step_time
    if layers is None or seconds is None:
        return stated_table(plan.study, plan.cluster, largest)
    return step_table(Stated(seconds, largest), layers, [1, largest], plan.cluster.node.workers_per_node)


def _most_busy(plan: StudyPlan, workers: Iterable[int]) -> int:
    """Return the most workers that compute at the same time on this node; a worker on a GPU has one of its own."""
    return min(max(workers), processors.gpus() if plan.device == "cuda" else plan.cluster.node.workers_per_node)


def measurement_of(plan: StudyPlan) -> Measurement:
    """Return what a calibration that is measured here and now is of."""
    import torch

    study = plan.study
    return Measurement(
        model=str(study.model),
        dtype=study.dtype,
        optimizer=str(study.optimizer),
        threads_per_worker=study.threads_per_worker,
        cpu=cpu_model(),
        cores=processors.cores(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
    )


def trained_in(plan: StudyPlan) -> Trained:
    """Return the model and data of a study whose steps are measured."""
    study, data = plan.study, next(iter(plan.prepared.datasets.values()))
    return Trained(
        model=study.model,
        optimizer=study.optimizer,
        dataset=data.name,
        samples=data.n_train,
        input_shape=data.input_shape,
        outputs=data.outputs,
        task=data.task,
    )


def key_of(plan: StudyPlan) -> str:
    import torch

    study = plan.study
    parts = (
        host_hash(),
        torch.__version__,
        study.model,
        next(iter(plan.prepared.datasets.values())).sha256,
        study.dtype,
        study.optimizer,
        study.threads_per_worker,
        measurement_of(plan).device,
        plan.cluster.node.workers_per_node,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
