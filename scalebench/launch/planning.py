"""The plan of a study: resolved and checked before anything runs, without importing torch; and an estimate of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from scalebench.cluster.load import load_cluster
from scalebench.cluster.network import allreduce_name
from scalebench.cluster.spec import Cluster
from scalebench.comm import engines
from scalebench.errors import StudyError
from scalebench.formatting import counted, roughly
from scalebench.launch.hosts import reachable
from scalebench.launch.preparation import Preparation, prepare_study
from scalebench.launch.sweep import Sweep, expand, strategy_warnings
from scalebench.models.pinning import pinned
from scalebench.native.job import server_ranks
from scalebench.study.heterogeneity import SlowLinks
from scalebench.study.spec import Run, Study

_WARM_UP, _WARM_UP_S = (2, 20), 0.5  # steps, at least and at most, and seconds; large models take the fewest
_STEPS, _STEPS_S = (3, 60), 1.0


@dataclass
class StudyPlan:
    """The runs of a study, the cluster and the prepared data."""

    study: Study
    cluster: Cluster
    sweep: Sweep
    prepared: Preparation

    @property
    def notes(self) -> list[str]:
        return [
            *self.sweep.notes,
            *why_oversubscribed(self.sweep.runs),
            *beyond_the_slots(self.sweep.runs),
            *between_nodes(self.sweep.runs, self.cluster),
            *self.prepared.notes,
        ]

    @property
    def measures(self) -> bool:
        """True if times are measured: in real runs, or in a calibration that is neither given nor stated."""
        given = self.study.calibration is not None or self.study.device_step_time is not None
        real = len(self.sweep.runs) > len(self.sweep.of("virtual"))
        return real or (self.cluster.compute == "this-machine" and not given)


def plan_study(study: Study, *, timed: bool = True) -> StudyPlan:
    """Resolve `study` and check everything that can be checked before it runs; unless `timed`, without step times.

    Raises:
        UsageError: the study cannot run as it is; one line.
    """
    study = pinned(study)
    cluster = load_cluster(study.cluster)
    there = study.model_copy(update={"virtual": study.virtual.with_defaults(cluster.uneven)})
    sweep = expand(there, cluster, timed=timed)
    _slow_nodes_exist(study.virtual.slow_links, cluster, sweep.runs)
    prepared = prepare_study(there, sweep.runs)
    steps = {workers: plan.steps(0) for workers, plan in prepared.plans.items()}
    warnings = strategy_warnings(there, sweep.runs, cluster, steps=steps)
    prepared.notes += [warning for warning in warnings if warning not in sweep.notes]
    return StudyPlan(study, cluster, sweep, prepared)


def between_nodes(runs: Iterable[Run], cluster: Cluster) -> list[str]:
    """Note the allreduce that virtual runs on several nodes assume; empty if each run is on one node."""
    wide = [run for run in runs if run.execution == "virtual" and run.workers > cluster.node.workers_per_node]
    if not wide:
        return []
    return [
        f"virtual runs assume allreduce between nodes by {allreduce_name(wide[0].virtual.collective)}, where none was "
        "measured; assume another with --set virtual.collective=ring; scalebench doctor compares MPI's with a ring"
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
    last = (most - 1) // per_node
    counted = f"{most} worker{'s' * (most > 1)}, {per_node} on a node of {cluster.name}"
    if last == 0:
        raise StudyError(f"virtual.slow_links slow nothing: the largest run is on one node ({counted})")
    for ends in slow:
        if (node := max(map(int, ends.split("-")))) > last:
            raise StudyError(
                f"virtual.slow_links names node {node}; the largest run has the nodes 0 to {last} ({counted})"
            )


def is_oversubscribed(run: Run) -> bool:
    """Return True if a native run keeps more threads busy than there are cores; of paced runs the overrun decides."""
    if run.execution != "native":
        return False
    return reachable().is_oversubscribed(run.engine, run.workers + server_ranks(run), run.threads_per_worker)


def why_oversubscribed(runs: Iterable[Run]) -> list[str]:
    """Note the oversubscribed points of `runs` and the reasons; empty if there are none."""
    crowded: dict[str, set[int]] = {}
    reasons: set[str] = set()
    moving: set[str] = set()
    for run in filter(is_oversubscribed, runs):
        servers = server_ranks(run)
        crowded.setdefault(f"{run.engine}{' with servers' * bool(servers)}", set()).add(run.workers)
        if servers:
            reasons.add("each server is one more process")
        if engines.PROGRESS_THREADS[run.engine] and run.workers > 1:
            moving.add(run.engine)
        if run.threads_per_worker > 1:
            reasons.add(f"a worker computes in {run.threads_per_worker} threads")
    if not crowded:
        return []
    if moving:
        reasons.add(
            f"a worker of {' or '.join(sorted(moving))} has a thread that moves bytes beside the one that computes"
        )
    points = [f"{name} at {', '.join(map(str, sorted(counts)))} workers" for name, counts in sorted(crowded.items())]
    here = reachable()
    places = f" of {len(here.hosts)} nodes" if len(here.hosts) > 1 else ""
    return [
        f"oversubscribed on {here.cores} core{'s' * (here.cores > 1)}{places}, so drawn but never a baseline nor "
        f"fitted: {'; '.join([', '.join(points), *sorted(reasons)])}"
    ]


def beyond_the_slots(runs: Iterable[Run]) -> list[str]:
    """Note the points of `runs` that take more processes than an allocation of several nodes has slots."""
    real = [run for run in runs if run.execution != "virtual"]
    if not real or len(reachable().hosts) == 1:
        return []
    slots, taken = reachable().slots, {}
    for run in real:
        servers = server_ranks(run)
        if (needed := run.workers + servers) > slots:
            beside = f" ({counted(servers, 'server')} beside the workers)" if servers else ""
            taken[f"{run.strategy} at {run.workers} workers takes {needed} processes{beside}"] = needed
    if not taken:
        return []
    return [
        f"the allocation has {counted(slots, 'slot')}, and {'; '.join(taken)}: what exceeds the slots shares a node's "
        f"cores with others; ask for {max(taken.values())} tasks to avoid it"
    ]


@dataclass(frozen=True)
class ComputeEstimate:
    """Expected training compute, without communication, start-up of processes and calibration."""

    step_s: float
    wall_s: float
    core_hours: float
    most: float = 1.0  # times as much, if the stopping rule asks for all possible runs

    def __str__(self) -> str:
        """`about 12 min and 0.390 core-hours of training compute`, as a range if more runs may follow."""
        wall, hours = roughly(self.wall_s), _hours(self.core_hours)
        if self.most > 1:
            wall = _span(wall, roughly(self.wall_s * self.most))
            hours = _span(hours, _hours(self.core_hours * self.most))
        return f"about {wall} and {hours} core-hours of training compute"


def _span(low: str, high: str) -> str:
    """`low to high`, or one of them if they are equal."""
    return low if low == high else f"{low} to {high}"


def _hours(hours: float) -> str:
    return f"{hours:.3f}" if hours < 10 else f"{hours:,.0f}"


def estimate(plan: StudyPlan, jobs: int) -> ComputeEstimate:
    """ComputeEstimate the time of all runs, `jobs` virtual ones at a time, from one local step measured now."""
    step_s = measured_step(plan)
    native = sum(run_steps(plan, run) * step_s for run in plan.sweep.runs if run.execution == "native")
    paced_step = plan.study.device_step_time or step_s
    native += sum(run_steps(plan, run) * paced_step for run in plan.sweep.runs if run.execution == "paced")
    virtual = sum(run_steps(plan, run) * run.workers * step_s for run in plan.sweep.runs if run.execution == "virtual")
    busy = sum(run_steps(plan, run) * run.workers * step_s for run in plan.sweep.runs)
    return ComputeEstimate(
        step_s, native + virtual / jobs, busy / 3600, 1 + len(plan.sweep.further) / len(plan.sweep.runs)
    )


def run_steps(plan: StudyPlan, run: Run) -> int:
    """Optimizer steps of one worker in the whole run."""
    return plan.prepared.plans[run.workers].steps(0) * run.epochs


def measured_step(plan: StudyPlan) -> float:
    """Measure one local step, in seconds, of the study's model at its smallest worker count."""
    import torch

    from scalebench.system.clock import WallClock
    from scalebench.training.replica import Replica
    from scalebench.virtual.step_windows import SoloCommunicator, bounded, take_steps

    torch.set_num_threads(plan.study.threads_per_worker)
    run = min(plan.sweep.runs, key=lambda run: run.workers)
    dataset, shards = plan.prepared.datasets[run.workers], plan.prepared.plans[run.workers]
    replica = Replica(run, dataset, shards, SoloCommunicator(), WallClock())  # type: ignore[arg-type]
    take_steps(replica, bounded(*_WARM_UP, _WARM_UP_S))
    begin = time.perf_counter()
    steps = take_steps(replica, bounded(*_STEPS, _STEPS_S))
    return (time.perf_counter() - begin) / steps
