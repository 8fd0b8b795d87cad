"""What a study will take, before it runs: its steps, counted, times a step, measured here for a moment."""

from __future__ import annotations

import time
from dataclasses import dataclass

from scalebench.formatting import roughly
from scalebench.launch.planning import Plan
from scalebench.study.spec import Run

_WARM_UP, _WARM_UP_S = (2, 20), 0.5  # steps, at least and at most, and seconds; large models take the fewest
_STEPS, _STEPS_S = (3, 60), 1.0


@dataclass(frozen=True)
class Estimate:
    """Training compute only: communication, start-up of processes and calibration come on top."""

    step_s: float
    wall_s: float
    core_hours: float
    most: float = 1.0  # times as much, where a study may come to need more runs

    @property
    def said(self) -> str:
        """`about 12 min and 0.390 core-hours of training compute`, with the most where that is more."""
        wall, hours = roughly(self.wall_s), _hours(self.core_hours)
        if self.most > 1:
            wall = _span(wall, roughly(self.wall_s * self.most))
            hours = _span(hours, _hours(self.core_hours * self.most))
        return f"about {wall} and {hours} core-hours of training compute"


def _span(low: str, high: str) -> str:
    """From one to the other; one alone where both read alike."""
    return low if low == high else f"{low} to {high}"


def _hours(hours: float) -> str:
    return f"{hours:.3f}" if hours < 10 else f"{hours:,.0f}"


def estimate(plan: Plan, jobs: int) -> Estimate:
    """Seconds for all runs of `plan` with `jobs` virtual runs at a time, from one measured local step."""
    step_s = measured_step(plan)
    native = sum(run_steps(plan, run) * step_s for run in plan.sweep.runs if run.execution == "native")
    paced_step = plan.study.device_step_time or step_s
    native += sum(run_steps(plan, run) * paced_step for run in plan.sweep.runs if run.execution == "paced")
    virtual = sum(run_steps(plan, run) * run.workers * step_s for run in plan.sweep.runs if run.execution == "virtual")
    busy = sum(run_steps(plan, run) * run.workers * step_s for run in plan.sweep.runs)
    return Estimate(step_s, native + virtual / jobs, busy / 3600, 1 + len(plan.sweep.further) / len(plan.sweep.runs))


def run_steps(plan: Plan, run: Run) -> int:
    """Optimizer steps of one worker in the whole run."""
    return plan.prepared.plans[run.workers].steps(0) * run.epochs


def measured_step(plan: Plan) -> float:
    """Seconds of one local step of the study's model at its smallest worker count, here and now."""
    import torch

    from scalebench.system.clock import WallClock
    from scalebench.training.replica import Replica
    from scalebench.virtual.calibration import Alone, bounded, take_steps

    torch.set_num_threads(plan.study.threads_per_worker)
    run = min(plan.sweep.runs, key=lambda run: run.workers)
    dataset, shards = plan.prepared.datasets[run.workers], plan.prepared.plans[run.workers]
    replica = Replica(run, dataset, shards, Alone(), WallClock())  # type: ignore[arg-type]
    take_steps(replica, bounded(*_WARM_UP, _WARM_UP_S))
    begin = time.perf_counter()
    steps = take_steps(replica, bounded(*_STEPS, _STEPS_S))
    return (time.perf_counter() - begin) / steps
