"""Division of a planned study into shards: the runs of one batch job, and what that asks a scheduler for.

A shard is planned exactly as the whole study was, for the same stated allocation, so
that its runs have the names, the seeds and the places in the order of a study that ran
in one piece.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from scalebench.batch.job import Partition, Scheduler
from scalebench.batch.site import Site, SiteError
from scalebench.comm import engines, launchers
from scalebench.errors import StudyError, UsageError
from scalebench.formatting import counted
from scalebench.launch.compute_estimate import estimate, kept_step, trains
from scalebench.launch.hosts import Allocation
from scalebench.launch.planning import StudyPlan
from scalebench.native.job_files import server_ranks
from scalebench.records.provenance import in_job
from scalebench.study.spec import Run, Study
from scalebench.study.validation import StrictModel

SHARDS = "shards"  # folder, in that of the study, with one folder for each shard
Grouping = Literal["nodes", "count", "all"]
_MARGIN, _START_S = 3.0, 600  # of a job's time limit: times the estimate, and on top
_STEP_S = 300  # limits are multiples of it


class Shard(StrictModel):
    """The runs of one batch job; `repetition` where the job is one of an array."""

    number: int
    nodes: int
    workers: list[int]
    executions: list[str]
    repetition: int | None = None
    run_ids: list[str]
    limit_s: int = 0

    @property
    def is_simulated(self) -> bool:
        """True if it has virtual or modelled runs only, which need one node."""
        return not {"native", "paced"}.intersection(self.executions)

    def __str__(self) -> str:
        at = f"{', '.join(map(str, self.workers))} worker{'s' * (self.workers != [1])}"
        part = (
            f", repetition {self.repetition + 1}" if self.repetition is not None else ""
        )
        return f"shard {self.number} ({at}, {' and '.join(self.executions)}{part}, {counted(self.nodes, 'node')})"


def folder_of(study_folder: Path, number: int) -> Path:
    """Return the folder of a shard's own records, which has the name of the study as every folder of records."""
    return study_folder / SHARDS / str(number) / study_folder.name


def divide(
    plan: StudyPlan,
    allocation: Allocation,
    grouping: Grouping,
    *,
    by_repetition: bool,
    limit_s: Callable[[Sequence[Run]], int],
) -> list[Shard]:
    """Divide the runs of `plan` into shards, largest allocation first, numbered from 1.

    nodes: worker counts that take equally many nodes share a job; count: each has its own; all: one job. Virtual runs
    are charged by one calibration, so they are one shard, on one node, unless all is one job.

    Raises:
        StudyError: the study decides by earlier runs which ones follow, and has to be one job.
    """
    study = plan.study
    # jobs do not see one another's rows
    if grouping != "all" and (study.until or study.tune):
        named = "until" if study.until else "tune"
        raise StudyError(
            f"{named}: later runs depend on earlier ones of other worker counts; use --group all"
        )
    if by_repetition and grouping == "all":
        raise UsageError(
            "--array makes a job of each repetition, --group all one of the whole study; leave one out"
        )
    nodes = _nodes_of_counts(plan.sweep.runs, allocation)
    largest = max(nodes.values())
    groups: dict[_Group, list[Run]] = {}
    for run in plan.sweep.runs:
        if grouping == "all":
            group = _Group(largest)
        elif run.is_virtual:
            group = _Group(1, is_simulated=True)
        else:
            count = run.workers if grouping == "count" else 0
            group = _Group(
                nodes[run.workers],
                False,
                count,
                run.repetition if by_repetition else None,
            )
        groups.setdefault(group, []).append(run)
    ordered = sorted(groups, key=lambda group: group.place)
    return [
        Shard(
            number=number,
            nodes=group.nodes,
            workers=sorted({run.workers for run in groups[group]}),
            executions=sorted({run.execution for run in groups[group]}),
            repetition=group.repetition,
            run_ids=[run.run_id for run in groups[group]],
            limit_s=limit_s(groups[group]),
        )
        for number, group in enumerate(ordered, start=1)
    ]


