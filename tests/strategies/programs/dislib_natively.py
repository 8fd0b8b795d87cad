"""Every rank of a launch: run the listed runs one after the other; workers merge in the order of their ranks.

The argument is a folder with `runs.json` ([{"run", "data"}]); rank 0 writes each run's
final weights.
"""

import gc
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.comm.server import OneSidedState
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.strategies import registry
from scalebench.study.spec import Run
from scalebench.system.clock import WallClock
from scalebench.training.loop import evaluate, train
from scalebench.training.replica import Replica


class InTurn:
    """A shared state that is entered by rank 0, 1, ..., K-1 in every round."""

    def __init__(self, state, mpi, rounds):
        self.state, self.mpi, self.left = state, mpi, rounds
        self.first = mpi.rank == 0

    @property
    def merges(self):
        return self.state.merges

    @contextmanager
    def exclusive(self):
        if not self.first:
            self.mpi.recv(source=(self.mpi.rank - 1) % self.mpi.size)
        self.first = False
        with self.state.exclusive() as model:
            yield model
        self.left -= 1
        if self.left or self.mpi.rank < self.mpi.size - 1:
            self.mpi.send(None, (self.mpi.rank + 1) % self.mpi.size)


def main(folder):
    torch.set_num_threads(1)
    for entry in json.loads((folder / "runs.json").read_text()):
        run = Run.model_validate(entry["run"])
        with np.load(folder / entry["data"]) as archive:
            x, y = archive["x"], archive["y"]
        dataset = Dataset("given", "regression", y.shape[1], x, y, x[:8], y[:8])
        strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
        clock = WallClock()
        rounds = run.epochs // strategy.every
        states = []
        with named(run.engine).connect(
            Place(MPI.COMM_WORLD, clock, one_node=True)
        ) as comm:

            def shared(initial, host, comm=comm, rounds=rounds, states=states):
                states.append(OneSidedState(comm, initial))
                return InTurn(states[0], MPI.COMM_WORLD, rounds)

            plan = BatchPlan.of(run, run.workers, run.seed, dataset)
            replica = Replica(
                run, dataset, plan, comm, clock, shared=shared, workers_per_node=4
            )
            report = train(replica, strategy)
            final = evaluate(replica, strategy, dataset).final
            for state in states:
                state.close()
        places = MPI.COMM_WORLD.gather(
            sorted(map(int, report.histograms.get("merge_position", {})))
        )
        if MPI.COMM_WORLD.rank == 0:
            np.savez(
                folder / f"{run.run_id}.npz",
                initial=replica.initial.numpy(),
                final=final.numpy(),
                places=places,
            )


main(Path(sys.argv[1]))
gc.freeze()  # or a search at the end looks through all that torch has made
