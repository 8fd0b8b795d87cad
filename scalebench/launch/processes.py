"""The command that starts ranks, the environment they start in, and how all of them are brought to an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scalebench.errors import EngineError
from scalebench.launch import engines

_GRACE_S = 5.0  # between asking processes to end and ending them
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_OURS = {*_THREADS, "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"}  # what a run says, not the user's shell


def mpirun_command(
    ranks: int, threads: int = 1, progress_threads: int = 0, *, bind: bool = True
) -> tuple[list[str], str]:
    """The command that starts `ranks` processes, up to the program, and how it binds them, for the records.

    Raises:
        EngineError: there is no mpirun.
    """
    mpirun = engines.find_mpirun()
    if mpirun is None:
        raise EngineError(f"no mpirun beside {sys.executable} or on PATH; add it with: {engines.ADD_MPI}")
    command = [str(mpirun), "-n", str(ranks)]
    here = engines.physical_cores()
    if bind and (ranks * threads <= here or engines.nodes_of_allocation() > 1):
        width = threads + progress_threads if ranks * (threads + progress_threads) <= here else threads
        if width == 1:
            return [*command, "--map-by", "core", "--bind-to", "core"], "core"
        return [*command, "--map-by", f"slot:PE={width}", "--bind-to", "core"], f"core:{width}"
    return [*command, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"], "none"


def environment(threads: int, *, oversubscribed: bool = False) -> dict[str, str]:
    """This process's environment, with what ranks need: threads, and Open MPI's leave to run as root."""
    additions = {
        **dict.fromkeys(_THREADS, str(threads)),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    if oversubscribed:
        additions["OMPI_MCA_mpi_yield_when_idle"] = "1"  # a spinning rank would keep the others from computing
    if engines.nodes_of_allocation() == 1:
        additions["OMPI_MCA_osc"] = "^ucx"  # it complains where there is no such network
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return additions | kept


def stop(process: subprocess.Popen[bytes], ranks: Sequence[int]) -> None:
    """End mpirun, which ends its ranks; then whatever is left of both."""
    if process.poll() is not None and process.returncode == 0:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in ranks:
        if _is_rank(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _is_rank(pid: int) -> bool:
    """Whether `pid` is still a process of ours: its number may have been given to another."""
    try:
        return b"scalebench.native" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
