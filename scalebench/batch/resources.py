"""Resources that the jobs of a study ask for: nodes, workers on a node, time, and the launcher of ranks there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence

from scalebench.batch.job import Scheduler
from scalebench.batch.site import Site, SiteError
from scalebench.comm import engines
from scalebench.comm.launchers import choice, mpirun
from scalebench.formatting import counted
from scalebench.launch.hosts import Allocation
from scalebench.launch.model_check import estimate, kept_step, trains
from scalebench.launch.planning import StudyPlan
from scalebench.study.spec import Run, Study

_MARGIN, _START_S = 3.0, 600  # of a job's time limit: times the estimate, and on top
_STEP_S = 300  # limits are multiples of it


def choose_launcher(site: Site, study: Study) -> None:
    """Plan with the launcher of the site, or of the study; without one, with srun where no mpirun is found."""
    name = site.launcher
    if (
        name is None
        and study.launcher == choice.AUTO
        and mpirun.find() is None
        and shutil.which("srun")
    ):
        name = "srun"
    if name is not None:
        os.environ.setdefault(choice.VARIABLE, name)


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
    known = (
        scheduler.partition(site.partition) if shutil.which(scheduler.submits) else None
    )
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
    each = tasks_per_node or gpus or max(1, cores // study.threads_per_worker)
    most = nodes or site.nodes or (known.nodes if known else None)
    needed = -(-max(study.workers) // each)
    if most is not None and needed > most and study.execution in ("native", "paced"):
        where = (
            f"partition {known.name}"
            if known and not (nodes or site.nodes)
            else "a job"
        )
        raise SiteError(
            _too_small(
                where, most, each, study.workers, stated=bool(nodes or site.nodes)
            )
        )
    taken = needed + 1 if most is None else min(most, needed + 1)
    return Allocation.asked(taken, each, cores=max(cores, each), gpus=gpus)


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
    plan: StudyPlan, allocation: Allocation, site: Site, stated: int | None
) -> Callable[[Sequence[Run]], int]:
    """Return the function that gives the time limit of a job with some runs: the stated one, or the estimate's.

    The estimate follows from one step, measured here once. A login node is not a
    compute node, and communication is not in it: hence the margin.
    """
    longest = site.max_time
    if stated is not None:
        return lambda runs: stated
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
