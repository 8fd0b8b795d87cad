"""Runs under a launcher: an engine joins the ranks for two runs, one after the other. Rank 0 prints a JSON line."""

import json
import sys

import torch
from mpi4py import MPI

from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.system.clock import WallClock

WORLD = MPI.COMM_WORLD
torch.set_num_threads(1)
engine = named(sys.argv[1])
device = torch.device("cuda", WORLD.rank) if engine.on_gpus else torch.device("cpu")
if engine.on_gpus:
    torch.cuda.set_device(device)
runs = []
for _ in range(2):
    with engine.connect(Place(WORLD, WallClock(), one_node=True)) as comm:
        mean = torch.full((5,), float(comm.rank), device=device)
        comm.allreduce_(mean, "mean")
        runs.append(
            {
                "engine": comm.engine,
                "rank": comm.rank,
                "size": comm.size,
                "mean": mean.tolist(),
            }
        )
told = WORLD.gather(runs)
if told is not None:
    print(json.dumps(told), flush=True)
