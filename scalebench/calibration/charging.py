"""The machine that charges virtual runs: by the source of its costs, measured now where these are lacking."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from scalebench.calibration import cost_sources
from scalebench.calibration.calibration_file import (
    THIS_MACHINE,
    Calibration,
    read_calibration,
)
from scalebench.calibration.engine_measurement import measure_engines
from scalebench.calibration.operation_costs import SECONDS, measure_operations
from scalebench.calibration.steps_under_load import Budget, measure_steps
from scalebench.cluster.engine_costs import EngineCosts, joined
from scalebench.comm.engines import named
from scalebench.comm.launchers import using
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.errors import (
    ClusterError,
    DisturbedError,
    EngineError,
    writing,
)
from scalebench.formatting import Detail, counted, roughly
from scalebench.models.zoo.layers import layers_of
from scalebench.pricing.charges import carrier
from scalebench.pricing.devices import Stated as StatedSteps
from scalebench.pricing.devices import step_table
from scalebench.pricing.machine import (
    Choices,
    Machine,
    StepTable,
    stated_table,
)
from scalebench.records.folder import CALIBRATION
from scalebench.study.load import to_home
from scalebench.study.spec import Run
from scalebench.system.disturbance import BackgroundLoad, disturbed
from scalebench.system.file_access import read_text, write_atomic
from scalebench.system.parent_watch import start_forkserver
from scalebench.virtual.arithmetic import choice_for, is_chosen, workers_tried
from scalebench.virtual.lock_step import strategy_of

# of the time for a calibration; that of the operations of each strategy
_ENGINES_SHARE, _OPERATIONS_SHARE = 0.4, 0.1
# on which it depends whether gradients can be batched
_OF_ARITHMETIC = ("model", "model_sha256", "dtype", "optimizer")
Note = Callable[[str], None]


def machine_for(
    request: cost_sources.Request,
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
    source = cost_sources.choose_source(request, folder, charged=charged, anew=anew)
    for text in cost_sources.notes_on(source, request):
        note(text)
    machine = machine_of(
        _obtained(source, request, folder / CALIBRATION, note), request
    )
    for entry in machine.engines.entries:
        if entry.stated:
            note(
                f"a round of {entry.engine} is charged by the links, and {entry.source}"
            )
    return machine


def machine_of(
    calibration: Calibration | None, request: cost_sources.Request
) -> Machine:
    """Return what charges the runs of `request`: `calibration`, and steps that the study or its cluster states."""
    engines = _completed(
        EngineCosts() if calibration is None else calibration.engines, request
    )
    if calibration is None:
        return Machine(request.cluster, engines, [_stated_steps(request)])
    computed_alike = calibration.measured is not None and (
        not calibration.measured.differences(request.measurement, _OF_ARITHMETIC)
    )
    stated = request.states_steps or not request.is_here
    return Machine(
        request.cluster,
        # Paced ranks sleep until the stated time is over.
        engines.after_pauses() if stated else engines,
        [_stated_steps(request)] if stated else calibration.tables,
        {} if stated else calibration.operations,
        calibration.reference_s,
        calibration.arithmetic if computed_alike else {},
    )


def _completed(engines: EngineCosts, request: cost_sources.Request) -> EngineCosts:
    """Return `engines` with typical costs of those that charge runs and were not measured."""
    for name in sorted({carrier(run) for run in request.runs}):
        typical = named(name).typical_cost(request.study.tasks)
        if typical is not None and not engines.has(name):
            engines = engines.with_stated(typical)
    return engines


def _run_tasks(runs: Sequence[Run]) -> bool:
    """Return True if some of `runs` are charged as graphs of tasks."""
    return any(named(carrier(run)).runs_tasks for run in runs)


def _stated_steps(request: cost_sources.Request) -> StepTable:
    study = request.study
    layers = layers_of(study.model)
    seconds = study.device_step_time
    batch = study.batch_global or request.largest
    if layers is None or seconds is None:
        return stated_table(study, request.cluster, batch)
    steps = StatedSteps(seconds, batch)
    return step_table(steps, layers, [1, batch], request.cluster.node.workers_per_node)


def _obtained(
    source: cost_sources.Source, request: cost_sources.Request, path: Path, note: Note
) -> Calibration | None:
    """Return the calibration of `source`, measured as far as need be and written to `path`; None if all is stated."""
    match source:
        case cost_sources.StatedCosts():
            return None
        case cost_sources.GivenCosts():
            _copy(source, request, path)
            return source.calibration
        # what is measured here does not belong beside it
        case cost_sources.KeptCosts(place=cost_sources.Place.ANOTHER_MACHINE):
            return source.calibration
        case cost_sources.KeptCosts(place=cost_sources.Place.FOLDER):
            calibration = source.calibration
        case cost_sources.KeptCosts():
            calibration = _with_engines_of_now(source.calibration, request, note)
            calibration.save(path)
        case cost_sources.MeasuredCosts():
            calibration = _measured(
                request,
                request.sizes(),
                source.before,
                request.study.calibration_budget_s,
                note,
            )
            calibration.save(path)
    return (
        calibration
        if request.states_steps
        else _with_what_runs_compute(calibration, request, path, note)
    )


def _copy(
    source: cost_sources.GivenCosts, request: cost_sources.Request, path: Path
) -> None:
    """Write the given file to `path`, with paths as in study.yaml; only its engines, where the study states steps."""
    if request.states_steps:
        source.calibration.save(path)
        return
    text = read_text(source.path)
    content = json.loads(text)
    written = to_home(content)
    with writing(path, ""):
        write_atomic(
            path, text if written == content else json.dumps(written, indent=1)
        )


def _with_engines_of_now(
    earlier: Calibration, request: cost_sources.Request, note: Note
) -> Calibration:
    """Return what an earlier study measured at the speed of now, with the engines' costs."""
    found = cost_sources.KeptSteps(request.key, request.runs[0]).at_speed_of_now(
        earlier
    )
    assert found.reference_s is not None
    return found.model_copy(
        update={"engines": engines_of(request, note).at(found.reference_s)}
    )


