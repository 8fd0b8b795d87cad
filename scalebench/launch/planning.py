"""A study resolved against what is here, before anything runs; imports no torch, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scalebench.cluster.load import load_cluster
from scalebench.cluster.network import in_words
from scalebench.cluster.spec import Cluster
from scalebench.errors import StudyError
from scalebench.formatting import counted
from scalebench.launch import engines
from scalebench.launch.hosts import reachable
from scalebench.launch.preparation import Preparation, prepare_study
from scalebench.launch.sweep import Sweep, expand, strategy_warnings
from scalebench.models.pinning import pinned
from scalebench.native.job import server_ranks
from scalebench.study.heterogeneity import SlowLinks
from scalebench.study.spec import Run, Study


@dataclass
class Plan:
    """What will run, and with what."""

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


def plan_study(study: Study, *, timed: bool = True) -> Plan:
    """Check everything about `study` that can be checked before it runs; if not `timed`, step times are not asked for.

    Raises:
        UsageError: whatever cannot be; one line.
    """
    study = pinned(study)
    cluster = load_cluster(study.cluster)
    there = study.model_copy(update={"virtual": study.virtual.over(cluster.uneven)})
    sweep = expand(there, cluster, timed=timed)
    _slow_nodes_exist(study.virtual.slow_links, cluster, sweep.runs)
    prepared = prepare_study(there, sweep.runs)
    steps = {workers: plan.steps(0) for workers, plan in prepared.plans.items()}
    warnings = strategy_warnings(there, sweep.runs, cluster, steps=steps)
    prepared.notes += [warning for warning in warnings if warning not in sweep.notes]
    return Plan(study, cluster, sweep, prepared)


def between_nodes(runs: Iterable[Run], cluster: Cluster) -> list[str]:
    """One line that names the allreduce that virtual runs on several nodes assume; none if each is on one."""
    wide = [run for run in runs if run.execution == "virtual" and run.workers > cluster.node.workers_per_node]
    if not wide:
        return []
    return [
        f"virtual runs assume allreduce between nodes by {in_words(wide[0].virtual.collective)}, where none was "
        "measured; assume another with --set virtual.collective=ring; scalebench doctor compares MPI's with a ring"
    ]


def _slow_nodes_exist(slow: SlowLinks, cluster: Cluster, runs: Iterable[Run]) -> None:
    """Refuse slow links of a study that no run uses; native runs use none, and a note says so.

    Raises:
        StudyError: a node that the largest run has not, or runs of one node, which use no link between nodes.
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
    """Whether the run's processes want more cores than there are. Paced runs sleep; their overrun tells."""
    if run.execution != "native":
        return False
    return reachable().is_oversubscribed(run.engine, run.workers + server_ranks(run), run.threads_per_worker)


def why_oversubscribed(runs: Iterable[Run]) -> list[str]:
    """One line that names the points of `runs` that are, and what wants more cores than there are; none if none is."""
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
    """One line on the points of `runs` that take more processes than an allocation of several nodes has slots."""
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
