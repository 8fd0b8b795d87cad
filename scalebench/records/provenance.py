"""Where and with what a study ran, without saying who ran it.

Nothing is recorded that names a person: host names are hashed, environment variables come from an allow-list, and home
folders, user names and credentials inside their values are replaced.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalebench.records import builds, machine
from scalebench.records.credentials import MASK, SHORTEST_WORD, SWITCHES, is_private, is_secret, mask, mask_assigned

ALLOWED_PREFIXES = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "OMPI_MCA_",
    "HOROVOD_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "TORCH_NCCL_",
    "I_MPI_",
    "MPICH_",
    "MV2_",
    "FI_",
    "PSM2_",
    "RCCL_",
    "GOMP_",
    "MALLOC_",
)
ALLOWED_NAMES = (
    "ATEN_CPU_CAPABILITY",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "ROCR_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "SCALEBENCH_IMAGE",
    "SCALEBENCH_IMAGE_DIGEST",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_CLUSTER_NAME",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_HINT",
    "SLURM_MEM_BIND",
    "SLURM_TASKS_PER_NODE",
    "SLURM_THREADS_PER_CORE",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "PBS_JOBID",
    "PBS_NCPUS",
    "PBS_NUM_NODES",
    "PBS_NUM_PPN",
    "PBS_QUEUE",
    "LSB_DJOB_NUMPROC",
    "LSB_JOBID",
    "LSB_QUEUE",
)
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_SHORTEST_SECRET = 8  # characters; shorter values are words that stand in any text
_FROM_ENVIRONMENT = ("modules", "container")  # facts that are values of variables
_HOMES = re.compile(r"/(?:home|users|Users)/[^/\s:,]+")


def collect(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What this process runs on and with; the keys that are columns of runs.csv have the same names there.

    What cannot be found out is None. Takes some tenths of a second, more where torch is not imported yet: git,
    mpirun, ompi_info and nvidia-smi are asked if present.
    """
    versions = builds.package_versions()
    facts = {
        **describe_node(environment),
        "packages_hash": _digest(*(f"{name}=={version}" for name, version in versions.items())),
        **builds.git(),
        "scheduler_job_id": next((environment[name] for name in JOB_IDS if name in environment), None),
        "python": platform.python_version(),
        "container": machine.container(environment),
        "mpi": builds.mpi(),
        "mpi_build": builds.mpi_build(),
        "horovod": builds.horovod(),
        "torch": builds.torch(),
        "modules": builds.modules(environment),
        "packages": versions,
    }
    facts = {name: _redacted(value, environment, short=name in _FROM_ENVIRONMENT) for name, value in facts.items()}
    return facts | {"environment": allowed_environment(environment)}


def describe_node(environment: Mapping[str, str] = os.environ, pid: int = 0) -> dict[str, Any]:
    """What differs from node to node: processor, memory, GPUs, network, kernel, and the hash that stands for its name.

    Its usable cores are those of the process `pid`, by default this one.
    """
    facts = {
        "host_hash": host_hash(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": machine.cpu(pid=pid),
        "memory_mib": machine.memory_mib(),
        "gpus": machine.gpus(),
        "network": machine.network(),
    }
    return {name: _redacted(value, environment) for name, value in facts.items()}


def host_hash() -> str:
    """Tells this node from others without naming it."""
    return _digest(platform.node(), machine.cpu_model(), str(os.cpu_count()))


def as_json(facts: Mapping[str, Any]) -> str:
    """The content of the file in provenance/."""
    return json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"


def name_of(facts: Mapping[str, Any]) -> str:
    """The name of that file, without .json: the hash of what it holds, which rows know it by."""
    return hashlib.sha256(as_json(facts).encode()).hexdigest()[:12]


def _redacted(value: Any, environment: Mapping[str, str], *, short: bool = False) -> Any:
    """`value` with every text in it redacted, but for names: a user may be called as a package is."""
    if isinstance(value, dict):
        return {key: _redacted(item, environment, short=short) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, environment, short=short) for item in value]
    return redact(value, environment, names=False, short=short) if isinstance(value, str) else value


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change timings, with everything that names a person or opens a door replaced."""
    allowed = {
        name: value
        for name, value in environment.items()
        if (name.startswith(ALLOWED_PREFIXES) or name in ALLOWED_NAMES) and not is_private(name)
    }
    return {name: redact(value, environment, short=True) for name, value in sorted(allowed.items())}


def redact(text: str, environment: Mapping[str, str] = os.environ, *, names: bool = True, short: bool = False) -> str:
    """`text` without credentials, the values of secret variables, home folders, and `names` of user and host.

    Without `names`, a user who is called as a strategy is does not change records: only folders called as the user are
    hidden. With `short`, for what comes from the environment itself, secrets of three to seven characters go too where
    they stand as words of their own, and what is assigned to a secret name: in other texts these are words like any.
    """
    for name, secret in environment.items():
        if len(secret) >= _SHORTEST_SECRET and is_secret(name):
            text = text.replace(secret, MASK)
        elif short and len(secret) >= SHORTEST_WORD and secret.lower() not in SWITCHES and is_secret(name):
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", MASK, text)
    text = mask_assigned(mask(text)) if short else mask(text)
    for home in {environment.get("HOME", ""), str(Path.home())} - {"", "/"}:
        text = re.sub(rf"{re.escape(home)}(?![A-Za-z0-9])", "~", text)
    text = _HOMES.sub("~", text)
    hidden: dict[str, set[str | None]] = {
        "<user>": {environment.get("USER"), environment.get("LOGNAME"), _user()},
        "<host>": {platform.node()},
    }
    for shown, known in hidden.items():
        for name in (item for item in known if item):
            if names:
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", shown, text)
            elif shown == "<user>":
                text = re.sub(rf"(?<=/){re.escape(name)}(?=/)", shown, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in some containers
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
