"""Expansion of a study into runs: strategy, workers, execution, engine, and the order of execution."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from scalebench.cluster.cluster_file import Cluster, require_step_times
from scalebench.comm import engines
from scalebench.errors import ModelError, StudyError
from scalebench.formatting import Detail
from scalebench.launch import engine_choice
from scalebench.launch.hosts import Allocation, this_host
from scalebench.native.job_files import server_ranks
from scalebench.strategies import registry
from scalebench.strategies.base import Setting
from scalebench.study.cell import Cell
from scalebench.study.choices import VIRTUAL, Execution
from scalebench.study.heterogeneity import STATED, VirtualOptions
from scalebench.study.spec import (
    ADAMW_DECAY,
    Component,
    Run,
    Study,
    Training,
    Until,
    slug,
)

if TYPE_CHECKING:
    from scalebench.models.parts import Layer

# Keys that do not change a run's result: changing them repeats no run.
_NOT_HASHED = {
    "study",
    "run_id",
    "config_hash",
    "attempt",
    "run_order",
    "time_limit_s",
    "save_weights",
    "data_dir",
    "dataset_sha256",  # a study does not go on with other data
    "trace",
    "warmup",
    "also_without_jitter",
    "tuned",  # its values stand where the run has them
}
# not hashed for other runs, whose results they do not concern
_OF_TRIALS = {
    "trial",
    "validation",
}
# a native run is the same beside any of them
_OF_SIMULATIONS = {
    "cluster",
    "cluster_sha256",
    "device_step_time",
}


@dataclass(frozen=True)
class Sweep:
    """The runs of a study in the order of execution, with notes for the user.

    `further` are the runs that may be added `until` intervals are narrow enough, up to
    the last block that the study allows.
    """

    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()
    further: tuple[Run, ...] = ()
    until: Until | None = None

    @property
    def simulated(self) -> list[Run]:
        """Virtual and modelled runs."""
        return [run for run in self.runs if run.is_virtual]

    def continued(self, recorded: Sequence[tuple[str, int]]) -> Sweep:
        """The same runs, numbered after the records of an earlier, smaller study of this name.

        `recorded` are the run_id and run_order of the rows, in theirs. What was
        numbered by this very sweep keeps its numbers, so that a study that was
        interrupted ends as one that was not.
        """
        own = {run.run_id: run.run_order for run in (*self.runs, *self.further)}
        first = _first_of_its_own(own, recorded)
        if first == 0:
            return self
        runs, further = (
            tuple(
                run.model_copy(update={"run_order": first + run.run_order})
                for run in runs
            )
            for runs in (self.runs, self.further)
        )
        return replace(self, runs=runs, further=further)

    def engines(self) -> list[str]:
        """Native engines in use, in the order of their launches."""
        return list(
            dict.fromkeys(run.engine for run in self.runs if not run.is_virtual)
        )


def _first_of_its_own(
    own: Mapping[str, int], recorded: Sequence[tuple[str, int]]
) -> int:
    """The first free number after the rows of earlier sweeps, which replaces 0.

    Rows are this one's where all of them, to the last, have the number in `own` and
    equally much added to it.
    """
    # the first number after each prefix of the rows
    free = list(accumulate((order + 1 for _, order in recorded), max, initial=0))
    added = [
        order - own[run_id] if run_id in own else None for run_id, order in recorded
    ]
    # back from the last row, as long as the rows are of this sweep
    start = len(recorded)
    while start and added[-1] is not None and added[start - 1] == added[-1]:
        start -= 1
    return next(
        (
            free[place]
            for place in range(start, len(recorded))
            if free[place] == added[-1]
        ),
        free[-1],
    )


def expand(
    study: Study,
    cluster: Cluster,
    allocation: Allocation,
    *,
    timed: bool = True,
) -> Sweep:
    """Every run of `study`; real ones on `allocation`.

    `auto` is virtual at every worker count plus native where the cores, or GPUs, allow.
    Serial runs once, at one worker, for each execution. Repetitions are blocks: within
    each, the order of strategies and worker counts is a seeded draw. With `until`,
    every run has its place in the order as if all blocks were run to the last. Without
    `timed`, virtual runs need no step times.

    Raises:
        StudyError: unknown strategy or option, or nothing is left to run.
        EngineError: an engine that was asked for is missing or cannot carry a strategy.
        ClusterError: virtual runs without step times of their device, or more workers than the cluster holds.
    """
    notes: list[str] = []
    found = [
        point
        for component in study.strategies
        for point in _points(study, component, allocation, notes)
    ]
    # a strategy that is named twice, or serial at each count, runs once
    points = list({Cell.of(point): point for point in found}.values())
    points = _possible(study, points, cluster, allocation, notes)
    notes += strategy_warnings(study, points, cluster, allocation)
    if not points:
        raise StudyError(
            f"nothing to run: {'; '.join(notes) or 'no strategy fits the worker counts'}"
        )
    virtual = [point.workers for point in points if point.is_virtual]
    if virtual:
        if timed:
            require_step_times(cluster, study)
        # raises where the cluster has too few nodes
        cluster.nodes_for(max(virtual))
    _check_paced(study, cluster, points, notes)
    if study.until and virtual:
        notes.append(
            Detail(
                "virtual points repeat until their mean is known so well; how far the calibration "
                "and virtual time may be off is in their interval beside it, and no repetition narrows that"
            )
        )
    runs = _ordered(study, points, allocation)
    return Sweep(
        tuple(run for run in runs if run.repetition < study.repetitions),
        tuple(notes),
        tuple(run for run in runs if run.repetition >= study.repetitions),
        study.until,
    )


def _points(
    study: Study, component: Component, allocation: Allocation, notes: list[str]
) -> list[Run]:
    known = registry.create(component.name, component.options)
    # what needs no communication is one worker's training, whatever the count
    counts = study.workers if known.requires else [1]
    points: list[Run] = []
    if study.execution in ("auto", "virtual", "modelled"):
        virtual = registry.create(component.name, component.options, VIRTUAL)
        engine_choice.check_provided(virtual, VIRTUAL)
        charged = engine_choice.charged_engine(study, component, notes)
        execution: Execution = (
            "modelled" if study.execution == "modelled" else "virtual"
        )
        options = study.virtual.model_copy(update={"engine": charged})
        points += [
            _point(study, execution, VIRTUAL, component, workers, options)
            for workers in counts
        ]
    if study.execution in ("virtual", "modelled"):
        return points
    engine, held = engine_choice.native_points(
        study, component, counts, allocation, notes
    ) or ("", [])
    execution = "native" if study.execution == "auto" else study.execution
    options = _of_real_runs(study, execution)
    return points + [
        _point(study, execution, engine, component, workers, options)
        for workers in held
    ]


def _possible(
    study: Study,
    points: Sequence[Run],
    cluster: Cluster,
    allocation: Allocation,
    notes: list[str],
) -> list[Run]:
    """Return the points at whose worker count the strategy works, and note the others.

    Raises:
        StudyError: a strategy works at none of its worker counts, and no other one is left beside `serial`.
    """
    kept: list[Run] = []
    refused: dict[str, dict[int, StudyError]] = {}
    for point in points:
        try:
            strategy_warnings(study, [point], cluster, allocation)
        except StudyError as error:
            refused.setdefault(str(point.strategy), {}).setdefault(point.workers, error)
        else:
            kept.append(point)
    # Without requirements is what trains on one worker: alone it answers no study.
    answers = any(
        registry.create(point.strategy.name, point.strategy.options).requires
        for point in kept
    )
    for name, errors in refused.items():
        said = errors[max(errors)]
        if not answers:
            raise said
        workers = f"worker{'s' * (list(errors) != [1])}"
        notes.append(
            f"{name} is left out at {', '.join(map(str, errors))} {workers}: {said}"
        )
    return kept


def strategy_warnings(
    study: Study,
    points: Iterable[Run],
    cluster: Cluster,
    allocation: Allocation,
    *,
    steps: Mapping[int, int] | None = None,
    shapes: Sequence[tuple[int, ...]] | None = None,
    without_gradient: Sequence[str] = (),
    layers: Sequence[Layer] | None = None,
    layer_work: Sequence[float] | None = None,
) -> list[str]:
    """Warnings of the strategies of `points`, each with the worker counts that it concerns unless these are all.

    `steps` of an epoch by worker count, `shapes` of the model's parameters, names of
    those `without_gradient`, and `layers` into which it can be cut with the
    `layer_work` of a step in each, once they are known.

    Raises:
        StudyError: a strategy cannot work at a point.
        ModelError: it can do nothing with the model.
    """
    found: dict[tuple[str, str], dict[int, None]] = {}
    counts: dict[str, set[int]] = {}
    for point in points:
        strategy = registry.create(
            point.strategy.name, point.strategy.options, point.engine
        )
        per_node = _on_one_node(point, cluster, allocation)
        of_epoch = (steps or {}).get(point.workers)
        setting = Setting(
            study,
            point.workers,
            per_node,
            of_epoch,
            shapes,
            without_gradient,
            layers,
            layer_work,
        )
        try:
            warnings = strategy.check(setting)
        except ModelError as error:
            raise ModelError(f"strategy {point.strategy}: {error}") from None
        counts.setdefault(str(point.strategy), set()).update({point.workers} - {1})
        for warning in warnings:
            found.setdefault((str(point.strategy), warning), {})[point.workers] = None
    notes = []
    for (name, warning), at in found.items():
        some = (
            ""
            if counts[name] <= set(at)
            else f" at {', '.join(map(str, at))} worker{'s' * (list(at) != [1])}"
        )
        notes.append(f"{name}{some}: {warning}")
    return notes


def _on_one_node(run: Run, cluster: Cluster, allocation: Allocation) -> int:
    """Workers on one node: the cluster's number, or of real ranks that of the fullest host."""
    if run.is_virtual:
        return cluster.node.workers_per_node
    return max(allocation.ranks_on(run.workers))


