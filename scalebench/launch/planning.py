"""The plan of a study: data prepared, runs expanded, and everything checked that needs no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from scalebench.calibration.calibration_file import read_calibration
from scalebench.cluster.cluster_file import Cluster, load_cluster
from scalebench.cluster.network import allreduce_name
from scalebench.comm import engines
from scalebench.comm.launchers import using
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.catalog import prepare, prepare_validation, with_checksum
from scalebench.data.dataset import Dataset, open_dataset
from scalebench.data.layout import cut
from scalebench.errors import DataError, StudyError
from scalebench.formatting import Detail, counted
from scalebench.launch.hosts import Allocation, here_for
from scalebench.launch.sweep import Sweep, expand, is_oversubscribed, strategy_warnings
from scalebench.launch.trials import trials_of
from scalebench.models.pinning import pinned
from scalebench.models.registry import check_model, is_foreign, model_notes
from scalebench.native.job_files import server_ranks
from scalebench.records.provenance import in_job
from scalebench.strategies import registry
from scalebench.strategies.parts import with_default_batch, with_measured_stages
from scalebench.study.heterogeneity import SlowLinks
from scalebench.study.spec import Run, Study
from scalebench.training.optimizers import check_optimizer

NATIVE_BUDGET_S = 90.0  # of real runs beside virtual ones
# between synchronisations: with fewer, averaging can hardly show a saving
FEW_STEPS = 8


@dataclass(frozen=True)
class Preparation:
    """Data sets on disk and their division among the workers, by worker count.

    `plans` have those among most replicas of a worker count, `of_parts` all, by workers
    and workers of a replica.
    """

    folders: Mapping[int, Path] = field(default_factory=dict)
    datasets: Mapping[int, Dataset] = field(default_factory=dict)
    plans: Mapping[int, BatchPlan] = field(default_factory=dict)
    of_parts: Mapping[tuple[int, int], BatchPlan] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        study: Study,
        runs: Iterable[Run],
        folder_of: Callable[[int], Path],
        seed: int,
        what: str,
    ) -> Preparation:
        """Divide the data that `folder_of` gives at each worker count of `runs`; `what` begins errors."""
        folders: dict[int, Path] = {}
        datasets: dict[int, Dataset] = {}
        plans: dict[int, BatchPlan] = {}
        of_parts: dict[tuple[int, int], BatchPlan] = {}
        # sorted by parts: the first plan has the most replicas, and the smallest shards
        for workers, parts in sorted({(run.workers, parts_of(run)) for run in runs}):
            if workers not in folders:
                folders[workers] = folder_of(workers)
                datasets[workers] = open_dataset(folders[workers])
            among = f"{what}at {counted(workers, 'worker')}"
            if parts > 1:
                among += f", {parts} of which hold a replica"
            try:
                plan = BatchPlan.of(study, workers, seed, datasets[workers], parts)
            except DataError as error:
                raise DataError(f"{among}: {error}") from None
            of_parts[workers, parts] = plan
            plans.setdefault(workers, plan)
        return cls(folders, datasets, plans, of_parts)

    def plan_of(self, run: Run) -> BatchPlan:
        """Return the batches of the workers of `run`."""
        return self.of_parts[run.workers, parts_of(run)]


def parts_of(run: Run) -> int:
    """Return the number of workers of `run` that hold a replica."""
    return (
        registry.create(run.strategy.name, run.strategy.options, run.engine)
        .traits.mesh(run.workers)
        .parts
    )


def cuts_model(run: Run) -> bool:
    """Return True if the workers of `run` compute with a model layer by layer."""
    return registry.create(
        run.strategy.name, run.strategy.options, run.engine
    ).traits.cuts_model(run.workers)


def micro_batches(run: Run) -> int:
    """Return the number of pieces into which the replicas of `run` cut their batches."""
    strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
    return (
        strategy.traits.micro_batches
        if strategy.traits.mesh(run.workers).parts > 1
        else 1
    )


@dataclass(frozen=True)
class StudyPlan:
    """The runs of a study, the cluster and the prepared data.

    `trials` come first where the study is tuned, on the data in `validation`; `sweep`
    has the values of the study until it `is_settled` by those of the trials
    (`work.settled`). Its real runs are planned for `allocation`. `remarks` are on its
    model.
    """

    study: Study
    cluster: Cluster
    allocation: Allocation
    sweep: Sweep
    prepared: Preparation
    trials: tuple[Run, ...] = ()
    validation: Preparation = field(default_factory=Preparation)
    remarks: tuple[str, ...] = ()
    is_settled: bool = False

    def only(self, run_ids: Container[str]) -> StudyPlan:
        """Return the plan of these trials and runs alone: nothing follows from them."""
        runs = (*self.sweep.runs, *self.sweep.further)
        sweep = replace(
            self.sweep,
            runs=tuple(run for run in runs if run.run_id in run_ids),
            further=(),
            until=None,
        )
        trials = tuple(run for run in self.trials if run.run_id in run_ids)
        return replace(self, sweep=sweep, trials=trials, is_settled=True)

    @property
    def notes(self) -> list[str]:
        return [  # of these `run` prints few: what changes results stands first
            *self.prepared.notes,
            *self.remarks,
            *self.sweep.notes,
            *why_oversubscribed(self.sweep.runs, self.allocation),
            *beyond_the_slots(self.sweep.runs, self.allocation),
            *between_nodes(self.sweep.runs, self.cluster),
        ]

    @property
    def device(self) -> str:
        """Device whose steps are measured: cuda where the engine of all strategies takes GPUs and there are some."""
        engine = self.study.engine
        on_gpus = (
            engine != "auto"
            and engines.named(engine).on_gpus
            and engines.available(engine) is None
        )
        return "cuda" if on_gpus else "cpu"

    def batch_sizes(self, workers: set[int]) -> set[int]:
        """All sizes of batches, and of micro-batches, of runs and trials at these worker counts."""
        sizes: set[int] = set()
        for made, runs in (
            (self.prepared, self.sweep.runs),
            (self.validation, self.trials),
        ):
            # repetitions have the same batches
            distinct = {
                (run.workers, str(run.strategy)): run
                for run in runs
                if run.workers in workers
            }
            for run in distinct.values():
                batches, pieces = (
                    made.plan_of(run).all_batch_sizes(self.study.epochs),
                    micro_batches(run),
                )
                sizes |= batches | {
                    int(size)
                    for batch in batches
                    for size in cut(batch, min(pieces, batch))
                }
        return sizes

    @property
    def native_budget_s(self) -> float:
        """Seconds after which no further real run begins; infinite where real runs are what was asked for.

        Beside virtual runs real ones are a check of these. The time of a batch job is
        bounded by its scheduler.
        """
        if self.study.native_budget_s is not None:
            return self.study.native_budget_s
        return (
            NATIVE_BUDGET_S
            if self.study.execution == "auto" and not in_job(os.environ)
            else math.inf
        )

    @property
    def measures(self) -> bool:
        """True if times are measured: in real runs, or in a calibration that is neither given nor stated."""
        # a calibration file, or a stated step time, leaves nothing to measure for
        # virtual runs
        given = (
            self.study.calibration is not None
            or self.study.device_step_time is not None
        )
        real = len(self.sweep.runs) > len(self.sweep.simulated)
        return real or (self.cluster.compute == "this-machine" and not given)


def fits_unseen(plan: StudyPlan) -> bool:
    """Return True if nothing of the plan depends on how the model is built, so that it can be submitted without torch.

    Such a model is of this package, starts from weights of its own, is held whole, and
    trains on several samples at a time. The runs look at it all the same.
    """
    study = plan.study
    if is_foreign(study.model) or study.init_weights is not None:
        return False
    return smallest_batch(plan) != 1 and not any(
        cuts_model(run) for run in plan.sweep.runs
    )


def smallest_batch(plan: StudyPlan) -> int:
    """Samples of the smallest batch, or micro-batch, on which the study trains; 0 if it trains nothing."""
    found = []
    for run in plan.sweep.runs:
        if run.execution != "modelled":
            batch = int(plan.prepared.plan_of(run).batch_sizes(0).min())
            # a batch of fewer samples than micro-batches is cut into its samples
            found.append(batch // max(1, min(micro_batches(run), batch)))
    return min(found, default=0)


def plan_study(
    study: Study, allocation: Allocation | None = None, *, timed: bool = True
) -> StudyPlan:
    """Resolve `study` and check everything that can be checked before it runs; unless `timed`, without step times.

    Real runs are planned for `allocation`, which may be one that is still to be
    submitted; by default for this one.

    Raises:
        UsageError: the study cannot run as it is; one line.
    """
    with using(study.launcher):
        return _resolve(study, allocation or here_for(study.execution), timed=timed)


def _resolve(study: Study, allocation: Allocation, *, timed: bool) -> StudyPlan:
    # pinned first: the contents of files are part of what is planned
    given = study
    study = _with_measured_stages(with_default_batch(pinned(study)))
    cluster = load_cluster(study.cluster)
    there = study.model_copy(
        update={"virtual": study.virtual.with_defaults(cluster.uneven)}
    )
    sweep = expand(there, cluster, allocation, timed=timed)
    _slow_nodes_exist(study.virtual.slow_links, cluster, sweep.runs)
    prepared = prepare_study(there, sweep.runs)
    # after the data are there, whose checksum it states
    study = with_checksum(study)
    steps = {workers: plan.steps(0) for workers, plan in prepared.plans.items()}
    warnings = strategy_warnings(there, sweep.runs, cluster, allocation, steps=steps)
    # the same strategies were asked before the data were known; only what the steps add
    # is new
    notes = [warning for warning in warnings if warning not in sweep.notes]
    # nobody asked for it: replicas of several workers have no batch per worker
    if study.batch_global != given.batch_global:
        notes.append(
            f"a replica has several workers: batch_policy is global, {study.batch_global} samples in a step of all "
            f"workers at every worker count ({given.batch_per_worker} a worker at {max(study.workers)}); state another "
            "with --batch-global, or --batch-per-worker"
        )
    prepared = replace(prepared, notes=(*prepared.notes, *notes))
    trials = trials_of(there, sweep.runs)
    return StudyPlan(
        study,
        cluster,
        allocation,
        sweep,
        prepared,
        trials,
        _prepare_trials(there, trials),
    )


def _with_measured_stages(study: Study) -> Study:
    """Return `study` with stages by the times of layers, where it names a calibration that has them."""
    if study.calibration is None or study.device_step_time is not None:
        return study
    tables = read_calibration(study.calibration).tables
    if not tables or not all(batch.layers for batch in tables[0].batches):
        return study

    def layer_seconds(samples: float) -> list[float]:
        times = tables[0].nearest(samples)
        passes = fmean(times.forward_s), fmean(times.backward_s)
        return [
            passes[0] * layer.forward + passes[1] * layer.backward
            for layer in times.layers
        ]

    return with_measured_stages(study, layer_seconds)


def _prepare_trials(study: Study, trials: Sequence[Run]) -> Preparation:
    """Divide samples of the training part: no trial sees the test samples, by which the runs are judged."""
    if not trials:
        return Preparation()
    assert study.tune is not None
    held_out = study.tune.validation
    return Preparation.of(
        study,
        trials,
        lambda workers: prepare_validation(study, workers, held_out, study.seed),
        trials[0].seed,
        "tune: trials ",
    )


def between_nodes(runs: Iterable[Run], cluster: Cluster) -> list[str]:
    """Note the allreduce that virtual runs on several nodes assume; empty if each run is on one node."""
    wide = [
        run
        for run in runs
        if run.is_virtual and run.workers > cluster.node.workers_per_node
    ]
    if not wide:
        return []
    return [
        Detail(
            f"virtual runs assume allreduce between nodes by {allreduce_name(wide[0].virtual.collective)}, where none "
            "was measured; assume another with --set virtual.collective=ring; scalebench doctor compares MPI's with a "
            "ring"
        )
    ]


def _slow_nodes_exist(slow: SlowLinks, cluster: Cluster, runs: Iterable[Run]) -> None:
    """Refuse slow links that no run uses; native runs use none, which is a note.

    Raises:
        StudyError: a node beyond those of the largest run, or runs of one node, which use no link between nodes.
    """
    most = max((run.workers for run in runs if run.execution != "native"), default=0)
    if not slow or not most:
        return
    per_node = cluster.node.workers_per_node
    # workers fill one node after another
    last = (most - 1) // per_node
    counted = f"{most} worker{'s' * (most > 1)}, {per_node} on a node of {cluster.name}"
    if last == 0:
        raise StudyError(
            f"virtual.slow_links slow nothing: the largest run is on one node ({counted})"
        )
    for ends in slow:
        if (node := max(map(int, ends.split("-")))) > last:
            raise StudyError(
                f"virtual.slow_links names node {node}; the largest run has the nodes 0 to {last} ({counted})"
            )


def why_oversubscribed(runs: Iterable[Run], allocation: Allocation) -> list[str]:
    """Note the oversubscribed points of `runs` and the reasons; empty if there are none."""
    crowded: dict[str, set[int]] = {}
    reasons: set[str] = set()
    moving: set[str] = set()
    for run in runs:
        if not is_oversubscribed(run, allocation):
            continue
        servers = server_ranks(run)
        crowded.setdefault(f"{run.engine}{' with servers' * bool(servers)}", set()).add(
            run.workers
        )
        if servers:
            reasons.add("each server is one more process")
        if engines.named(run.engine).progress_threads and run.workers > 1:
            moving.add(run.engine)
        if run.threads_per_worker > 1:
            reasons.add(f"a worker computes in {run.threads_per_worker} threads")
    if not crowded:
        return []
    if moving:
        reasons.add(
            f"a worker of {' or '.join(sorted(moving))} has a thread that moves bytes beside the one that computes"
        )
    points = [
        f"{name} at {', '.join(map(str, sorted(counts)))} worker{'' if counts == {1} else 's'}"
        for name, counts in sorted(crowded.items())
    ]
    places = f" of {len(allocation.hosts)} nodes" if len(allocation.hosts) > 1 else ""
    return [
        f"oversubscribed on {counted(allocation.cores, 'core')}{places}, so drawn but never a baseline nor "
        f"fitted: {'; '.join([', '.join(points), *sorted(reasons)])}"
    ]


def beyond_the_slots(runs: Iterable[Run], allocation: Allocation) -> list[str]:
    """Note the points of `runs` that take more processes than an allocation of several nodes has slots."""
    # on one host all ranks share the cores anyway, which `why_oversubscribed` says
    if len(allocation.hosts) == 1:
        return []
    slots, taken = allocation.slots, {}
    for run in runs:
        servers = server_ranks(run) if not run.is_virtual else 0
        if not run.is_virtual and (needed := run.workers + servers) > slots:
            beside = (
                f" ({counted(servers, 'server')} beside the workers)" if servers else ""
            )
            taken[
                f"{run.strategy} at {counted(run.workers, 'worker')} takes {needed} processes{beside}"
            ] = needed
    if not taken:
        return []
    return [
        f"the allocation has {counted(slots, 'slot')}, and {'; '.join(taken)}: what exceeds the slots shares a node's "
        f"cores with others; ask for {max(taken.values())} tasks to avoid it"
    ]


def prepare_study(study: Study, runs: Sequence[Run]) -> Preparation:
    """Fetch or build the data, and check that every worker count can be served.

    Raises:
        DataError, ModelError, StudyError: the data are missing or corrupt, there are more workers than samples or
            blocks, or the model or optimizer has a name or option that does not exist.
    """
    # before data are fetched, which may take minutes
    check_model(study.model, trained=any(run.execution != "modelled" for run in runs))
    check_optimizer(study.optimizer)
    made = Preparation.of(
        study, runs, lambda workers: prepare(study, workers), study.seed, ""
    )
    # once for each worker count, however many plans of it say so
    of_plans = dict.fromkeys(
        f"{counted(workers, 'worker')}: {note}"
        for (workers, _), plan in made.of_parts.items()
        for note in plan.notes
    )
    of_data = dict.fromkeys(
        note for dataset in made.datasets.values() for note in dataset.notes
    )
    notes = (
        *of_plans,
        *(f"data set {study.dataset.name}: {note}" for note in of_data),
        *model_notes(study.model, next(iter(made.datasets.values())).input_shape),
        *_few_steps(study, made),
        *_long_steps(study),
    )
    return replace(made, notes=notes)


def _few_steps(study: Study, made: Preparation) -> list[str]:
    """Note intervals of few steps: averaging every s steps saves at most 1 - 1/s of the communication of every step."""
    notes = []
    for component in study.strategies:
        strategy = registry.create(component.name, component.options)
        epochs = strategy.synchronisation.epochs
        # intervals in batches do not shrink with the shards
        if epochs is None:
            continue
        steps = {
            workers: epochs * plan.steps(0)
            for workers, plan in made.plans.items()
            if workers > 1
        }
        few = {workers: count for workers, count in steps.items() if count < FEW_STEPS}
        if few:
            places = ", ".join(map(str, few))
            most, least = (
                f"{100 * (1 - 1 / count):.0f} %"
                for count in (max(few.values()), min(few.values()))
            )
            notes.append(
                f"{component}: fewer than {FEW_STEPS} steps between synchronisations at {places} workers; there it can "
                f"save at most {most if most == least else f'{most} to {least}'} of the communication"
            )
    return notes


def _long_steps(study: Study) -> list[str]:
    """Note strategies that `lr_policy: linear`, a rule for one batch of all workers, does not fit."""
    most = max(study.workers)
    # the rule is Goyal et al.'s, arXiv:1706.02677: k workers average one batch k times
    # as large
    if study.lr_policy != "linear" or most == 1:
        return []
    made = [
        (component, registry.create(component.name, component.options))
        for component in study.strategies
    ]
    alone = [
        str(component) for component, strategy in made if strategy.traits.local_steps
    ]
    if not alone:
        return []
    return [
        f"{', '.join(alone)}: lr_policy linear multiplies the learning rate by up to {most}, for replicas whose "
        "batch does not grow: they may train badly or diverge; use lr_policy constant for them"
    ]
