"""Names that studies, rows of results and commands choose from; nothing is imported to know them."""

from __future__ import annotations

from typing import Literal

ChargedEngine = Literal["mpi", "horovod", "gloo", "nccl"]  # native engines with ranks, whose collectives have costs
EngineName = Literal[ChargedEngine, "tasks"]  # each is a file of comm/engines
VIRTUAL = "virtual"  # engine of executions whose time is a price
LauncherName = Literal["auto", "local", "mpirun", "srun", "torchrun", "horovodrun"]  # all but auto: comm/launchers
Execution = Literal["native", "paced", "virtual", "modelled"]
LIBRARY_BASELINES = ("horovod", "ddp")  # whose libraries have engines of their own: a saving against them has two parts
BASELINES = ("allreduce", *LIBRARY_BASELINES)  # strategies that average all gradients, with which others are compared
PER_BATCH = ("serial", *BASELINES)
