"""The time that the runs of a plan will compute, from one step of the model that is measured, or was before."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

from scalebench.formatting import roughly
from scalebench.launch.planning import StudyPlan
from scalebench.records.machine_facts import cpu_model
from scalebench.study.spec import Run
from scalebench.system.file_access import cache_folder, write_atomic

# steps, at least and at most, and seconds; large models take the fewest
_WARM_UP, _WARM_UP_S = (
    (2, 20),
    0.5,
)
_STEPS, _STEPS_S = (3, 60), 1.0


@dataclass(frozen=True)
class ComputeEstimate:
    """Expected training compute, without communication, start-up of processes and calibration."""

    step_s: float
    wall_s: float
    core_hours: float
    most: float = 1.0  # times as much, if the stopping rule asks for all possible runs

    def __str__(self) -> str:
        """`about 12 min and 0.390 core-hours of training compute`, as a range if more runs may follow."""
        scales = sorted({1.0, self.most})
        wall = dict.fromkeys(roughly(self.wall_s * scale) for scale in scales)
        hours = dict.fromkeys(_hours(self.core_hours * scale) for scale in scales)
        return f"about {' to '.join(wall)} and {' to '.join(hours)} core-hours of training compute"


def _hours(hours: float) -> str:
    return f"{hours:.3f}" if hours < 10 else f"{hours:,.0f}"


def estimate(
    plan: StudyPlan,
    left: Sequence[Run],
    most_to_come: int,
    jobs: int,
    step_s: float | None = None,
) -> ComputeEstimate:
    """Estimate the time of the runs and trials that are `left`, `jobs` virtual ones at a time.

    It follows from one local step, measured now unless `step_s` states it. Of
    `most_to_come` runs each takes as long as those on average.
    """
    step_s = measured_step(plan) if step_s is None else step_s
    native = sum(
        run_steps(plan, run) * step_s for run in left if run.execution == "native"
    )
    paced_step = plan.study.device_step_time or step_s
    # paced runs take the stated step time, whatever this machine needs
    native += sum(
        run_steps(plan, run) * paced_step for run in left if run.execution == "paced"
    )
    trained = [run for run in left if run.execution != "modelled"]
    virtual = sum(
        run_steps(plan, run) * run.workers * step_s
        for run in trained
        if run.execution == "virtual"
    )
    busy = sum(run_steps(plan, run) * run.workers * step_s for run in trained)
    return ComputeEstimate(
        step_s,
        native + virtual / jobs,
        busy / 3600,
        1 + most_to_come / max(1, len(left)),
    )


def trains(runs: Iterable[Run]) -> bool:
    """Return True if some of `runs` computes steps, which modelled ones do not."""
    return any(run.execution != "modelled" for run in runs)


def run_steps(plan: StudyPlan, run: Run) -> int:
    """Optimizer steps of one worker in the whole run."""
    prepared = plan.prepared if run.trial is None else plan.validation
    return prepared.plan_of(run).steps(0) * run.epochs


def measured_step(plan: StudyPlan) -> float:
    """Measure one local step, in seconds, of the study's model at its smallest worker count."""
    import torch

    from scalebench.calibration.step_windows import bounded, take_steps
    from scalebench.comm.simulated import lone_communicator
    from scalebench.system.clock import WallClock
    from scalebench.training.replica import Replica

    # as a worker has
    torch.set_num_threads(plan.study.threads_per_worker)
    run = min(plan.sweep.runs, key=lambda run: run.workers)
    dataset, shards = (
        plan.prepared.datasets[run.workers],
        plan.prepared.plans[run.workers],
    )
    replica = Replica(run, dataset, shards, lone_communicator(), WallClock())
    # the first steps allocate, and choose kernels
    take_steps(replica, bounded(*_WARM_UP, _WARM_UP_S))
    begin = time.perf_counter()
    steps = take_steps(replica, bounded(*_STEPS, _STEPS_S))
    return (time.perf_counter() - begin) / steps


def kept_step(plan: StudyPlan) -> float:
    """Return `measured_step`, of a model and batch that were measured on this machine before what the cache has."""
    study, workers = plan.study, min(plan.prepared.plans)
    dataset, batches = plan.prepared.datasets[workers], plan.prepared.plans[workers]
    # everything that the time of a step depends on
    facts = (
        version("torch"),
        cpu_model(),
        study.threads_per_worker,
        study.dtype,
        str(study.optimizer),
        str(study.model),
        study.model_sha256,
        dataset.input_shape,
        dataset.outputs,
        dataset.task,
        batches.batch_size,
    )
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    path = cache_folder("steps") / f"one-{name}.json"
    with suppress(OSError, ValueError, TypeError):
        return float(json.loads(path.read_text(encoding="utf-8")))
    step_s = measured_step(plan)
    # a cache that cannot be written is one that nothing is read from
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(step_s))
    return step_s
