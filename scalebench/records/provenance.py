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
import subprocess
from collections.abc import Mapping
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
)
ALLOWED_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONHASHSEED",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "PBS_JOBID",
    "LSB_JOBID",
)
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|AUTH", re.IGNORECASE)
_SHORTEST_SECRET = 8  # characters; shorter values are words that stand in any text
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_HOMES = re.compile(r"/(?:home|users|Users)/[^/\s:,]+")


def collect(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What this process runs on and with; the keys that are columns of runs.csv have the same names there.

    What cannot be found out is None. Takes some tenths of a second: git, mpirun and nvidia-smi are asked if present.
    """
    versions = package_versions()
    return {
        "host_hash": _digest(platform.node(), _cpu_model(), str(os.cpu_count())),
        "packages_hash": _digest(*(f"{name}=={version}" for name, version in versions.items())),
        **_git(),
        "scheduler_job_id": next((environment[name] for name in _JOB_IDS if name in environment), None),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "memory_mib": _memory_mib(),
        "gpus": _gpus(),
        "mpi": _output("mpirun", "--version").partition("\n")[0] or None,
        "horovod": _horovod_build(),
        "torch": _torch_build(),
        "environment": allowed_environment(environment),
        "packages": versions,
    }


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change timings, with everything that names a person or opens a door replaced."""
    allowed = {
        name: value
        for name, value in environment.items()
        if (name.startswith(ALLOWED_PREFIXES) or name in ALLOWED_NAMES) and not _SECRET_NAME.search(name)
    }
    return {name: redact(value, environment) for name, value in sorted(allowed.items())}


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version, by name."""
    found = {str(item.metadata["Name"]).lower(): item.version for item in distributions() if item.metadata["Name"]}
    return dict(sorted(found.items()))


def redact(text: str, environment: Mapping[str, str] = os.environ, *, names: bool = True) -> str:
    """`text` without credentials, the values of secret variables, home folders, and `names` of user and host.

    Without `names`, a user who is called as a strategy is does not change records.
    """
    text = _CREDENTIALS.sub("://<credentials>@", text)
    for name, secret in environment.items():
        if len(secret) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(secret, "<secret>")
    for home in {environment.get("HOME", ""), str(Path.home())} - {"", "/"}:
        text = re.sub(rf"{re.escape(home)}(?![A-Za-z0-9])", "~", text)
    text = _HOMES.sub("~", text)
    hidden: dict[str, set[str | None]] = {
        "<user>": {environment.get("USER"), environment.get("LOGNAME"), _user()},
        "<host>": {platform.node()},
    }
    for mask, known in hidden.items() if names else ():
        for name in (item for item in known if item):
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", mask, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in some containers
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _output(*command: str) -> str:
    """What a command prints, nothing if it is missing, fails or takes over ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _git() -> dict[str, str | bool | None]:
    """Commit and state of the checkout that scalebench runs from; None where it was installed as a package."""
    package = Path(__file__).resolve().parents[1]
    at = ("git", "-C", str(package))
    if not _output(*at, "ls-files", "--", "__init__.py"):
        return {"git_commit": None, "git_dirty": None}
    changed = _output(*at, "status", "--porcelain", "--untracked-files=no", "--", str(package))
    return {"git_commit": _output(*at, "rev-parse", "HEAD") or None, "git_dirty": bool(changed)}


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.processor() or "unknown"


def _cpu() -> dict[str, Any]:
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    numa = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "model": _cpu_model(),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "numa_nodes": {node.name: _read(node / "cpulist").strip() for node in numa} or None,
        "governor": governor or None,
    }


def _memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def _gpus() -> list[str] | None:
    query = "--query-gpu=name,driver_version,memory.total"
    return _output("nvidia-smi", query, "--format=csv,noheader").splitlines() or None


def _torch_build() -> dict[str, str] | None:
    """From torch/version.py as text: importing torch would take seconds."""
    text = _read_package_file("torch", "version.py")
    found = re.findall(r"^(__version__|cuda|hip|git_version)\b[^=]*= *'([^']*)'", text, flags=re.MULTILINE)
    return {name.strip("_"): value for name, value in found} or None


def _horovod_build() -> dict[str, Any] | None:
    text = _read_package_file("horovod", "metadata.json")
    try:
        return dict(json.loads(text)) if text else None
    except ValueError:
        return None


def _read_package_file(package: str, name: str) -> str:
    spec = find_spec(package)
    return _read(Path(spec.origin).with_name(name)) if spec is not None and spec.origin else ""


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
