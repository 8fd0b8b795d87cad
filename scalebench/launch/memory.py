"""Memory of a study's largest run, where it is more than this machine has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from scalebench.formatting import counted
from scalebench.launch import engines
from scalebench.launch.planning import StudyPlan
from scalebench.records.machine import usable_memory_mib
from scalebench.study.spec import Run


class Need(NamedTuple):
    """Bytes of a run on one node, at most; where replicas agree, one of their models is kept and not each."""

    run: Run
    replicas: int
    of_replicas: int
    models: int  # kept by each replica until training is over, when they are evaluated
    of_models: int

    @property
    def total(self) -> int:
        return self.of_replicas + self.of_models


def memory_notes(plan: StudyPlan, model_bytes: int, replica_bytes: Callable[[Run], int]) -> list[str]:
    """A note on the run that needs most memory, if this machine has less.

    `model_bytes` are those of the parameters, `replica_bytes` those of a worker's vectors, by run.
    """
    largest: dict[str, Run] = {}
    for run in sorted(plan.sweep.runs, key=lambda run: run.workers):
        if run.execution == "virtual" or not engines.gpus():  # real workers on GPUs hold them there
            largest[f"{run.strategy} {run.execution}"] = run
    needs = [_need(plan, run, replica_bytes(run), model_bytes) for run in largest.values()]
    most = max(needs, key=lambda need: need.total, default=None)
    has = usable_memory_mib() * 2**20
    if most is None or most.total <= has:
        return []
    run = most.run
    said = (
        f"{run.strategy} at {counted(run.workers, 'worker')} ({run.execution}) may take up to {_gib(most.total)} of "
        f"memory, where this machine has {_gib(has)}: {_gib(most.of_replicas)} for {counted(most.replicas, 'replica')}"
    )
    fewer = " (evaluate_every keeps fewer)" if most.models > 1 else ""
    return [f"{said}, {_gib(most.of_models)} for their models at {counted(most.models, 'evaluation')}{fewer}"]


def _need(plan: StudyPlan, run: Run, replica: int, model: int) -> Need:
    here = run.workers if run.execution == "virtual" else min(run.workers, plan.cluster.node.workers_per_node)
    kept = 1 + ((run.epochs - 1) // run.evaluate_every if run.evaluate_every else 0)
    return Need(run, here, here * replica, kept, here * kept * model)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.0f} GiB" if nbytes >= 10 * 2**30 else f"{nbytes / 2**30:.1f} GiB"
