"""Every rank of a launch: run the listed runs one after the other; rank 0 writes final weights and counts.

The argument is a folder with `runs.json` ([{"run", "workers_per_node", "reference",
"apart"}]) and `data.npz`.
"""

import gc
import json
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

# the checkout, for the tests' own modules
sys.path.insert(0, str(Path(__file__).parents[3]))

from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.comm.server import OneSidedState
from scalebench.data.batch_plan import BatchPlan
from scalebench.data.dataset import Dataset
from scalebench.strategies import registry, replica_state
from scalebench.strategies.ddp import Ddp
from scalebench.study.spec import Run
from scalebench.system.clock import WallClock
from scalebench.system.random_state import seed_generators, worker_seed
from scalebench.training.loop import evaluate, train
from scalebench.training.replica import Replica
from tests.strategies import daso_case

WHOLE = replica_state.LARGE
# bytes: parameters and momentum are more, and travel from where they lie; a buffer of
# five is less
LARGE = 100


class Counted(MPI.Intracomm):
    """Counts the collectives and messages that MPI itself is called for while training time runs, in splits too."""

    def over(self, clock, calls):
        self.clock, self.calls = clock, calls
        return self

    def Split(self, color=0, key=0):
        return Counted(super().Split(color, key)).over(self.clock, self.calls)


def counting(name, place):
    def call(self, *arguments, **named):
        if self.clock.running:
            self.calls[place] += 1
        return getattr(MPI.Intracomm, name)(self, *arguments, **named)

    return call


for name in (
    "Allreduce",
    "Iallreduce",
    "Allgather",
    "Iallgather",
    "Alltoall",
    "Alltoallv",
    "Bcast",
    "Reduce",
):
    setattr(Counted, name, counting(name, 0))
for name in ("Send", "Isend", "Recv"):
    setattr(Counted, name, counting(name, 1))


@contextmanager
def counting_in_torch(clock, calls):
    """Counts the collectives that torch.distributed is called for while training time runs."""
    names = ("all_reduce", "all_gather", "all_to_all_single", "broadcast", "reduce")
    plain = {name: getattr(dist, name) for name in names}

    def counted(name):
        def call(*arguments, **named):
            calls[0] += clock.running
            return plain[name](*arguments, **named)

        return call

    for name in names:
        setattr(dist, name, counted(name))
    yield
    for name in names:
        setattr(dist, name, plain[name])


def set_up_ddp(strategy, worker, plain=Ddp.setup):
    """As it does, but with torch's hook that calls the allreduce of each bucket from Python, where it is counted."""
    plain(strategy, worker)
    if strategy.compression == "none":
        worker.forward.register_comm_hook(None, default_hooks.allreduce_hook)


Ddp.setup = set_up_ddp


def main(folder):
    torch.set_num_threads(1)
    with np.load(folder / "data.npz") as archive:
        blobs = Dataset(
            "blobs",
            "classification",
            3,
            *(archive[key] for key in ("x", "y", "x_test", "y_test")),
        )
    for entry in json.loads((folder / "runs.json").read_text()):
        run = Run.model_validate(entry["run"])
        replica_state.LARGE = LARGE if entry["apart"] else WHOLE
        mpi = MPI.COMM_WORLD.Split(
            0 if MPI.COMM_WORLD.rank < run.workers else MPI.UNDEFINED
        )
        if mpi != MPI.COMM_NULL:
            take_part(run, mpi, entry, blobs, folder)
        wait_asleep()


def wait_asleep():
    """Wait for all ranks without a core, which those that train need."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def take_part(run, mpi, entry, dataset, folder):
    made = Replica
    if entry["reference"]:
        case = daso_case.reference(entry["reference"])
        made, dataset = (
            daso_case.reference_class(case),
            daso_case.stand_in(case["x"], case["y"]),
        )
    strategy = registry.create(run.strategy.name, run.strategy.options, run.engine)
    clock = WallClock()
    seed_generators(worker_seed(run.seed, mpi.rank))
    calls = [0, 0]
    mpi = Counted(mpi).over(clock, calls)
    with (
        named(run.engine).connect(Place(mpi, clock, one_node=True)) as comm,
        counting_in_torch(clock, calls),
    ):
        mesh = strategy.traits.mesh(run.workers)
        plan = BatchPlan.of(run, run.workers, run.seed, dataset, mesh.parts)
        states = []

        def shared(initial, host):
            states.append(OneSidedState(comm, initial, host))
            return states[-1]

        per_node = entry["workers_per_node"]
        replica = made(
            run,
            dataset,
            plan,
            comm,
            clock,
            shared=shared,
            workers_per_node=per_node,
            mesh=mesh,
        )
        report = train(replica, strategy, warm=run.warmup_steps > 0)
        called = mpi.gather(tuple(calls))
        buffers = [
            buffer.double().reshape(-1).numpy() for buffer in replica.model.buffers()
        ]
        of_all = mpi.gather(np.concatenate([np.empty(0), *buffers]))
        verdict = evaluate(replica, strategy, dataset)
        for state in states:
            state.close()
        gathered = mpi.gather((report.syncs, report.bytes_sent))
        recorded = mpi.gather(report.collective_calls)
        losses = mpi.gather(getattr(replica, "epoch_losses", []))
        if mpi.rank == 0:
            np.savez(
                folder / f"{run.run_id}.npz",
                final=verdict.final.numpy(),
                counted=np.array(gathered),
                buffers=np.concatenate(of_all) if mesh.parts > 1 else np.stack(of_all),
                called=np.array([collectives for collectives, _ in called]),
                messages=np.array([messages for _, messages in called]),
                recorded=np.array(
                    [-1 if calls is None else calls for calls in recorded]
                ),
                losses=np.array(losses),
                skips=np.array(getattr(replica.state, "skips", [])),
                metrics=[evaluation.metric for evaluation in verdict.evaluations],
            )


try:
    main(Path(sys.argv[1]))
# the other ranks wait for this one, inside a collective or MPI's end
except BaseException:
    traceback.print_exc()
    MPI.COMM_WORLD.Abort(1)
gc.freeze()  # or a search at the end looks through all that torch has made
