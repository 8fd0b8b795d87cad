"""Slurm: the job of this process and what it has, and srun, which starts ranks on its nodes, by PMIx or without MPI."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache

from scalebench.comm.launchers import base

# Slurm's clients wait for a controller that does not answer: each call has a limit.
_LIMIT_S = 30.0  # of srun
_ANSWER_S = 10.0  # of squeue, which is asked while a study runs
_PLUGIN = re.compile(r"\bpmix(?:_v\d+)?\b")
# States of a job whose processes may still write.
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
_TASK = re.compile(
    r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (Exited|[A-Z][a-z ]+)", re.MULTILINE
)
# Options of the batch script that srun would take over from its environment.
_OWN = re.compile(
    r"SLURM_(NTASKS_PER_NODE|CPUS_PER_TASK|CPU_BIND\w*|DISTRIBUTION|EXPORT_ENV|MPI_TYPE|OVERCOMMIT)"
)


class SlurmJob(base.OwnJob):
    """What Slurm's variables and squeue say of the job of this process, and of others."""

    def slots(self) -> list[int]:
        """Return the tasks of each node, `SLURM_TASKS_PER_NODE=2(x3),1` as [2, 2, 2, 1]."""
        # `2(x3)` stands for three nodes of two tasks.
        found = _SLOTS.findall(os.environ.get("SLURM_TASKS_PER_NODE", ""))
        return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]

    def is_ending(self) -> bool:
        """Return True if the job is ending or has ended, by its state; False if unknown."""
        if not in_job():
            return False
        # Of an array all tasks are listed: one that runs may be this one.
        states = _states(os.environ["SLURM_JOB_ID"]) or set()
        return bool(states) and not states & {"RUNNING", "SUSPENDED"}

    def start(self) -> tuple[str, int]:
        """Return the job's number, empty outside of one, and how often Slurm has started it again."""
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        return os.environ.get("SLURM_JOB_ID", ""), restarts

    def has_ended(self, job: str, restarts: int) -> bool:
        """Return True if that start of `job` has no processes; False if unknown.

        Slurm starts a job again, or lists it as ended, once its processes have ended or
        their node is down.
        """
        # A job that is this one, and was started again since, has lost the processes of
        # that start.
        here, restarts_here = self.start()
        if job == here:
            return restarts < restarts_here
        states = _states(job, "--states=all")
        return states is not None and not states & _HAS_PROCESSES


class Srun(base.Launcher):
    """Starts ranks inside a job of Slurm; those of an MPI where Slurm has PMIx."""

    name = "srun"
    job = SlurmJob()
    names_hosts = True
    binds_surely = False

    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None inside a job, of a Slurm with PMIx if MPI's ranks are to be started."""
        if here and not in_job():
            return "srun starts ranks inside a job only; submit the study with sbatch, or use --launcher mpirun"
        if shutil.which("srun") is None:
            return "no srun on PATH; use --launcher mpirun"
        if by_mpi and not has_pmix():
            return (
                "Slurm here has no PMIx (`srun --mpi=list`), by which srun starts MPI's ranks; "
                "use --engine gloo, which needs none, or --launcher mpirun"
            )
        return None

    def command(self, placement: base.Placement) -> list[str]:
        """Return srun with the node of each rank, in their order."""
        cpus = placement.width * placement.cpus_per_core
        binding = (
            [f"--cpus-per-task={cpus}", "--cpu-bind=cores"]
            if cpus
            else ["--overcommit", "--cpu-bind=none"]
        )
        return [
            "srun",
            f"--mpi={'pmix' if placement.by_mpi else 'none'}",
            "--overlap",
            "--kill-on-bad-exit=1",
            "--export=ALL",
            *binding,
            f"--ntasks={placement.ranks}",
            "--distribution=arbitrary",
            f"--nodelist={','.join(placement.hosts)}",
        ]

    def serves(self) -> str:
        if has_pmix():
            return "with PMIx: all engines"
        return "without PMIx: gloo and nccl only, no mpi, no horovod"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` without the batch script's options that contradict those of the command."""
        return {
            name: value for name, value in variables.items() if not _OWN.fullmatch(name)
        }

    def on_each_host(self) -> tuple[str, ...]:
        """Return srun with one task on each node of the job, free to use all its cores."""
        if not in_job():
            return ()
        count = (
            os.environ.get("SLURM_JOB_NUM_NODES")
            or os.environ.get("SLURM_NNODES")
            or "1"
        )
        return (
            "srun",
            "--mpi=none",
            "--overlap",
            "--export=ALL",
            "--overcommit",
            "--cpu-bind=none",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
        )

    def gpus_per_task(self) -> int:
        """Return the GPUs of each task, `SLURM_GPUS_PER_TASK=a100:1` as 1; 0: not stated, tasks see their node's."""
        found = re.search(r"(\d+)$", os.environ.get("SLURM_GPUS_PER_TASK", ""))
        return int(found[1]) if found else 0

    def host_facts(self) -> base.HostFacts:
        """Return the number of the task, Slurm's name of the node, and the CPUs that the step has on it."""
        number = os.environ.get("SLURM_PROCID") or "0"
        return base.HostFacts(number, os.environ.get("SLURMD_NODENAME"), cpus_here())

    def rank(self) -> int:
        return int(os.environ["SLURM_PROCID"])

    def is_on_one_node(self) -> bool:
        return os.environ.get("SLURM_STEP_NUM_NODES") == "1"

    def reported_ends(self, output: str) -> Iterator[base.ReportedEnd]:
        """Yield the first task that srun names: `srun: error: n1: task 3: Killed`."""
        task = _TASK.search(output)
        if task is None:
            return
        ended = task[2].strip()
        number = next(
            (each.value for each in signal.Signals if signal.strsignal(each) == ended),
            None,
        )
        yield base.ReportedEnd(int(task[1]), number)


LAUNCHER = Srun()


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
