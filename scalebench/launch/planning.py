"""A study resolved against what is here, before anything runs; imports no torch, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scalebench.cluster.load import load_cluster
from scalebench.cluster.spec import Cluster
from scalebench.launch import engines
from scalebench.launch.preparation import Preparation, prepare_study
from scalebench.launch.sweep import Sweep, expand
from scalebench.models.pinning import pinned
from scalebench.native.job import server_ranks
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
        return [*self.sweep.notes, *why_oversubscribed(self.sweep.runs), *self.prepared.notes]


def plan_study(study: Study, *, timed: bool = True) -> Plan:
    """Check everything about `study` that can be checked before it runs; if not `timed`, step times are not asked for.

    Raises:
        UsageError: whatever cannot be; one line.
    """
    study = pinned(study)
    cluster = load_cluster(study.cluster)
    there = study.model_copy(update={"virtual": study.virtual.over(cluster.uneven)})
    sweep = expand(there, cluster, timed=timed)
    return Plan(study, cluster, sweep, prepare_study(there, sweep.runs))


def is_oversubscribed(run: Run) -> bool:
    """Whether the run's processes want more cores, or GPUs, than there are. Paced runs sleep; their overrun tells."""
    if run.execution != "native":
        return False
    return engines.is_oversubscribed(run.engine, run.workers + server_ranks(run), run.threads_per_worker)


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
    here = engines.cores()
    return [
        f"oversubscribed on {here} core{'s' * (here > 1)}, so drawn but never a baseline nor fitted: "
        f"{'; '.join([', '.join(points), *sorted(reasons)])}"
    ]
