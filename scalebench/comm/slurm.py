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
_HAS_PROCESSES = {
    "RUNNING",
    "SUSPENDED",
    "COMPLETING",
    "CONFIGURING",
    "STOPPED",
    "SIGNALING",
    "RESIZING",
    "STAGE_OUT",
}
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
        done = subprocess.run(
            [srun, "--mpi=list"],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(_PLUGIN.search(done.stdout + done.stderr))


def job_is_ending() -> bool:
    """Return True if the job of this process is ending or has ended, by its state in Slurm; False if unknown."""
    if not in_job():
        return False
    states = _states(os.environ["SLURM_JOB_ID"]) or set()
    return bool(states) and not states & {"RUNNING", "SUSPENDED"}


def this_start() -> tuple[str, int]:
    """Return the job of this process, empty outside of one, and how often Slurm has started it again."""
    return os.environ.get("SLURM_JOB_ID", ""), int(
        os.environ.get("SLURM_RESTART_COUNT", 0)
    )


def has_ended(job: str, restarts: int) -> bool:
    """Return True if the start of `job` that followed on `restarts` others has no processes; False if unknown.

    Slurm starts a job again, or lists it as ended, once its processes have ended or
    their node is down.
    """
    # A job that is this one, and was started again since, has lost the processes of
    # that start.
    here, restarts_here = this_start()
    if job == here:
        return restarts < restarts_here
    states = _states(job, "--states=all")
    return states is not None and not states & _HAS_PROCESSES


def _states(job: str, *options: str) -> set[str] | None:
    """Return the states of a job, or of the tasks of an array, by squeue; empty if Slurm forgot it, None if unknown."""
    squeue = shutil.which("squeue")
    if squeue is None:
        return None
    command = [squeue, "--noheader", "--format=%T", f"--jobs={job}", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # That Slurm has forgotten a job is an answer: it has ended.
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return None
    return set(done.stdout.split())


def cpus_here() -> int:
    """Number of CPUs that Slurm gives the step on this node; its configuration decides whether tasks keep to them."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE", 0)) or (os.cpu_count() or 1)


def slots() -> list[int]:
    """Tasks of each node of the job, `SLURM_TASKS_PER_NODE=2(x3),1` as [2, 2, 2, 1]; empty: not stated."""
    # `2(x3)` stands for three nodes of two tasks.
    found = _SLOTS.findall(os.environ.get("SLURM_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def gpus_per_task() -> int:
    """GPUs that each task of the job gets, `SLURM_GPUS_PER_TASK=a100:1` as 1; 0: not stated, tasks see their node's."""
    found = re.search(r"(\d+)$", os.environ.get("SLURM_GPUS_PER_TASK", ""))
    return int(found[1]) if found else 0
