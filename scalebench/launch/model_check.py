"""The study's model, built before anything runs: checks of strategies, weights and memory, and an estimate of time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from scalebench.errors import ModelError
from scalebench.formatting import counted, roughly
from scalebench.launch.planning import StudyPlan, cuts_model, micro_batches
from scalebench.launch.sweep import strategy_warnings
from scalebench.models.registry import build_model, is_foreign
from scalebench.records.machine_facts import cpu_model
from scalebench.strategies import registry
from scalebench.study.spec import Run, Study
from scalebench.system import hardware
from scalebench.system.file_access import cache_folder, write_atomic
from scalebench.system.hardware import usable_memory_mib

if TYPE_CHECKING:
    from torch import nn

    from scalebench.models.parts import Layer
    from scalebench.models.trial import Trial

# steps, at least and at most, and seconds; large models take the fewest
_WARM_UP, _WARM_UP_S = (
    (2, 20),
    0.5,
)
_STEPS, _STEPS_S = (3, 60), 1.0
_TRIED = 2  # samples of a batch on which a model is tried


def look_at_model(plan: StudyPlan) -> list[str]:
    """Build the model and return notes on it: a factory that fails is one line, not a row per run.

    Raises:
        ModelError: it cannot be built, has nothing to train, or a strategy of the study can do nothing with it.
        StudyError: `init_weights` do not fit.
    """
    import torch

    from scalebench.training.initial_weights import load_weights

    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    dtype = getattr(torch, study.dtype)
    model = build_model(
        study.model,
        dataset.input_shape,
        dataset.outputs,
        dataset.task,
        dtype,
        study.seed,
    )
    shapes = [
        tuple(parameter.shape)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    parameters = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    # frozen parameters alone train nothing, and send nothing
    if parameters == 0:
        raise ModelError(f"model {study.model} has no parameters to train")
    # read now, for their size to be refused in one line
    if study.init_weights is not None:
        load_weights(study.init_weights, parameters)
    without_gradient, notes = _tried(plan, model)
    layers, layer_work = _layers_to_divide(plan, model)
    strategy_warnings(
        study,
        plan.sweep.runs,
        plan.cluster,
        plan.allocation,
        shapes=shapes,
        without_gradient=without_gradient,
        layers=layers,
        layer_work=layer_work,
    )
    # integer buffers count batches, and are no statistics
    if any(buffer.is_floating_point() for buffer in model.buffers()):
        notes += local_statistics(study) + statistics_of_pieces(plan)
    nbytes = parameters * dtype.itemsize
    # without memory from here on: only shapes are recorded
    replica_bytes = partial(_replica_bytes, plan, model.to("meta"), nbytes)
    return notes + memory_notes(plan, nbytes, replica_bytes)


def _layers_to_divide(
    plan: StudyPlan, model: nn.Module
) -> tuple[Sequence[Layer] | None, Sequence[float] | None]:
    """Return the layers that strategies of the study divide, and the work of each; None where none divides the model.

    A layer table has no modules, but the work.
    """
    import torch

    from scalebench.models.parts import facts_of, require_cut
    from scalebench.pricing.table_cut import cut_of

    study, dataset = plan.study, next(iter(plan.prepared.datasets.values()))
    if not any(cuts_model(run) for run in plan.sweep.runs):
        return None, None
    if (cut := cut_of(study.model)) is not None:
        return None, cut.work
    layers = require_cut(model, str(study.model), dataset.input_shape)
    dtype = getattr(torch, study.dtype)
    sample = torch.zeros(_TRIED, *dataset.input_shape, dtype=dtype)
    return layers, [each.work for each in facts_of(layers, sample)]


def _replica_bytes(
    plan: StudyPlan, model: nn.Module, parameter_bytes: int, run: Run
) -> int:
    """Return the memory of the fullest worker of `run`, recorded with `model` on the device meta."""
    from scalebench.launch.traffic import schedules_of

    try:
        schedules = schedules_of(plan, run.model_copy(update={"epochs": 1}), model)
    except (Exception, SystemExit):
        # its program fails, or reads numbers out of tensors: its run will say so
        return 3 * parameter_bytes
    most: int = max(schedule.memory_bytes for schedule in schedules)
    return most


def fits_unseen(plan: StudyPlan) -> bool:
    """Return True if nothing of the plan depends on how the model is built, so that it can be submitted without torch.

    Such a model is of this package, starts from weights of its own, is held whole, and
    trains on several samples at a time. The runs look at it all the same.
    """
    study = plan.study
    if is_foreign(study.model) or study.init_weights is not None:
        return False
    return _smallest_batch(plan) != 1 and not any(
        cuts_model(run) for run in plan.sweep.runs
    )


def _smallest_batch(plan: StudyPlan) -> int:
    """Samples of the smallest batch, or micro-batch, on which the study trains; 0 if it trains nothing."""
    found = []
    for run in plan.sweep.runs:
        if run.execution != "modelled":
            batch = int(plan.prepared.plan_of(run).batch_sizes(0).min())
            # a batch of fewer samples than micro-batches is cut into its samples
            found.append(batch // max(1, min(micro_batches(run), batch)))
    return min(found, default=0)


def _tried(plan: StudyPlan, model: nn.Module) -> Trial:
    """Train the model on the smallest batch of the study, where it is to be trained.

    Models of this package are known to train but for BatchNorm on one sample.
    """
    import torch

    from scalebench.models.trial import Trial, refuse_small_batches, try_model

    study = plan.study
    dataset = next(iter(plan.prepared.datasets.values()))
    # a batch of one fails in BatchNorm, and one of two shows all else
    samples = min(_smallest_batch(plan), _TRIED)
    if not samples or not (is_foreign(study.model) or samples == 1):
        return Trial([], [])
    dtype = getattr(torch, study.dtype)
    # a copy: the data set is mapped read-only
    x = torch.tensor(dataset.x_train[:samples], dtype=dtype)
    y = torch.tensor(
        dataset.y_train[:samples],
        dtype=torch.int64 if dataset.task == "classification" else dtype,
    )

    def build() -> nn.Module:
        return build_model(
            study.model,
            dataset.input_shape,
            dataset.outputs,
            dataset.task,
            dtype,
            study.seed,
        )

    if is_foreign(study.model):
        return try_model(study.model, build, x, y, dataset.outputs, dataset.task)
    refuse_small_batches(study.model, build(), x, y, dataset.outputs, dataset.task)
    return Trial([], [])


def local_statistics(study: Study) -> list[str]:
    """Note the strategies under which the model's running statistics (BatchNorm) are never averaged."""
    if max(study.workers) == 1:
        return []
    made = {
        str(component): registry.create(component.name, component.options)
        for component in study.strategies
    }
    traits = {
        name: strategy.traits for name, strategy in made.items() if strategy.requires
    }
    local = [
        name
        for name, each in traits.items()
        if not each.averages_buffers and not each.sends_buffers
    ]
    sent = [name for name, each in traits.items() if each.sends_buffers]
    parts = []
    if local:
        parts.append(f"stay local under {', '.join(local)} (evaluated with worker 0's)")
    if sent:
        # torch's default
        parts.append(f"are worker 0's in each step of {', '.join(sent)}")
    return [
        f"running statistics (BatchNorm) of {study.model} {' and '.join(parts)}: use a strategy with "
        "buffers: average, or model: nfnet, which has none"
    ] * bool(parts)


