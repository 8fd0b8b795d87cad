"""Costs of a round of tasks on this node: blocks of 1 and of 2 workers, beside their training, by bytes of weights.

A block takes weights and momentum to its process and back; what else a round takes is
in it too: putting state into a model and out of it, random generators, and the average.
So rounds are made as in a run, of a synthetic data set and of models of a few sizes
that no study trains.
"""

from __future__ import annotations

from contextlib import closing
from statistics import quantiles
from typing import NamedTuple

from scalebench.cluster.engine_costs import EngineCost, EngineCosts
from scalebench.comm.engines.tasks import TASKS
from scalebench.data.catalog import prepare
from scalebench.errors import EngineError
from scalebench.records.machine_facts import cpu_model
from scalebench.study.spec import Component, Run, TaskOptions
from scalebench.system import hardware
from scalebench.system.disturbance import (
    BackgroundLoad,
    disturbed,
    own_and_children_s,
)
from scalebench.tasks.run import TaskRuns

_EPOCHS = {
    1: 24,
    200: 24,
    1000: 24,
    25_000: 8,
}  # by hidden units: 0.2 to 4,300 kB of float32
_WARM = 2  # first epochs, which begin slower
_SAMPLES = 64  # an epoch of 4 steps
_BYTES = 4  # of a number in float32


def task_costs(options: TaskOptions) -> EngineCosts:
    """Measure the rounds of tasks on the backend of `options`; takes some seconds, and as long as it takes to start.

    Raises:
        EngineError: a round failed.
    """
    return EngineCosts(entries=[_measured(options, workers) for workers in (1, 2)])


def _measured(options: TaskOptions, workers: int) -> EngineCost:
    """Measure the rounds of so many workers."""
    folder = prepare(_run(options, workers, hidden=1), workers)
    with closing(TaskRuns({workers: folder}, workers)) as tasks:
        rounds = [_round(tasks, _run(options, workers, hidden)) for hidden in _EPOCHS]
    points = [(each.nbytes, each.seconds) for each in rounds]
    return EngineCost(
        engine=TASKS,
        ranks=workers,
        alpha_s=points[0][1],
        points=points,
        disturbed=any(each.disturbed for each in rounds),
        source=f"rounds of tasks on {options.backend}, {cpu_model()}, {hardware.cores()} cores",
    )


class _Round(NamedTuple):
    """Seconds of a round of tasks with `nbytes` of weights; `disturbed` if other programs took the cores meanwhile."""

    nbytes: int
    seconds: float
    disturbed: bool


def _round(tasks: TaskRuns, run: Run) -> _Round:
    """Measure the epochs of `run` beside their training, of the worker that waits least: their median.

    Other programs only add to a time: beside them it is the lower decile.
    """
    background = BackgroundLoad(own_and_children_s)
    outcome = tasks.execute(run)
    is_disturbed = disturbed(background.cores())
    if outcome.status != "completed":
        raise EngineError(
            f"tasks on {run.tasks.backend} could not be measured: {outcome.error}"
        )
    assert outcome.facts.parameters is not None
    epochs = list(zip(*(worker.epochs for worker in outcome.workers), strict=True))[
        _WARM:
    ]
    seconds = [
        min(each.epoch_s - (each.compute_s or 0.0) - each.data_s for each in epoch)
        for epoch in epochs
    ]
    typical = quantiles(seconds, n=10, method="inclusive")[0 if is_disturbed else 4]
    return _Round(_BYTES * outcome.facts.parameters, max(0.0, typical), is_disturbed)


def _run(options: TaskOptions, workers: int, hidden: int) -> Run:
    return Run(
        study=TASKS,
        run_id=f"{TASKS}-{workers}-{hidden}",
        config_hash="",
        execution="native",
        engine=TASKS,
        tasks=options,
        strategy=Component(name="serial" if workers == 1 else "epoch_average"),
        workers=workers,
        repetition=0,
        seed=0,
        epochs=_EPOCHS[hidden],
        dataset=Component(
            name="synthetic", options={"n_train": _SAMPLES * workers, "n_test": 8}
        ),
        model=Component(name="mlp", options={"hidden": [hidden]}),
        optimizer=Component(name="sgd", options={"momentum": 0.9}),
        batch_per_worker=16,
        dtype="float32",
        evaluate_every=0,
    )
