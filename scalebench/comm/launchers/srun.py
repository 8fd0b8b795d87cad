"""srun, of Slurm: starts ranks on the nodes of a job, joined by PMIx or by no MPI."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping

from scalebench.comm import slurm
from scalebench.comm.launchers.base import HostFacts, Launcher, Placement, ReportedEnd

_TASK = re.compile(
    r"^srun: error: \S+: tasks? (\d+)[\d,-]*: (Exited|[A-Z][a-z ]+)", re.MULTILINE
)
_OWN = re.compile(
    r"SLURM_(NTASKS_PER_NODE|CPUS_PER_TASK|CPU_BIND\w*|DISTRIBUTION|EXPORT_ENV|MPI_TYPE|OVERCOMMIT)"
)


class Srun(Launcher):
    """Starts ranks inside a job of Slurm; those of an MPI where Slurm has PMIx."""

    name = "srun"
    names_hosts = True
    binds_surely = False
    gpus_of_task = True

    def lacks(self, *, by_mpi: bool, here: bool = True) -> str | None:
        """Return None inside a job, of a Slurm with PMIx if MPI's ranks are to be started."""
        if here and not slurm.in_job():
            return "srun starts ranks inside a job only; submit the study with sbatch, or use --launcher mpirun"
        if shutil.which("srun") is None:
            return "no srun on PATH; use --launcher mpirun"
        if by_mpi and not slurm.has_pmix():
            return (
                "Slurm here has no PMIx (`srun --mpi=list`), by which srun starts MPI's ranks; "
                "use --engine gloo, which needs none, or --launcher mpirun"
            )
        return None

    def command(self, placement: Placement) -> list[str]:
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
        if slurm.has_pmix():
            return "with PMIx: all engines"
        return "without PMIx: gloo and nccl only, no mpi, no horovod"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return `variables` without the batch script's options that contradict those of the command."""
        return {
            name: value for name, value in variables.items() if not _OWN.fullmatch(name)
        }

    def on_each_host(self) -> tuple[str, ...]:
        """Return srun with one task on each node of the job, free to use all its cores."""
        if not slurm.in_job():
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

    def host_facts(self) -> HostFacts:
        """Return the number of the task, Slurm's name of the node, and the CPUs that the step has on it."""
        number = os.environ.get("SLURM_PROCID") or "0"
        return HostFacts(number, os.environ.get("SLURMD_NODENAME"), slurm.cpus_here())

    def rank(self) -> int:
        return int(os.environ["SLURM_PROCID"])

    def is_on_one_node(self) -> bool:
        return os.environ.get("SLURM_STEP_NUM_NODES") == "1"

    def reported_ends(self, output: str) -> Iterator[ReportedEnd]:
        """Yield the first task that srun names: `srun: error: n1: task 3: Killed`."""
        task = _TASK.search(output)
        if task is None:
            return
        ended = task[2].strip()
        number = next(
            (each.value for each in signal.Signals if signal.strsignal(each) == ended),
            None,
        )
        yield ReportedEnd(int(task[1]), number)
