"""Runs under a launcher: each engine joins the ranks for two runs, one after the other.

Rank 0 prints a JSON line of what the ranks saw, by engine.
"""

import gc
import json
import sys

import torch
from mpi4py import MPI

from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.system.clock import WallClock

WORLD = MPI.COMM_WORLD
torch.set_num_threads(1)


def joined(engine):
    device = torch.device("cuda", WORLD.rank) if engine.on_gpus else torch.device("cpu")
    if engine.on_gpus:
        torch.cuda.set_device(device)
    with engine.connect(Place(WORLD, WallClock(), one_node=True)) as comm:
        mean = torch.full((5,), float(comm.rank), device=device)
        comm.allreduce_(mean, "mean")
        return {
            "engine": comm.engine,
            "rank": comm.rank,
            "size": comm.size,
            "mean": mean.tolist(),
        }


seen = {name: [joined(named(name)) for _ in range(2)] for name in sys.argv[1:]}
of_ranks = WORLD.gather(seen)
if of_ranks is not None:
    by_engine = {name: [each[name] for each in of_ranks] for name in seen}
    print(json.dumps(by_engine), flush=True)
gc.freeze()  # or a search at the end looks through all that torch has made