class _Group(NamedTuple):
    """Common properties of the runs of a shard; `workers` and `repetition` where each has a shard of its own."""

    nodes: int
    is_simulated: bool = False
    workers: int = 0
    repetition: int | None = None

    @property
    def place(self) -> tuple[bool, int, int, int]:
        """Sort real runs first, then by nodes and workers, most first."""
        # the largest jobs wait longest, and are submitted first
        return self.is_simulated, -self.nodes, -self.workers, self.repetition or 0


def _nodes_of_counts(runs: Sequence[Run], allocation: Allocation) -> dict[int, int]:
    """Return the nodes that real runs of each worker count take, with their servers; of virtual runs one."""
    slots, most = allocation.hosts[0].slots, len(allocation.hosts)
    nodes: dict[int, int] = {}
    for run in runs:
        ranks = run.workers + server_ranks(run) if not run.is_virtual else 1
        needed = min(most, -(-ranks // slots))
        nodes[run.workers] = max(nodes.get(run.workers, 1), needed)
    return nodes


def require_nodes(shard: Shard, here: Allocation) -> None:
    """Refuse fewer nodes `here` than the real runs of `shard` were planned for: they would share cores.

    Raises:
        StudyError: says how many there are.
    """
    # by hand, outside of a job, any machine will do for a try
    if shard.is_simulated or not in_job(os.environ):
        return
    if (nodes := len(here.hosts)) < shard.nodes:
        launcher = launchers.chosen().name
        raise StudyError(
            f"{shard}: it was planned for {counted(shard.nodes, 'node')}, and {launcher} reaches {nodes} in this "
            "job; give its script as many, or submit the study anew, under another --name, with --nodes"
        )


def part_of(plan: StudyPlan, shard: Shard, here: Allocation) -> StudyPlan:
    """Return the plan of the runs of `shard`, on the allocation that its job got.

    Raises:
        StudyError: the study as it is planned now lacks runs of the shard.
    """
    known = set(shard.run_ids)
    runs = tuple(run for run in plan.sweep.runs if run.run_id in known)
    if missing := known - {run.run_id for run in runs}:
        raise StudyError(
            f"{shard}: {counted(len(missing), 'run')} of it, such as {min(missing)}, "
            f"{'is' if len(missing) == 1 else 'are'} no longer part of the study as this version or this machine plans "
            "it; submit the study anew, under another --name"
        )
    # with --group all its runs may decide which others follow
    whole = len(known) == len(plan.sweep.runs)
    further = plan.sweep.further if whole else ()
    return replace(
        plan,
        sweep=replace(plan.sweep, runs=runs, further=further),
        trials=plan.trials if whole else (),
        allocation=here,
    )


def choose_launcher(site: Site, study: Study) -> None:
    """Plan with the launcher of the site, or of the study; without one, with that of jobs where no mpirun is found."""
    name: str | None = site.launcher
    if name is None and study.launcher == launchers.AUTO:
        found = launchers.of_all_hosts(here=False)
        # another one is found in the job by itself
        name = found.name if found is not None and found.job is not None else None
    if name is not None:
        # `--launcher` has set it already, and wins
        os.environ.setdefault(launchers.VARIABLE, name)


def allocation_for(
    study: Study,
    site: Site,
    scheduler: Scheduler,
    nodes: int | None,
    tasks_per_node: int | None,
) -> Allocation:
    """State the allocation of the largest runs: as many nodes as they need, and one for servers, if there are so many.

    `nodes` and `tasks_per_node` are limits that the user gave; site.yaml and the
    scheduler say the others.

    Raises:
        SiteError: the cores of a node are unknown, or nodes too few for the real runs that the study asks for.
    """
    known = partition_of(site, scheduler)
    cores = (
        site.cores_per_node
        or (known.cores_per_node if known else None)
        or tasks_per_node
    )
    if cores is None:
        raise SiteError(
            f"the cores of a node are unknown, as {scheduler.name} does not say them here; state cores_per_node in "
            "site.yaml (scalebench init --site), or --tasks-per-node"
        )
    if study.engine == "auto":
        on_gpus = engines.available(engines.on_gpus(), here=False) is None
    else:
        on_gpus = engines.named(study.engine).on_gpus
    gpus = (
        (site.gpus_per_node or (known.gpus_per_node if known else 0)) if on_gpus else 0
    )
    # a worker to a GPU; without GPUs as many as can compute at once
    each = tasks_per_node or gpus or max(1, cores // study.threads_per_worker)
    # the nearest word counts: the command's, the site's, the scheduler's
    most = nodes or site.nodes or (known.nodes if known else None)
    # a job of more nodes than its partition has would wait for ever
    of_partition = known.nodes if known and site.partition else None
    is_beyond = bool(most and of_partition and most > of_partition)
    most = of_partition if is_beyond else most
    # rounded up
    needed = -(-max(study.workers) // each)
    if most is not None and needed > most and study.execution in ("native", "paced"):
        where = (
            f"partition {known.name}"
            if known and (is_beyond or not (nodes or site.nodes))
            else "a job"
        )
        is_stated = bool(nodes or site.nodes) and not is_beyond
        raise SiteError(_too_small(where, most, each, study.workers, stated=is_stated))
    taken = needed + 1 if most is None else min(most, needed + 1)
    return Allocation.asked(taken, each, cores=max(cores, each), gpus=gpus)


def partition_of(site: Site, scheduler: Scheduler) -> Partition | None:
    """Return the partition of jobs as the scheduler describes it; None if it is not here, or does not."""
    if shutil.which(scheduler.submits) is None:
        return None
    return scheduler.partition(site.partition)


def only_virtual(study: Study, allocation: Allocation) -> list[str]:
    """Note the worker counts of a study that have virtual runs alone, for want of nodes."""
    beyond = [str(count) for count in study.workers if count > allocation.slots]
    if study.execution != "auto" or not beyond:
        return []
    nodes, each = (
        counted(len(allocation.hosts), "node"),
        counted(allocation.hosts[0].slots, "worker"),
    )
    return [
        f"virtual runs alone at {', '.join(beyond)} workers: a job has at most {nodes} of {each}"
    ]


def _too_small(
    where: str, nodes: int, each: int, workers: Sequence[int], *, stated: bool
) -> str:
    beyond = [count for count in workers if -(-count // each) > nodes]
    fits = [count for count in workers if count not in beyond]
    others = (
        "allow more --nodes, or nodes of site.yaml"
        if stated
        else "use another partition"
    )
    step = f"use --workers {','.join(map(str, fits))}" if fits else others
    return (
        f"{where} has at most {counted(nodes, 'node')} of {counted(each, 'worker')}, and "
        f"{', '.join(map(str, beyond))} workers do not fit; {step}, or --execution auto for virtual runs there"
    )


def limits_of(
    plan: StudyPlan,
    allocation: Allocation,
    site: Site,
    stated: int | None,
    longest: int | None = None,
) -> Callable[[Sequence[Run]], int]:
    """Return the function that gives the time limit of a job with some runs: the stated one, or the estimate's.

    The estimate follows from one step, measured here once. A login node is not a
    compute node, and communication is not in it: hence the margin. `longest` is the
    limit of the partition, unless the site states one.
    """
    longest = site.max_time or longest
    if stated is not None:
        return lambda runs: stated
    # kept: a dry run before the submission measures it as well
    step_s = kept_step(plan) if trains(plan.sweep.runs) else 0.0

    def limit_s(runs: Sequence[Run]) -> int:
        expected = estimate(
            plan, runs, len(plan.sweep.further), allocation.hosts[0].cores, step_s
        )
        needed = _START_S + _MARGIN * expected.wall_s * expected.most
        if any(run.is_virtual for run in runs):
            needed += plan.study.calibration_budget_s
        whole = int(-(-needed // _STEP_S) * _STEP_S)
        return whole if longest is None else min(whole, longest)

    return limit_s