def _check_paced(
    study: Study, cluster: Cluster, points: list[Run], notes: list[str]
) -> None:
    executions = {point.execution for point in points}
    if (
        "paced" in executions
        and study.device_step_time is None
        and not cluster.step_times_of(str(study.model), study.dtype)
    ):
        raise StudyError(
            "paced runs stretch compute to the step time of a stated device; "
            "say its seconds with --device-step-time, or name a cluster that has step times for this model"
        )
    if "native" in executions:
        notes += _left_out(study)


def _left_out(study: Study) -> list[str]:
    """Note the stated properties of workers and links that native runs leave out."""
    options = study.virtual
    named = [
        key
        for key in ("slowdown", "slow_windows", "slow_links")
        if getattr(options, key)
    ]
    named += ["jitter"] if options.jitter in STATED else []
    if not named:
        return []
    sized = (
        ", except that slowdown sizes the shards of balance: speed"
        if "slowdown" in named and _by_speed(study)
        else ""
    )
    return [
        f"native runs: {', '.join(named)} left out{sized}, for they go at the machine's own pace; --execution paced "
        "injects them"
    ]


def _by_speed(study: Study) -> bool:
    return study.partition.options.get("balance") == "speed"


def _ordered(study: Study, points: list[Run], allocation: Allocation) -> list[Run]:
    """Virtual runs first, then real ones, of which those that are no baseline come last.

    Each group is made block by block, every block in a random order.
    """
    # a stream of its own: the order changes no weights and no batches
    random = np.random.default_rng([study.seed, 0x0DE2])
    groups: list[list[Run]] = [[], [], []]
    for point in points:
        crowded = is_oversubscribed(point, allocation)
        groups[0 if point.is_virtual else 2 if crowded else 1].append(point)
    runs: list[Run] = []
    for group in groups:
        # blocks, so that a drift of the machine meets all strategies alike
        for repetition in range(
            study.until.at_most if study.until else study.repetitions
        ):
            runs += [
                _repeated(group[index], repetition, order)
                for order, index in enumerate(
                    random.permutation(len(group)), start=len(runs)
                )
            ]
    return runs