def statistics_of_pieces(plan: StudyPlan) -> list[str]:
    """Note the strategies under which batch normalisation sees micro-batches, and no whole batches."""
    cut = dict.fromkeys(
        f"{run.strategy} ({micro_batches(run)} of a batch)"
        for run in plan.sweep.runs
        if run.execution != "modelled" and micro_batches(run) > 1
    )
    if not cut:
        return []
    return [
        f"batch normalisation of {plan.study.model} sees micro-batches under {', '.join(cut)}: the weights are those "
        "of one worker that trains in these, and differ from those of whole batches; model: nfnet has none"
    ]


def memory_notes(
    plan: StudyPlan, model_bytes: int, replica_bytes: Callable[[Run], int]
) -> list[str]:
    """A note on the run that needs most memory on one node, if this machine has less.

    `model_bytes` are those of the parameters, `replica_bytes` those of a worker's
    vectors, by run. Each replica keeps a model for each evaluation after the training.
    """
    largest: dict[str, Run] = {}
    # the last of each kind is the largest
    for run in sorted(plan.sweep.runs, key=lambda run: run.workers):
        # else in no memory here
        if run.execution == "virtual" or (not run.is_virtual and not hardware.gpus()):
            largest[f"{run.strategy} {run.execution}"] = run
    has, needs = usable_memory_mib() * 2**20, []
    for run in largest.values():
        here = (
            run.workers
            if run.is_virtual
            else min(run.workers, plan.cluster.node.workers_per_node)
        )
        # snapshots are evaluated after the training, so that it is not held up
        kept = 1 + ((run.epochs - 1) // run.evaluate_every if run.evaluate_every else 0)
        replicas, models = here * replica_bytes(run), here * kept * model_bytes
        text = (
            f"{run.strategy} at {counted(run.workers, 'worker')} ({run.execution}) may take up to "
            f"{_gib(replicas + models)} of memory, where this machine has {_gib(has)}: {_gib(replicas)} for "
            f"{counted(here, 'replica')}, {_gib(models)} for their models at {counted(kept, 'evaluation')}"
            f"{' (evaluate_every keeps fewer)' * (kept > 1)}"
        )
        needs.append((replicas + models, text))
    most, text = max(needs, default=(0, ""))
    return [text] if most > has else []


def _gib(nbytes: int) -> str:
    return (
        f"{nbytes / 2**30:,.0f} GiB"
        if nbytes >= 10 * 2**30
        else f"{nbytes / 2**30:.1f} GiB"
    )


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
