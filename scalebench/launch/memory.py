"""What a study's largest run may take of this machine's memory, where that is more than there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scalebench.formatting import counted
from scalebench.launch import engines
from scalebench.launch.planning import Plan
from scalebench.records.machine import usable_memory_mib
from scalebench.strategies.replica_state import remembered_by
from scalebench.study.spec import Component, Run
from scalebench.training.optimizers import build_optimizer

_OWN = 3  # vectors of a replica: parameters, gradients, and the parameters it began with


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


def what_may_not_fit(plan: Plan, model_bytes: int) -> list[str]:
    """A note on the run that wants most, if this machine has less; `model_bytes` are those of the parameters."""
    own = (_OWN + _moments(plan.study.optimizer)) * model_bytes
    needs = [_need(plan, run, own, model_bytes) for run in _in_this_memory(plan.sweep.runs)]
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


def _in_this_memory(runs: Sequence[Run]) -> list[Run]:
    """Simulated workers, and real ones unless they train on GPUs."""
    return [run for run in runs if run.execution == "virtual" or not engines.gpus()]


def _need(plan: Plan, run: Run, replica: int, model: int) -> Need:
    here = run.workers if run.execution == "virtual" else min(run.workers, plan.cluster.node.workers_per_node)
    kept = 1 + ((run.epochs - 1) // run.evaluate_every if run.evaluate_every else 0)
    return Need(run, here, here * replica, kept, here * kept * model)


def _moments(optimizer: Component) -> int:
    """Numbers that the optimizer remembers of each parameter."""
    import torch

    one = torch.nn.Parameter(torch.zeros(1, 1))
    one.grad = torch.ones_like(one)
    made = build_optimizer(optimizer, [one], 0.1, flat=True)
    made.step()
    return sum(value.dim() > 0 for value in remembered_by(made))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.0f} GiB" if nbytes >= 10 * 2**30 else f"{nbytes / 2**30:.1f} GiB"
