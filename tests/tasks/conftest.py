"""Runs whose blocks of steps are tasks of processes that stay for all tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalebench.data.catalog import prepare
from scalebench.study.spec import Component, Run
from scalebench.tasks.run import TaskRuns
from scalebench.training.outcome import Outcome

Weights = dict[str, np.ndarray]
# A model file whose batches take long enough for a process to be killed meanwhile.
SLOW = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x):
        if self.training:
            time.sleep(0.05)
        return self.layer(x)

def build(input_shape, outputs):
    return Slow(input_shape[0], outputs)
"""


def task_run(strategy: Any = "epoch_average", workers: int = 2, **changes: Any) -> Run:
    """A run on the engine `tasks`; its training rows divide by neither 2 nor 3."""
    component = Component.model_validate(strategy)
    options: dict[str, Any] = {
        "study": "test",
        "run_id": f"tasks-{component.name}-{workers}",
        "config_hash": "x",
        "execution": "native",
        "engine": "tasks",
        "strategy": component,
        "workers": workers,
        "repetition": 0,
        "seed": 5,
        "epochs": 3,
        "dataset": Component(name="wine"),
        "model": Component(name="mlp", options={"hidden": [6]}),
        "batch_per_worker": 5,
        "dtype": "float64",
        "warmup_steps": 2,
        "save_weights": True,
    }
    return Run.model_validate(options | changes)


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Iterator[Callable[[Run], tuple[Outcome, Weights]]]:
    """Execute a run by tasks: `outcome, weights = executed(run)`."""
    folder = tmp_path_factory.mktemp("weights")
    folders: dict[int, Path] = {}
    runs = TaskRuns(folders, 3, folder)

    def execute(run: Run) -> tuple[Outcome, Weights]:
        folders[run.workers] = prepare(run, run.workers)
        outcome = runs.execute(run)
        path = folder / f"{run.run_id}.npz"
        if outcome.status != "completed":
            return outcome, {}
        with np.load(path) as kept:
            return outcome, {name: kept[name] for name in kept.files}

    yield execute
    runs.close()
