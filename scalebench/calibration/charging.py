"""The machine that charges virtual runs: by the source of its costs, measured now where these are lacking."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from scalebench.calibration.calibration_file import THIS_MACHINE, Calibration, read_calibration
from scalebench.calibration.cost_sources import (
    Given,
    Kept,
    KeptSteps,
    Measured,
    Place,
    Source,
    Stated,
    choose_source,
    notes_on,
)
from scalebench.calibration.engine_measurement import measure_engines
from scalebench.calibration.operation_costs import measure_operations
from scalebench.calibration.request import Request
from scalebench.calibration.steps_under_load import Budget, measure_steps
from scalebench.cluster.engine_costs import EngineCosts, joined
from scalebench.comm.engines.tasks import TASKS
from scalebench.comm.launchers.choice import using
from scalebench.data.dataset import open_dataset
from scalebench.errors import ClusterError, DisturbedError, EngineError, writing
from scalebench.formatting import Detail
from scalebench.models.zoo.layers import layers_of
from scalebench.pricing.charges import carrier
from scalebench.pricing.devices import Stated as StatedSteps
from scalebench.pricing.devices import step_table
from scalebench.pricing.machine import Machine
from scalebench.pricing.step_times import StepTable, stated_table
from scalebench.records.folder import CALIBRATION
from scalebench.study.load import to_home
from scalebench.system.atomic_write import write_atomic
from scalebench.system.background_load import BackgroundLoad, disturbed
from scalebench.system.bounded_read import read_text
from scalebench.system.parent_watch import start_forkserver

ENGINES_SHARE = 0.4  # of the time for a calibration
Note = Callable[[str], None]


def machine_for(
    request: Request,
    folder: Path,
    *,
    charged: bool = False,
    anew: bool = False,
    note: Note = lambda _: None,
) -> Machine:
    """Return what charges the runs of `request`; a calibration that was read or measured for it is kept in `folder`.

    Raises:
        ClusterError, ResultsError: as `choose_source`.
        DisturbedError: other programs disturbed what is required to be quiet.
    """
    source = choose_source(request, folder, charged=charged, anew=anew)
    for text in notes_on(source, request):
        note(text)
    return machine_of(_obtained(source, request, folder / CALIBRATION, note), request)


def machine_of(calibration: Calibration | None, request: Request) -> Machine:
    """Return what charges the runs of `request`: `calibration`, and steps that the study or its cluster states."""
    if calibration is None:
        return Machine(request.cluster, EngineCosts(), [_stated_steps(request)])
    if request.states_steps or not request.is_here:
        return Machine(request.cluster, calibration.engines, [_stated_steps(request)], {}, calibration.reference_s)
    return _charging_by(calibration, request)


def _charging_by(measured: Calibration, request: Request) -> Machine:
    return Machine(request.cluster, measured.engines, measured.tables, measured.operations, measured.reference_s)


def _stated_steps(request: Request) -> StepTable:
    study = request.study
    layers = layers_of(study.model)
    seconds = study.device_step_time
    batch = study.batch_global or request.largest
    if layers is None or seconds is None:
        return stated_table(study, request.cluster, batch)
    steps = StatedSteps(seconds, batch)
    return step_table(steps, layers, [1, batch], request.cluster.node.workers_per_node)


def _obtained(source: Source, request: Request, path: Path, note: Note) -> Calibration | None:
    """Return the calibration of `source`, measured as far as need be and written to `path`; None if all is stated."""
    match source:
        case Stated():
            return None
        case Given():
            _copy(source, request, path)
            return source.calibration
        case Kept(place=Place.ANOTHER_MACHINE):  # what is measured here does not belong beside it
            return source.calibration
        case Kept(place=Place.FOLDER):
            calibration = source.calibration
        case Kept():
            calibration = _with_engines_of_now(source.calibration, request, note)
            calibration.save(path)
        case Measured():
            calibration = _measured(request, request.sizes(), source.before, request.study.calibration_budget_s, note)
            calibration.save(path)
    return calibration if request.states_steps else with_operations(calibration, request, path, note)


def _copy(source: Given, request: Request, path: Path) -> None:
    """Write the given file to `path`, with paths as in study.yaml; only its engines, where the study states steps."""
    if request.states_steps:
        source.calibration.save(path)
        return
    text = read_text(source.path)
    content = json.loads(text)
    written = to_home(content)
    with writing(path, ""):
        write_atomic(path, text if written == content else json.dumps(written, indent=1))


def _with_engines_of_now(earlier: Calibration, request: Request, note: Note) -> Calibration:
    """Return what an earlier study measured at the speed of now, with the engines' costs."""
    found = KeptSteps(request.key, request.runs[0]).at_speed_of_now(earlier)
    assert found.reference_s is not None
    return found.model_copy(update={"engines": _engines_of(request, note).at(found.reference_s)})