def is_oversubscribed(run: Run, allocation: Allocation) -> bool:
    """Return True if a native run keeps more threads busy than there are cores; of paced runs the overrun decides."""
    if run.execution != "native":
        return False
    engine = engines.named(run.engine)
    if run.tasks.scheduler is not None and engine.runs_tasks:
        return False  # the workers of that scheduler have cores of their own
    # processes without ranks stay on the host that starts them
    on = allocation if engine.has_ranks else this_host()
    return on.is_oversubscribed(
        run.engine, run.workers + server_ranks(run), run.threads_per_worker
    )


def _point(
    study: Study,
    execution: Execution,
    engine: str,
    strategy: Component,
    workers: int,
    options: VirtualOptions,
) -> Run:
    """Return the first run of a point; only its repetitions have names."""
    shared = {name: getattr(study, name) for name in Training.model_fields}
    # Not validated again: the study was, and a sweep can have a hundred thousand runs.
    return Run.model_construct(
        **shared | {"virtual": options},
        study=study.name,
        run_id="",
        config_hash="",
        attempt=1,
        execution=execution,
        engine=engine,
        strategy=strategy,
        strategy_sha256=study.strategy_sha256.get(strategy.name),
        workers=workers,
        repetition=0,
        seed=study.seed,
        also_without_jitter=workers == max(study.workers)
        and study.virtual.jitter != "none",
    )


