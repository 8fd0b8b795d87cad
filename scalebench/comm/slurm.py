"""Slurm as the launcher of ranks: whether this is one of its jobs, and whether `srun` has PMIx, which MPI needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache

_LIMIT_S = 30.0
_PLUGIN = re.compile(r"\bpmix(?:_v\d+)?\b")


def in_job() -> bool:
    """Return True inside a job of Slurm."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def lacks(engine: str) -> str | None:
    """Return None if srun can start the ranks of `engine` here, else the reason."""
    if not in_job():
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