def calibrate(request: Request, path: Path, batches: Iterable[int], note: Note = lambda _: None) -> Calibration:
    """Measure what the calibration at `path` lacks for the model of `request` at the sizes `batches`; save it there.

    These are step times under the loads 1, 2, 4, ... of a node, costs of the engines, and times of what the strategies
    of `request` compute beside steps. The budget of the study is divided among the sizes, and the file is saved after
    each, so that an interrupted command goes on with what is missing.

    Raises:
        ClusterError: the file is of another model, machine or torch, or the cluster's compute is stated.
        DisturbedError: other programs disturbed what is required to be quiet.
    """
    sizes = sorted(set(batches))
    if not request.is_here:
        raise ClusterError(f"cluster {request.cluster.name} states its step times: calibrate on it with this-machine")
    kept = read_calibration(path) if path.exists() else None
    if kept is not None and kept.key != request.key:
        raise ClusterError(
            f"{path} was measured for {kept.measured or 'another study'}; this is {request.measurement}, with its "
            "own data: name another file with --output, or delete it"
        )
    if kept is not None and not kept.tables:  # of a study that states its step times
        kept = None
    start_forkserver()
    each_s = request.study.calibration_budget_s / len(sizes)
    for size in sizes:
        if kept is None or kept.lacking({size}, request.most_busy):
            kept = _measured(request, {size}, kept, each_s, note)
            kept.save(path)
    assert kept is not None
    return kept if request.states_steps else with_operations(kept, request, path, note)


def _measured(
    request: Request, sizes: Iterable[int], before: Calibration | None, seconds: float, note: Note
) -> Calibration:
    """Measure step times, unless stated, and engines' costs; only step times, at the speed of `before`, if any."""
    study = request.study
    if request.states_steps:
        engines = _engines_of(request, note)
        return Calibration(key=request.key, measured=request.measurement, tables=[], engines=engines)
    example = min(request.runs, key=lambda run: run.workers)
    budget = Budget((1 - ENGINES_SHARE) * seconds, study.require_quiet)
    folder = request.folders[example.workers]
    measured = measure_steps(example, folder, set(sizes), request.most_busy, budget, request.device)
    if measured.imprecise:
        note(Detail(f"measured as well as {seconds:.3g} s allow: {'; '.join(measured.imprecise)}"))
    on_gpu = request.device == "cuda"  # its steps do not follow the speed of a core, and NCCL is charged by the links
    reference_s = None if on_gpu else measured.reference_s
    if before is not None:
        factor = before.reference_s / reference_s if before.reference_s and reference_s else 1.0
        found = before.with_tables([table.scaled(factor) for table in measured.tables])
    else:
        found = Calibration(
            key=request.key,
            measured=request.measurement,
            trained=request.trained,
            tables=measured.tables,
            engines=EngineCosts() if reference_s is None else _engines_of(request, note).at(reference_s),
            reference_s=reference_s,
        )
    KeptSteps(found.key, example).keep(found)
    return found


def _engines_of(request: Request, note: Note) -> EngineCosts:
    """Costs of the engines on this host; between the nodes of an allocation too, if the cluster is this machine.

    A cluster with links of its own is charged by these.
    """
    between = request.cluster.name == THIS_MACHINE
    seconds = ENGINES_SHARE * request.study.calibration_budget_s
    with using(request.study.launcher):
        costs = measure_engines(request.placing, seconds, between_nodes=between, note=note)
    if any(carrier(run) == TASKS for run in request.runs):
        try:
            costs = joined([costs, request.placing.tasks()])
        except EngineError as error:
            note(f"tasks are charged by the network model alone, as {error}")
    if costs.disturbed and request.study.require_quiet:
        raise DisturbedError(
            f"{', '.join(sorted(costs.disturbed))} could not be measured: other programs took the cores in nearly "
            "every window; run it on a quieter machine, or leave out --require-quiet"
        )
    return costs


def with_operations(kept: Calibration, request: Request, path: Path, note: Note) -> Calibration:
    """Add the operations of those strategies that `kept` lacks, measured now; of GPUs none, with a note."""
    lacking = request.without_operations(kept)
    if lacking and request.device == "cuda":
        note("on a GPU nothing is charged for what strategies compute beside their steps, such as merging models")
        return kept
    if not lacking:
        return kept
    datasets = {run.workers: open_dataset(request.folders[run.workers]) for run in lacking}
    background = BackgroundLoad()
    further = measure_operations(
        lacking, datasets, Machine(request.cluster, EngineCosts(), kept.tables, {}, kept.reference_s)
    )
    completed = kept.model_copy(update={"operations": kept.operations | further})
    completed.save(path)
    if kept.tables and not disturbed(background.cores()):
        own = {str(run.strategy) for run in request.runs if run.strategy_sha256 is None}  # a user's file may change
        keepable = {name: times for name, times in completed.operations.items() if name in own}
        KeptSteps(kept.key, request.runs[0]).keep(completed.model_copy(update={"operations": keepable}))
    return completed
