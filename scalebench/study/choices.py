"""Names that studies, rows of results and commands choose from; nothing is imported to know them."""

from __future__ import annotations

from typing import Final, Literal, get_args

# native engines; each is a file of comm/engines
EngineName = Literal["mpi", "horovod", "gloo", "nccl", "tasks"]
Backend = Literal["processes", "dask", "ray"]  # where tasks are computed
BACKENDS: tuple[Backend, ...] = get_args(Backend)
# whose collectives wait for the system to wake their threads
SCHEDULED: tuple[EngineName, ...] = ("gloo",)
VIRTUAL = "virtual"  # engine of executions whose time is a price
# all but auto: comm/launchers
LauncherName = Literal["auto", "local", "mpirun", "srun", "torchrun", "horovodrun"]
# each is a file of batch/schedulers; the first that is found here is taken
SchedulerName = Literal["slurm", "pbs", "lsf"]
Allreduce = Literal[
    "auto",  # of an MPI library
    "ring",
    "recursive_doubling",
    "recursive_halving",
    "rabenseifner",
    "binomial",
    "tree",
    "hierarchical",
    "server",
    "sharded_server",
    "flexible_server",
    "nccl",
]
NCCL: Final = "nccl"  # the algorithm that NCCL chooses
Caption = Literal["none", "below", "file"]  # where that of a figure is written
CAPTIONS: tuple[Caption, ...] = get_args(Caption)
FIGURE_FORMATS = ("pdf", "svg", "png")
FIGURE_STYLES = ("ieee", "acm", "springer", "slides", "report")
Execution = Literal["native", "paced", "virtual", "modelled"]
# strategies: the base of speedups, that of savings on a strategy's own engine, libraries'
SERIAL, ALLREDUCE, HOROVOD, DDP = "serial", "allreduce", "horovod", "ddp"
# whose libraries have engines of their own: a saving against them has two parts
LIBRARY_BASELINES = (
    HOROVOD,
    DDP,
)
# strategies that average all gradients, with which others are compared
BASELINES = (
    ALLREDUCE,
    *LIBRARY_BASELINES,
)
# in the order of tables
PER_BATCH = (SERIAL, *BASELINES)
# statuses after which a trial is not repeated
RESULTS_OF_A_TRIAL = (
    "completed",
    "diverged",
    "timeout",
)


def baselines_of(strategy: str) -> tuple[str, ...]:
    """Return the strategies with which another is compared: the base of its speedup, then those of its savings.

    `allreduce` is compared on the strategy's own engine; by the libraries an engine of
    their own is saved, too, so that they are compared with `serial` alone. `serial` is
    the base of its own speedup, 1.
    """
    if strategy == ALLREDUCE:
        return (SERIAL, *LIBRARY_BASELINES)
    return (SERIAL,) if strategy in PER_BATCH else PER_BATCH
