"""What calibration/ cannot know, as it lies below: the runs of a plan as its request, and where ranks are started."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from scalebench.calibration.cost_sources import Request
from scalebench.calibration.engine_measurement import Placing, Ranks
from scalebench.cluster.engine_costs import MARK, EngineCosts
from scalebench.launch.hosts import reachable
from scalebench.launch.planning import StudyPlan
from scalebench.launch.processes import environment, launch_command
from scalebench.study.spec import Run, TaskOptions

_FEWEST_RANKS = 3  # Open MPI chooses other algorithms for two


def request_of(plan: StudyPlan, runs: Sequence[Run]) -> Request:
    """Return what charging the virtual `runs` of `plan` takes."""
    return Request(
        study=plan.study,
        cluster=plan.cluster,
        device=plan.device,
        runs=runs,
        data=next(iter(plan.prepared.datasets.values())),
        folders=plan.prepared.folders,
        sizes=lambda: plan.batch_sizes({run.workers for run in runs}),
        largest=max(
            (
                plan.prepared.plan_of(run).batch_size
                for run in runs
                # trials train on fewer samples
                if run.trial is None
            ),
            default=1,
        ),
        beside_real=len(plan.sweep.runs) > len(plan.sweep.simulated),
        placing=Placing(
            ranks_on_this_host,
            ranks_on_all_nodes,
            partial(measure_tasks, plan.study.tasks),
        ),
    )


def ranks_on_this_host(count: int) -> Ranks:
    """Return `count` ranks on this host, also within an allocation of several.

    Raises:
        EngineError: the launcher cannot start them.
    """
    command, binding = launch_command(count, alone=True)
    variables = environment(1, oversubscribed=binding == "none", alone=True)
    return Ranks(count, 1, binding, command, variables)


def measure_tasks(options: TaskOptions) -> EngineCosts:
    """Measure the rounds of tasks on the backend of `options`.

    Raises:
        EngineError: the backend cannot be started, or a round failed.
    """
    from scalebench.tasks.run import task_costs  # imports torch

    return task_costs(options)


def ranks_on_all_nodes() -> Ranks | None:
    """Return a rank for each slot of this allocation; None where it has a single node.

    Raises:
        EngineError: a node cannot be reached, or the launcher cannot start them.
    """
    hosts = reachable()
    if len(hosts.hosts) == 1:
        return None
    # one at least on each host, whose links are measured
    count = max(hosts.slots, len(hosts.hosts))
    command, binding = launch_command(count)
    return Ranks(
        count,
        len(hosts.hosts),
        binding,
        command,
        environment(1, oversubscribed=binding == "none"),
    )


def measure_allreduce(
    nbytes: int,
    settings: Mapping[str, str],
    *,
    seconds: float,
    most_on_node: int,
    limit_s: float,
) -> tuple[int, float]:
    """Measure MPI's allreduce of `nbytes` with `settings` in the environment; return the ranks and the time.

    At most `most_on_node` ranks lie on each node, no more than it has cores; on a
    single node, three ranks share it.

    Raises:
        EngineError: measuring failed, or took longer than `limit_s` from the start of the ranks.
    """
    hosts = reachable()
    few = None if len(hosts.hosts) == 1 else hosts.with_at_most(most_on_node)
    count = _FEWEST_RANKS if few is None else few.slots
    command, binding = launch_command(count, settings=settings, on=few)
    variables = environment(1, oversubscribed=binding == "none") | dict(settings)
    ranks = Ranks(count, len(hosts.hosts), binding, command, variables)
    spec = {"nbytes": nbytes, "seconds": seconds, "mark": MARK}
    found = json.loads(
        ranks.printed("allreduce_probe", spec, "MPI's allreduce", limit_s)
    )
    return found["ranks"], found["seconds"]