def calibrate(
    request: cost_sources.Request,
    path: Path,
    batches: Iterable[int],
    note: Note = lambda _: None,
    began: Note = lambda _: None,
) -> Calibration:
    """Measure what the calibration at `path` lacks for the model of `request` at the sizes `batches`; save it there.

    These are step times under the loads 1, 2, 4, ... of a node, costs of the engines,
    and times of what the strategies of `request` compute beside steps. The budget of
    the study is divided among the sizes, and the file is saved after each, so that an
    interrupted command goes on with what is missing. `began` is told which size is
    measured.

    Raises:
        ClusterError: the file is of another model, machine or torch, or the cluster's compute is stated.
        DisturbedError: other programs disturbed what is required to be quiet.
    """
    sizes = sorted(set(batches))
    if not request.is_here:
        raise ClusterError(
            f"cluster {request.cluster.name} states its step times: calibrate on it with this-machine"
        )
    kept = read_calibration(path) if path.exists() else None
    if kept is not None and kept.key != request.key:
        raise ClusterError(
            f"{path} was measured for {kept.measured or 'another study'}; this is {request.measurement}, with its "
            "own data: name another file with --output, or delete it"
        )
    if kept is not None and not kept.tables:  # of a study that states its step times
        kept = None
    start_forkserver()
    # Saved after each size: what was measured survives an interruption.
    each_s = request.study.calibration_budget_s / len(sizes)
    for place, size in enumerate(sizes, 1):
        if kept is None or kept.lacking({size}, request.most_busy):
            if not request.states_steps:
                began(
                    f"steps of {counted(size, 'sample')} ({place} of {len(sizes)}, within {roughly(each_s)})"
                )
            kept = _measured(request, {size}, kept, each_s, note)
            kept.save(path)
    assert kept is not None
    if request.states_steps:
        return kept
    return _with_what_runs_compute(kept, request, path, note, sizes)


def _measured(
    request: cost_sources.Request,
    sizes: Iterable[int],
    before: Calibration | None,
    seconds: float,
    note: Note,
) -> Calibration:
    """Measure step times, unless stated, and engines' costs; only step times, at the speed of `before`, if any."""
    study = request.study
    if request.states_steps:
        engines = engines_of(request, note)
        return Calibration(
            key=request.key, measured=request.measurement, tables=[], engines=engines
        )
    # Steps of all runs are those of one model: the fewest workers have the most samples
    # each.
    example = min(request.runs, key=lambda run: run.workers)
    budget = Budget((1 - _ENGINES_SHARE) * seconds, study.require_quiet)
    folder = request.folders[example.workers]
    measured = measure_steps(
        example, folder, set(sizes), request.most_busy, budget, request.device
    )
    if measured.imprecise:
        note(
            Detail(
                f"measured as well as {seconds:.3g} s allow: {'; '.join(measured.imprecise)}"
            )
        )
    # its steps do not follow the speed of a core, and NCCL is charged by the links
    on_gpu = request.device == "cuda"
    reference_s = None if on_gpu else measured.reference_s
    if before is not None:
        # The machine may be faster or slower now than when the earlier steps were
        # measured.
        factor = (
            before.reference_s / reference_s
            if before.reference_s and reference_s
            else 1.0
        )
        found = before.with_tables([table.scaled(factor) for table in measured.tables])
    else:
        found = Calibration(
            key=request.key,
            measured=request.measurement,
            trained=request.trained,
            tables=measured.tables,
            engines=EngineCosts()
            if reference_s is None
            else engines_of(request, note).at(reference_s),
            reference_s=reference_s,
        )
    cost_sources.KeptSteps(found.key, example).keep(found)
    return found


