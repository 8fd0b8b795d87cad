"""The machine that charges virtual runs: by the source of its costs, measured now where these are lacking.

Operations of strategies besides plain steps are measured in short virtual runs of each
strategy. A run has the study's smallest number of communicating workers and a few
batches, so that every operation gets vectors as in the study. Where workers share
layers, their steps and those of the whole model are taken in turn. Times are taken in
reference steps. No time of a native run is used.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from scalebench.calibration import cost_sources
from scalebench.calibration.calibration_file import (
    THIS_MACHINE,
    Calibration,
    read_calibration,
)
from scalebench.calibration.engine_measurement import measure_engines
from scalebench.calibration.quiet_rounds import Until, quiet_rounds
from scalebench.calibration.steps_under_load import Budget, measure_steps
from scalebench.cluster.engine_costs import EngineCosts, joined
from scalebench.cluster.mesh import Mesh
from scalebench.comm.engines import named
from scalebench.comm.launchers import using
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.errors import (
    ClusterError,
    DisturbedError,
    EngineError,
    RunError,
    writing,
)
from scalebench.formatting import Detail
from scalebench.models.zoo.layers import layers_of
from scalebench.pricing.charges import carrier
from scalebench.pricing.devices import Stated as StatedSteps
from scalebench.pricing.devices import step_table
from scalebench.pricing.machine import (
    Choices,
    Machine,
    OperationTime,
    OperationTimes,
    StepTable,
    StepTimes,
    name_of,
    stated_table,
)
from scalebench.records.folder import CALIBRATION
from scalebench.strategies import registry
from scalebench.strategies.base import Batch
from scalebench.study.load import to_home
from scalebench.study.spec import Run
from scalebench.system.clock import Task, WallClock
from scalebench.system.disturbance import BackgroundLoad, disturbed
from scalebench.system.file_access import read_text, write_atomic
from scalebench.system.parent_watch import start_forkserver
from scalebench.training.division import step_overhead
from scalebench.training.loop import train
from scalebench.training.reference_step import Gauge
from scalebench.training.replica import Replica
from scalebench.virtual.arithmetic import choice_for, is_chosen, workers_tried
from scalebench.virtual.engine import Simulation
from scalebench.virtual.lock_step import strategy_of
from scalebench.virtual.virtual_clock import VirtualClock

if TYPE_CHECKING:
    from scalebench.comm.native import NativeCommunicator

_ENGINES_SHARE = 0.4  # of the time for a calibration
# on which it depends whether gradients can be batched
_OF_ARITHMETIC = ("model", "model_sha256", "dtype", "optimizer")
Note = Callable[[str], None]
_T = TypeVar("_T")
_STEPS = 16  # of an epoch
_BUDGET_S = 2.0  # of the processor, for each run
_FEWEST_RUNS, _MOST_RUNS = 2, 100  # of a strategy
# Seconds of a strategy, at most, and their share of the time for a calibration.
_RUNS_S, _RUNS_SHARE = 1.0, 0.1
# Of the steps of a divided model: torch plans its gathers in the first ones.
_WARM_UP_STEPS, _MOST_STEPS = 3, 32
# by operation: (multiple of the messages, seconds)
_Found = dict[str, list[tuple[int, float]]]
_ByTask = dict[tuple[Task, int], float]  # and samples


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
        update={"engines": _engines_of(request, note).at(found.reference_s)}
    )


def calibrate(
    request: cost_sources.Request,
    path: Path,
    batches: Iterable[int],
    note: Note = lambda _: None,
) -> Calibration:
    """Measure what the calibration at `path` lacks for the model of `request` at the sizes `batches`; save it there.

    These are step times under the loads 1, 2, 4, ... of a node, costs of the engines,
    and times of what the strategies of `request` compute beside steps. The budget of
    the study is divided among the sizes, and the file is saved after each, so that an
    interrupted command goes on with what is missing.

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
    for size in sizes:
        if kept is None or kept.lacking({size}, request.most_busy):
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
        engines = _engines_of(request, note)
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
            else _engines_of(request, note).at(reference_s),
            reference_s=reference_s,
        )
    cost_sources.KeptSteps(found.key, example).keep(found)
    return found


def _engines_of(request: cost_sources.Request, note: Note) -> EngineCosts:
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
            min(_RUNS_S, _RUNS_SHARE * request.study.calibration_budget_s),
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


