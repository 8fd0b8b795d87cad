"""Slurm as the launcher of ranks: its jobs, PMIx, which MPI needs, and the commands of `srun`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache

_LIMIT_S = 30.0
_ANSWER_S = 10.0
_PLUGIN = re.compile(r"\bpmix(?:_v\d+)?\b")
_OWN = re.compile(r"SLURM_(NTASKS_PER_NODE|CPUS_PER_TASK|CPU_BIND\w*|DISTRIBUTION|EXPORT_ENV|MPI_TYPE|OVERCOMMIT)")
_SLOTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def in_job() -> bool:
    """Return True inside a job of Slurm."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def lacks(engine: str, *, here: bool = True) -> str | None:
    """Return None if srun can start the ranks of `engine`, else the reason; in this job, unless it is not `here`."""
    if here and not in_job():
        return "srun starts ranks inside a job only; submit the study with sbatch, or use --launcher mpirun"
    if shutil.which("srun") is None:
        return "no srun on PATH; use --launcher mpirun"
    if engine in ("mpi", "horovod") and not has_pmix():
        return (
            "Slurm here has no PMIx (`srun --mpi=list`), by which srun starts MPI's ranks; "
            "use --engine gloo, which needs none, or --launcher mpirun"
        )
    return None


def has_pmix() -> bool:
    """Return True if `srun --mpi=list` names PMIx."""
    path = shutil.which("srun")
    return path is not None and _names_pmix(path, os.environ.get("SLURM_CONF", ""))


@cache
def _names_pmix(srun: str, _: str) -> bool:
    try:
        done = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(_PLUGIN.search(done.stdout + done.stderr))


def job_is_ending() -> bool:
    """Return True if the job of this process is ending or has ended, by its state in Slurm; False if unknown."""
    squeue = shutil.which("squeue")
    if not in_job() or squeue is None:
        return False
    command = [squeue, "--noheader", "--format=%T", f"--jobs={os.environ['SLURM_JOB_ID']}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    states = done.stdout.split()
    return bool(states) and not set(states) & {"RUNNING", "SUSPENDED"}


def srun_command(nodes: Sequence[str], *, cpus: int = 0, mpi: bool = False) -> list[str]:
    """Command, up to the program, that starts a process on each of `nodes`, in this order; names may repeat.

    Each is bound to `cpus` cores of its own, if any; `mpi`: they are joined by PMIx.
    """
    binding = [f"--cpus-per-task={cpus}", "--cpu-bind=cores"] if cpus else ["--overcommit", "--cpu-bind=none"]
    return [
        "srun", f"--mpi={'pmix' if mpi else 'none'}", "--overlap", "--kill-on-bad-exit=1", "--export=ALL", *binding,
        f"--ntasks={len(nodes)}", "--distribution=arbitrary", f"--nodelist={','.join(nodes)}",
    ]  # fmt: skip


def one_on_each_node() -> list[str]:
    """Command, up to the program, that starts a process on each node of the job, free to use all its cores."""
    count = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or "1"
    return [
        "srun", "--mpi=none", "--overlap", "--export=ALL", "--overcommit", "--cpu-bind=none",
        f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
    ]  # fmt: skip


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment without variables of the batch script's options that contradict the command's own."""
    return {name: value for name, value in variables.items() if not _OWN.fullmatch(name)}


def cpus_here() -> int:
    """Number of CPUs that Slurm gives the step on this node; its configuration decides whether tasks keep to them."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE", 0)) or (os.cpu_count() or 1)


def slots() -> list[int]:
    """Tasks of each node of the job, `SLURM_TASKS_PER_NODE=2(x3),1` as [2, 2, 2, 1]; empty: not stated."""
    found = _SLOTS.findall(os.environ.get("SLURM_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def gpus_per_task() -> int:
    """GPUs that each task of the job gets, `SLURM_GPUS_PER_TASK=a100:1` as 1; 0: not stated, tasks see their node's."""
    found = re.search(r"(\d+)$", os.environ.get("SLURM_GPUS_PER_TASK", ""))
    return int(found[1]) if found else 0
