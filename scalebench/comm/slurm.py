"""Slurm: its job, if this process is in one, what the job has, and whether it knows PMIx, which MPI needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache

_LIMIT_S = 30.0
_ANSWER_S = 10.0
_PLUGIN = re.compile(r"\bpmix(?:_v\d+)?\b")
_SLOTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def in_job() -> bool:
    """Return True inside a job of Slurm."""
    return bool(os.environ.get("SLURM_JOB_ID"))


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
