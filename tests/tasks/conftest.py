"""Runs whose blocks of steps are tasks of processes that stay for all tests of a module, and one that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalebench.data.catalog import prepare
from scalebench.study.spec import Component, Run
from scalebench.tasks import backends
from scalebench.tasks.run import TaskRuns, _Tasks
from scalebench.training.outcome import Outcome

Weights = dict[str, np.ndarray]
# A model file whose batches take some time.
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

# One whose first process to train once `armed` is there waits for its end.
MORTAL = (
    SLOW.replace("import time", "import os\nimport time\nfrom pathlib import Path")
    .replace("time.sleep(0.05)", "wait_for_the_end()")
    .replace(
        "class Slow",
        """\
def wait_for_the_end():
    here = Path(__file__).parent
    if not (here / "armed").exists():
        return
    try:
        with (here / "pid").open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:  # another process was the first
        return
    time.sleep(3600)

class Slow""",
    )
)


def kill_one_training(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    begun: Callable[[Any], int] | None = None,
) -> None:
    """Kill a process of the next run of two workers by the model file MORTAL in `folder`, amid its block.

    `begun` counts blocks of which a backend has learned, where it has to know of both.
    """
    (folder / "mortal.py").write_text(MORTAL)
    begin = _Tasks._computed

    def kill(backend: Any, before: int) -> None:
        told = folder / "pid"
        while not (told.exists() and told.read_text()):
            time.sleep(0.01)
        while begun is not None and begun(backend) < before + 2:
            time.sleep(0.01)
        os.kill(int(told.read_text()), signal.SIGKILL)

    def armed(self: _Tasks, *block: Any) -> Any:
        if not (folder / "armed").exists():
            (folder / "armed").touch()
            before = begun(self.backend) if begun is not None else 0
            words = (self.backend, before)
            threading.Thread(target=kill, args=words, daemon=True).start()
        return begin(self, *block)

    monkeypatch.setattr(_Tasks, "_computed", armed)


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


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers and their workers may start slowly."""
    monkeypatch.setattr(backends, "ANSWER_S", 600.0)
    monkeypatch.setattr(backends, "_START_S", 600.0)


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