class _BudgetSpentError(RunError):
    """End of the time for one strategy."""


def _timed(operation: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of `operation` and its processor seconds."""
    began = time.thread_time()
    result = operation()
    return result, time.thread_time() - began


class _MeasuringClock(VirtualClock):
    """Virtual clock that adds the times of its strategy's operations to `found`."""

    found: _Found
    deadline: float

    def execute(self, operation: Callable[..., _T], *arguments: object) -> _T:
        if not self.running:
            return operation(*arguments)
        result, seconds = _timed(partial(operation, *arguments))
        self.found[name_of(operation)].append((1, seconds))
        if time.thread_time() > self.deadline:
            raise _BudgetSpentError("measured long enough")
        return result

    def execute_by_rows(
        self,
        compute: Callable[..., Sequence[Tensor]],
        rows: Sequence[Sequence[Tensor]],
        *equal: object,
    ) -> list[Sequence[Tensor]]:
        """Compute each worker's row by itself, as a real worker does."""
        return [
            [
                made[0]
                for made in self.execute(compute, *(row[None] for row in own), *equal)
            ]
            for own in rows
        ]

    def rehearse(
        self, operation: Callable[..., object], *arguments: object, times: int = 1
    ) -> None:
        if self.running:
            _, seconds = _timed(partial(operation, *arguments))
            self.found[name_of(operation)].append((times, seconds))


def measure_operations(
    runs: Sequence[Run],
    datasets: dict[int, Dataset],
    machine: Machine,
    seconds: float = _RUNS_S,
) -> OperationTimes:
    """Measure the operations of each strategy of `runs` for some seconds, at the speed of `machine`.

    The result is by strategy with options.
    """
    smallest: dict[str, Run] = {}
    # The smallest count takes the least time, and the cost of each further worker is
    # measured apart.
    for run in sorted(
        (run for run in runs if run.workers > 1), key=lambda run: run.workers
    ):
        smallest.setdefault(str(run.strategy), run)
    times: OperationTimes = {}
    for name, run in smallest.items():
        strategy, dataset = strategy_of(run), datasets[run.workers]
        times[name] = {}
        # Others of a named arithmetic compute only steps and averages of gradients.
        if strategy.arithmetic(run.workers) is None:
            times[name] = _played_times(run, dataset, machine, seconds)
        if strategy.traits.shares_layers(run.workers):
            # In place of that of the played steps, which takes no time there.
            overheads = step_overheads(run, dataset, machine, _BUDGET_S)
            times[name][name_of(step_overhead)] = _time(
                [(1, each) for each in overheads], run.workers
            )
    return times


def _played_times(
    run: Run, dataset: Dataset, machine: Machine, seconds: float
) -> dict[str, OperationTime]:
    """Play some batches again and again for some seconds, and return the times of the operations in them."""
    until: Until[_Found] = Until(seconds, fewest=_FEWEST_RUNS, most=_MOST_RUNS)
    rounds = quiet_rounds(
        partial(_played, run, dataset, machine), Gauge().seconds, until
    )
    found: _Found = defaultdict(list)
    for each in rounds:
        factor = machine.reference_s / each.reference_s if machine.reference_s else 1.0
        for operation, calls in each.found.items():
            found[operation] += [
                (multiple, seconds * factor) for multiple, seconds in calls
            ]
    return {
        operation: _time(calls, run.workers)
        for operation, calls in sorted(found.items())
    }


def _played(run: Run, dataset: Dataset, machine: Machine) -> _Found:
    """Play a few batches of an epoch, without evaluation, and return the times of the operations in it."""
    simulation = Simulation(run, dataset, machine, _MeasuringClock)
    # Batches go to replicas, each of which may be several workers.
    count = simulation.mesh.data
    size = simulation.plan.batch_size
    rows = min(dataset.n_train, _STEPS * size * count)
    # A few batches for each worker: as many rows as these need.
    simulation.dataset = replace(
        dataset, x_train=dataset.x_train[:rows], y_train=dataset.y_train[:rows]
    )
    simulation.plan = BatchPlan(rows, count, seed=run.seed, batch_per_worker=size)
    replicas = [simulation.replica(rank) for rank in range(run.workers)]
    found: _Found = defaultdict(list)
    deadline = time.thread_time() + _BUDGET_S
    for replica in replicas:
        clock: Any = replica.clock
        clock.found, clock.deadline = found, deadline
    programs = {
        rank: partial(train, replica, simulation.strategy)
        for rank, replica in enumerate(replicas)
    }
    with suppress(RunError):  # budget spent or diverged: the times so far are kept
        simulation.scheduler.run(programs)
    return found


class _StepClock(WallClock):
    """Processor seconds of a worker's own tasks, and the shares of the model's work that these are charged as."""

    def __init__(self) -> None:
        super().__init__()
        # by task and the samples that it is of
        self._seconds: _ByTask = defaultdict(float)
        self._shares: _ByTask = defaultdict(float)

    def of(self, step: Callable[[], None]) -> tuple[_ByTask, _ByTask]:
        """Return the seconds and shares of a step."""
        self._seconds, self._shares = defaultdict(float), defaultdict(float)
        self.mark = time.thread_time()
        step()
        return self._seconds, self._shares

    def did(self, task: Task, samples: int = 0, share: float = 1.0) -> None:
        now = time.thread_time()
        if task != Task.COMM:  # which is charged for itself
            self._seconds[task, samples] += now - self.mark
            self._shares[task, samples] += share
        self.mark = now


def step_overheads(
    run: Run, dataset: Dataset, machine: Machine, budget_s: float
) -> list[float]:
    """Return the seconds on `machine` by which steps of a worker take longer than the shares of the model's own step.

    The shares are those by which virtual runs charge a divided model. Layers that all
    workers compute, small operations in Python, and copies of shards are not divided;
    fully_shard and DTensor call hooks and dispatch each operation besides: some
    milliseconds a block of a small transformer. Both take steps in one process, one
    after the other, the worker among ranks that are not there: communication takes no
    time. By how much of its charge a step takes longer does not depend on the speed of
    the moment; the charge is that of the machine.
    """
    from scalebench.comm.torch_dist import silent_group  # a second of imports

    torch.set_num_threads(run.threads_per_worker)
    clock = _StepClock()
    times = StepTimes(machine.table_for(run.workers), repetition=None)
    engine = registry.preferred_engine(run.strategy.name)
    strategy = registry.create(run.strategy.name, run.strategy.options, engine)
    with silent_group(run.workers, clock) as comm:
        worker = _replica(run, dataset, comm, strategy.traits.mesh(run.workers))
        strategy.setup(worker)
        whole = _replica(run, dataset, comm.split(lambda rank: rank))
        batch = next(worker.batches(0))

        def overhead() -> float:
            taken, shares = clock.of(partial(strategy.warm_up, worker, batch))
            # In turn: the speed of a shared machine changes.
            step: _ByTask = {}
            for samples in {samples for _, samples in shares if samples}:
                step |= clock.of(partial(whole.local_step, _of_size(batch, samples)))[0]
            charged = sum(share * step.get(key, 0.0) for key, share in shares.items())
            excess = sum(taken.values()) / charged - 1
            return excess * sum(
                share * times.task_seconds(*key) for key, share in shares.items()
            )

        for _ in range(_WARM_UP_STEPS):
            overhead()
        found: list[float] = []
        deadline = time.thread_time() + budget_s
        while not found or (len(found) < _MOST_STEPS and time.thread_time() < deadline):
            found.append(overhead())
    return found


def _replica(
    run: Run, dataset: Dataset, comm: NativeCommunicator, mesh: Mesh | None = None
) -> Replica:
    mesh = mesh or Mesh(comm.size)
    plan = BatchPlan.of(run, run.workers, run.seed, dataset, mesh.parts)
    return Replica(run, dataset, plan, comm, comm.clock, mesh=mesh)


def _of_size(batch: Batch, samples: int) -> Batch:
    """Return a batch of so many samples, those of `batch` repeated."""
    places = torch.arange(samples) % len(batch.x)
    return batch._replace(x=batch.x[places], y=batch.y[places])


def _time(calls: list[tuple[int, float]], workers: int) -> OperationTime:
    """Return the median, and the cost of each further message."""
    once, twice = (
        [seconds for times, seconds in calls if times == multiple]
        for multiple in (1, 2)
    )
    whole = float(np.median(once))
    each = max(0.0, float(np.median(twice)) - whole) / workers if twice else 0.0
    return OperationTime(
        seconds=max(0.0, whole - each * (workers - 2)), per_member_s=each
    )