def engines_of(request: cost_sources.Request, note: Note) -> EngineCosts:
    """Costs of the engines on this host; between the nodes of an allocation too, if the cluster is this machine.

    A cluster with links of its own is charged by these.
    """
    between = request.cluster.name == THIS_MACHINE
    seconds = _ENGINES_SHARE * request.study.calibration_budget_s
    with using(request.study.launcher):
        costs = measure_engines(
            request.placing, seconds, between_nodes=between, note=note
        )
    if _run_tasks(request.runs):
        try:
            costs = joined([costs, request.placing.tasks()])
        except EngineError as error:
            note(f"rounds of tasks were not measured: {error}")
    if costs.disturbed and request.study.require_quiet:
        raise DisturbedError(
            f"{', '.join(sorted(costs.disturbed))} could not be measured: other programs took the cores in nearly "
            "every window; run it on a quieter machine, or leave out --require-quiet"
        )
    return costs


def _with_what_runs_compute(
    kept: Calibration,
    request: cost_sources.Request,
    path: Path,
    note: Note,
    batches: Iterable[int] = (),
) -> Calibration:
    """Measure how gradients are computed, and operations of strategies, as far as `kept` lacks them; save it to `path`.

    These are gradients of `batches`, else of those of the runs.
    """
    background = BackgroundLoad()
    completed = kept.with_arithmetic(_choices(request, kept, batches))
    lacking = request.without_operations(kept)
    if lacking and request.device == "cuda":
        note(
            "on a GPU nothing is charged for what strategies compute beside their steps, such as merging models"
        )
    elif lacking:
        further = measure_operations(
            lacking,
            _datasets(request, lacking),
            _of_steps(request, completed),
            min(SECONDS, _OPERATIONS_SHARE * request.study.calibration_budget_s),
        )
        operations = kept.operations | further
        completed = completed.model_copy(update={"operations": operations})
    if completed == kept:
        return kept
    completed.save(path)
    if kept.tables and not disturbed(background.cores()):
        # a user's file may change
        own = {str(run.strategy) for run in request.runs if run.strategy_sha256 is None}
        keepable = {
            name: times for name, times in completed.operations.items() if name in own
        }
        cost_sources.KeptSteps(kept.key, request.runs[0]).keep(
            completed.model_copy(update={"operations": keepable})
        )
    return completed


def _of_steps(request: cost_sources.Request, kept: Calibration) -> Machine:
    return Machine(request.cluster, EngineCosts(), kept.tables, {}, kept.reference_s)


def _datasets(request: cost_sources.Request, runs: Iterable[Run]) -> dict[int, Dataset]:
    """Open the data of `runs`, by worker count."""
    counts = {run.workers for run in runs}
    return {workers: open_dataset(request.folders[workers]) for workers in counts}


def _choices(
    request: cost_sources.Request, kept: Calibration, batches: Iterable[int]
) -> Choices:
    """Measure how gradients of `batches` samples, else of the runs' batches, are computed, where `kept` lacks it."""
    # Trials have data of their own, of fewer samples.
    runs = [
        run for run in request.runs if run.execution == "virtual" and run.trial is None
    ]
    datasets = _datasets(request, runs)
    sizes_of: dict[tuple[int, int], Collection[int]] = {}  # by workers and parts
    found: Choices = {}
    for run in runs:
        strategy, dataset = strategy_of(run), datasets[run.workers]
        if not is_chosen(run, strategy):
            continue
        parts = strategy.traits.mesh(run.workers).parts
        if (run.workers, parts) not in sizes_of:
            plan = BatchPlan.of(run, run.workers, run.seed, dataset, parts)
            sizes_of[run.workers, parts] = set(batches) or {plan.batch_size}
        workers = workers_tried(run)
        for size in sizes_of[run.workers, parts]:
            known = kept.arithmetic.get(size, {}) | found.get(size, {})
            if workers not in known:
                found.setdefault(size, {})[workers] = choice_for(run, dataset, size)
    return found