def _repeated(first: Run, repetition: int, order: int) -> Run:
    """Return a repetition of a point, by its first run."""
    own = {"repetition": repetition, "seed": first.seed + repetition}
    return named(first.model_copy(update={**own, "run_order": order}))


def named(run: Run) -> Run:
    """Return `run` with its config_hash, and the run_id that this gives."""
    # the hash is part of the name: another configuration never meets the rows of this
    # one
    digest = config_hash(run)
    place = run.execution if run.is_virtual else f"{run.execution}-{run.engine}"
    number = f"r{run.repetition}" if run.trial is None else f"t{run.trial}"
    run_id = f"{slug(run.strategy.name)}-w{run.workers}-{number}-{place}-{digest[:8]}"
    return run.model_copy(update={"run_id": run_id, "config_hash": digest})


def is_simulated(run_id: str) -> bool:
    """Return True if the run of this name is virtual or modelled."""
    # the name ends in EXECUTION-HASH, or EXECUTION-ENGINE-HASH
    return run_id.rsplit("-", 2)[-2:-1] in (["virtual"], ["modelled"])


def _of_real_runs(study: Study, execution: Execution) -> VirtualOptions:
    """The options that pacing injects into real runs: slow workers, slow links, and jitter whose law is stated."""
    options = study.virtual
    # nothing is injected; shards follow the speeds that are stated
    if execution == "native":
        return VirtualOptions(slowdown=options.slowdown if _by_speed(study) else {})
    injected: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("slowdown", "slow_windows", "slow_links")
    }
    if options.jitter in STATED:
        injected |= {"jitter": options.jitter, "jitter_sigma": options.jitter_sigma}
    return VirtualOptions.model_validate(injected)


def config_hash(run: Run) -> str:
    """Hash, 16 hex digits, of everything that determines the run's result, defaults of options included."""
    elsewhere = _OF_SIMULATIONS if run.execution == "native" else set()
    elsewhere |= _OF_TRIALS if run.trial is None else set()
    values: dict[str, Any] = run.model_dump(
        mode="json", exclude=_NOT_HASHED | elsewhere
    )
    if engines.named(run.engine).runs_tasks:
        del values["tasks"]["scheduler"]  # where it is, not what it does
    else:
        del values["tasks"]
    # A default of an option may change in a later version, and the result with it.
    strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
    values["strategy_options"] = strategy.model_dump(mode="json")
    # it had no decay by default once: those runs are others
    if run.optimizer.name == "adamw":
        values["optimizer"]["options"].setdefault("weight_decay", ADAMW_DECAY)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
