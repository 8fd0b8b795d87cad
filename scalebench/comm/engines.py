"""The native engines: the capabilities of each, whether it is installed, and how many cores its processes use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from scalebench.comm.base import Capability
from scalebench.comm.launchers.choice import chosen
from scalebench.comm.mpi_match import ADD_MPI
from scalebench.errors import EngineError, nearest
from scalebench.system.cores import cores_with_threads

ADD_HOROVOD = "scalebench install horovod"

_OF_ALL = frozenset({Capability.BATCHES, Capability.COLLECTIVES, Capability.NONBLOCKING})
_OF_GROUPS = _OF_ALL | {Capability.SPLIT, Capability.POINT_TO_POINT}
_PROVIDES: dict[str, frozenset[Capability]] = {
    "mpi": _OF_GROUPS | {Capability.ADASUM, Capability.SHARED_STATE, Capability.SERVER},
    "horovod": _OF_ALL | {Capability.HOROVOD_OPTIMIZER},
    "gloo": _OF_GROUPS | {Capability.PROCESS_GROUP},
    "nccl": _OF_GROUPS | {Capability.PROCESS_GROUP},
    "tasks": frozenset({Capability.COLLECTIVES, Capability.SHARED_STATE}),
}
NAMES = tuple(_PROVIDES)
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # as CUDA_VISIBLE_DEVICES names one
PROGRESS_THREADS = {"mpi": 0, "horovod": 1, "gloo": 1, "nccl": 1, "tasks": 0}  # that move bytes beside compute
TASKS = "tasks"  # has no ranks: blocks of steps go to what `BACKENDS` names, with the package that each needs
BACKENDS = {"processes": ("", ""), "dask": ("distributed", "scalebench[tasks]"), "ray": ("ray", "ray")}


def provides(engine: str) -> frozenset[Capability]:
    """The capabilities of `engine`.

    Raises:
        EngineError: no native engine has this name.
    """
    if engine not in _PROVIDES:
        raise EngineError(f"unknown engine {engine!r}; {nearest(engine, _PROVIDES)}")
    return _PROVIDES[engine]


def carries(engine: str, dtype: str) -> bool:
    """Return True if `engine` moves tensors of `dtype`; Horovod has no bfloat16 for torch."""
    provides(engine)
    return not (engine == "horovod" and dtype == "bfloat16")


def backend_lacks(backend: str) -> str | None:
    """Return None if `backend`, which computes tasks, is installed, else the command that adds it."""
    package, install = BACKENDS[backend]
    if not package or find_spec(package) is not None:
        return None
    return f'{package} is not installed; add it with: pip install "{install}"'


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def physical_cores() -> int:
    """Number of cores without hardware threads, to which processes can be bound."""
    return len(cores_with_threads())


def gpus() -> int:
    """Number of NVIDIA GPUs this process may use: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:  # CUDA reads up to the first invalid name
        return len(list(takewhile(_GPU.fullmatch, (each.strip() for each in given.split(",")))))
    listed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return listed or len(list(Path("/dev").glob("nvidia[0-9]*")))


def busy_threads(engine: str, workers: int, threads_per_worker: int = 1) -> int:
    """Number of cores that one of `workers` keeps busy: compute and progress threads. A lone worker moves no bytes.

    Workers of nccl compute on GPUs, one each: more workers than GPUs are refused, not oversubscribed.
    """
    if engine == "nccl":
        return 0
    return threads_per_worker + (PROGRESS_THREADS[engine] if workers > 1 else 0)


def needs_mpi(engine: str) -> bool:
    """Return True if an MPI joins the ranks of `engine`, whoever starts them."""
    return engine in ("mpi", "horovod")


def starts_by_mpi(engine_names: Iterable[str]) -> bool:
    """Return True if the ranks of these engines are started as an MPI's; some launchers start others without."""
    return not chosen().without_mpi or any(map(needs_mpi, engine_names))


def available(engine: str, *, here: bool = True) -> str | None:
    """Return None if `engine` can be launched, else the reason and the command that adds it; imports little.

    `here` is this machine, with its GPUs and its job; otherwise a job still to be submitted with this installation.
    """
    provides(engine)
    if engine == TASKS:
        return None if _folder_of("torch") is not None else "torch is not installed; add it with: pip install torch"
    if reason := chosen().lacks(by_mpi=starts_by_mpi([engine]), here=here):
        return reason
    if starts_by_mpi([engine]) and find_spec("mpi4py") is None:
        return f"mpi4py is not installed; add it with: {ADD_MPI}"
    torch = _folder_of("torch")
    if torch is None:
        return "torch is not installed; add it with: pip install torch"
    if engine == "horovod":
        horovod = _folder_of("horovod")
        if horovod is None or not any((horovod / "torch").glob("mpi_lib_v2*.so")):
            return f"Horovod is not built for torch; add it with: {ADD_HOROVOD}"
    if engine == "nccl":
        if not any((torch / "lib").glob("libtorch_cuda*")):
            return "this torch has no CUDA; install one of https://pytorch.org/get-started/locally that has"
        if not here:
            return None
        driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
        if not driver or not gpus():
            return "no NVIDIA GPU here; use --engine gloo, or run where there is one"
    return None


def require(engine: str) -> None:
    """Check that `engine` is installed.

    Raises:
        EngineError: it is unknown or missing; the message ends with the command that adds it.
    """
    reason = available(engine)
    if reason is not None:
        raise EngineError(f"engine {engine} is not available: {reason}")


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
