"""What a library computes in a step beside our program of it, which virtual runs follow.

fully_shard and DTensor call hooks, copy, and dispatch each operation in Python: some
milliseconds a block of a small transformer, whatever the batch. Both programs take
steps in one process, among ranks that are not there: communication, which is charged
for itself, takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from scalebench.comm.torch_dist import TorchCommunicator, silent_group
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.strategies import registry
from scalebench.strategies.base import Batch
from scalebench.study.spec import Run
from scalebench.training.replica import Replica

# Their arithmetic is not what is measured, and batch normalisation needs two.
_SAMPLES = 2
_WARM_UP = 3  # steps: torch plans its gathers in the first
_MOST = 16  # steps of each program


def overheads(run: Run, dataset: Dataset, budget_s: float) -> list[float]:
    """Return processor seconds by which steps of the library's program took longer than ours."""
    with silent_group(run.workers) as comm:
        ours, librarys = (
            _step(run, dataset, comm, engine) for engine in ("virtual", "gloo")
        )
        found: list[float] = []
        deadline = time.thread_time() + budget_s
        while not found or (len(found) < _MOST and time.thread_time() < deadline):
            # In turn: the speed of a shared machine changes.
            found.append(_seconds(librarys) - _seconds(ours))
    return found


def _step(
    run: Run, dataset: Dataset, comm: TorchCommunicator, engine: str
) -> Callable[[], None]:
    """Return a step of worker 0 by the program for `engine`, which has made some."""
    strategy = registry.create(run.strategy.name, run.strategy.options, engine)
    mesh = strategy.traits.mesh(run.workers)
    plan = BatchPlan.of(run, run.workers, run.seed, dataset, mesh.parts)
    replica = Replica(run, dataset, plan, comm, comm.clock, mesh=mesh)
    strategy.setup(replica)
    x, y = replica.shard.epoch(0)
    batch = Batch(x[:_SAMPLES], y[:_SAMPLES], 1.0, 0, first_of_block=True)

    def step() -> None:
        strategy.warm_up(replica, batch)

    for _ in range(_WARM_UP):
        step()
    return step


def _seconds(step: Callable[[], None]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began
