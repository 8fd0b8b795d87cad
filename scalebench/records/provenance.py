"""Environment of a study, without personal data.

Host names are hashed, environment variables come from an allow-list, and home folders,
user names and credentials inside their values are replaced: credentials by variable
name, by shape, and by the name assigned inside a text.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from scalebench.errors import writing
from scalebench.records import machine_facts
from scalebench.records.folder import PROVENANCE
from scalebench.system.file_access import write_atomic
from scalebench.system.hardware import memory_mib

# Variables that change timings: threads, communication libraries, allocators.
TIMING = (
    r"(OMP|MKL|OPENBLAS|KMP|GOMP|HOROVOD|GLOO|NCCL|RCCL|UCX|FI|PSM2|MALLOC)_\w+"
    r"|LD_PRELOAD|CUBLAS_WORKSPACE_CONFIG|ATEN_CPU_CAPABILITY"
)
# named one by one: what is not known to change timings may be private
_ALLOWED = re.compile(
    rf"""{TIMING} | (OMPI_MCA|TORCH_NCCL|I_MPI|MPICH|MV2)_\w+ | PYTHONHASHSEED | SCALEBENCH_IMAGE(_DIGEST)?
    | CUDA_(DEVICE_ORDER|LAUNCH_BLOCKING|VISIBLE_DEVICES) | (HIP|ROCR)_VISIBLE_DEVICES
    | SLURM_(JOB_ID|JOB_NUM_NODES|JOB_PARTITION|CLUSTER_NAME|GPUS_ON_NODE|GPUS_PER_NODE|GPUS_PER_TASK|GPU_BIND)
    | SLURM_(HINT|MEM_BIND|CPU_BIND|TASKS_PER_NODE|THREADS_PER_CORE|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK)
    | SLURM_DISTRIBUTION | PBS_(JOBID|NCPUS|NUM_NODES|NUM_PPN|QUEUE) | LSB_(DJOB_NUMPROC|JOBID|QUEUE)""",
    re.VERBOSE,
)
JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_SHORTEST_SECRET = 8  # characters; shorter values occur in ordinary text
_FROM_ENVIRONMENT = ("modules", "container")  # facts taken from environment variables
# homes of others stand in paths of shared installations
_HOMES = r"/(?:home|users|Users)/[^/\s:,]+"
_MASK = "<secret>"
# not secrets under any name
_SWITCHES = (
    "true",
    "false",
    "yes",
    "none",
    "off",
    "auto",
    "null",
)
# characters of a secret among the environment's own values; shorter ones are switches
# and counts
_SHORTEST_WORD = 3

_NAME = re.compile(
    r"TOKEN|SECRET|PASS(?!IVE|ES)|CREDENTIAL|PRIVATE|API_?KEY|ACC(?:ESS|OUNT)_?KEY|AUTH|JWT|BEARER|COOKIE"
    r"|_(?:KEY|PWD|PAT|SAS)(?:_|$)",
    re.IGNORECASE,
)
# GDMSESSION=ubuntu is harmless
_SESSION = re.compile(r"SESSION(?:_?ID)?$", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"://(?:[^/@\s]+@)+")
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      gh[opsur]_[A-Za-z0-9]{8,} | github_pat_\w{8,} | glpat-[\w-]{8,}     # GitHub, GitLab
    | hf_(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{8,}|[A-Za-z]{20,})                 # Hugging Face
    | xox[a-z]-[\w-]{8,} | sk-[\w-]{20,} | AIza[\w-]{20,}                 # Slack, OpenAI and alike, Google
    | (?:AKIA|ASIA)[A-Z0-9]{8,} | (?:npm|dckr_pat)_[\w-]{20,} | pypi-[\w-]{20,}
    | eyJ[\w-]{8,}(?:\.[\w-]*){0,4}                                       # JSON web tokens: base64 of {"
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_BEARER = re.compile(
    r"\b(bearer\s+)(?=[\w.~+/-]*[\d.~+/=_-])[\w.~+/-]{8,}=*", re.IGNORECASE
)
_VALUE = r"""(?P<value>"[^"]*"|'[^']*'|[^\s,;&"'<>()\[\]{}]+)"""
_QUERY = re.compile(rf"(?P<before>[?&](?P<name>[\w.-]+)=){_VALUE}")
_ASSIGNED = re.compile(
    rf"""(?P<before>(?:(?P<name>[A-Za-z_][\w.-]*)(?:["']?\s*=\s*|["']\s*:\s*|:\s+)|--?(?P<option>[A-Za-z][\w-]*)\s+)){_VALUE}"""
)


def in_job(environment: Mapping[str, str]) -> bool:
    """Return True inside a job of a scheduler."""
    return any(environment.get(name) for name in JOB_IDS)


def collect(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return hardware and software of this process; keys that are columns of runs.csv have their names.

    Unavailable facts are None. Takes some tenths of a second, more if torch is not
    imported yet: runs git, mpirun, ompi_info and nvidia-smi if present. What is
    installed is read again only after an installation.
    """
    installed = _installed(sys.executable, os.environ.get("PATH"), _package_folders())
    versions = installed["packages"]
    facts = {
        **describe_node(environment),
        "packages_hash": _digest(
            *(f"{name}=={version}" for name, version in versions.items())
        ),
        **machine_facts.git(),
        "scheduler_job_id": next(
            (environment[name] for name in JOB_IDS if name in environment), None
        ),
        "python": platform.python_version(),
        "container": machine_facts.container(environment),
        **installed,
        "torch": machine_facts.torch(),
        "modules": machine_facts.modules(environment),
    }
    hide = redactor(environment, names=False)
    hide_short = redactor(environment, names=False, short=True)
    facts = {
        name: _redacted(value, hide_short if name in _FROM_ENVIRONMENT else hide)
        for name, value in facts.items()
    }
    return facts | {"environment": allowed_environment(environment)}


@cache
def _installed(
    python: str, path: str | None, folders: tuple[tuple[str, int], ...]
) -> dict[str, Any]:
    """Return packages, MPI and Horovod of a `python` and its PATH, read once until its package `folders` change."""
    return {
        "mpi": machine_facts.mpi(),
        "mpi_build": machine_facts.mpi_build(),
        "horovod": machine_facts.horovod(),
        "packages": machine_facts.package_versions(),
    }


def _package_folders() -> tuple[tuple[str, int], ...]:
    """Return the folders that Python imports from, each with the time of its last change, which an installation is."""
    return tuple(
        (folder, Path(folder).stat().st_mtime_ns)
        for folder in sys.path
        if Path(folder).is_dir()
    )


def describe_node(
    environment: Mapping[str, str] = os.environ, pid: int = 0
) -> dict[str, Any]:
    """Return facts that differ between nodes: processor, memory, GPUs, network, kernel, and the hash of the host name.

    Usable cores are those of the process `pid`, by default this process.
    """
    facts = {
        "host_hash": host_hash(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": machine_facts.cpu(pid=pid),
        "memory_mib": memory_mib(),
        "gpus": machine_facts.gpus(),
        "network": machine_facts.network(),
    }
    hide = redactor(environment, names=False)
    return {name: _redacted(value, hide) for name, value in facts.items()}


def host_hash() -> str:
    """Return a hash that identifies this node without naming it."""
    return _digest(platform.node(), machine_facts.cpu_model(), str(os.cpu_count()))


def as_json(facts: Mapping[str, Any]) -> str:
    """Return the content of the file in provenance/."""
    # sorted, as its hash is its name
    return json.dumps(facts, indent=2, sort_keys=True, default=str) + "\n"


def name_of(facts: Mapping[str, Any]) -> str:
    """Return the name of that file without .json, a hash of its content."""
    return hashlib.sha256(as_json(facts).encode()).hexdigest()[:12]


def keep(folder: Path, facts: Mapping[str, Any]) -> str:
    """Write a description of the environment as provenance/<hash>.json in `folder`; return the hash."""
    digest = name_of(facts)
    path = folder / PROVENANCE / f"{digest}.json"
    with writing(path):
        write_atomic(path, as_json(facts))
    return digest


def _redacted(value: Any, hide: Callable[[str], str]) -> Any:
    """Return `value` with every text in it redacted by `hide`, but not its keys: a user name may be a package's."""
    if isinstance(value, dict):
        return {key: _redacted(item, hide) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, hide) for item in value]
    return hide(value) if isinstance(value, str) else value


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change timings, redacted."""
    allowed = sorted(
        name
        for name in environment
        if _ALLOWED.fullmatch(name) and not is_private(name)
    )
    hide = redactor(environment, short=True)
    return {name: hide(environment[name]) for name in allowed}


def redact(
    text: str,
    environment: Mapping[str, str] = os.environ,
    *,
    names: bool = True,
    short: bool = False,
) -> str:
    """Return `text` without credentials, values of secret variables, home folders, and `names` of user and host.

    Without `names`, only folders named after the user are hidden, so that a user name
    equal to a strategy name changes no records. With `short`, for values of the
    environment, secrets of three to seven characters are masked as separate words, too,
    as are values assigned to secret names; in other texts these are ordinary words.
    """
    return redactor(environment, names=names, short=short)(text)


def redactor(
    environment: Mapping[str, str] = os.environ,
    *,
    names: bool = True,
    short: bool = False,
) -> Callable[[str], str]:
    """Return the function of a text that `redact` is, for many texts: secrets and names are looked up once."""
    secrets: list[str] = []  # patterns, in the order of the environment
    for name, secret in environment.items():
        # a secret may appear in any text, as a part of a longer one
        if len(secret) >= _SHORTEST_SECRET and is_secret(name):
            secrets.append(re.escape(secret))
        elif (
            short
            and len(secret) >= _SHORTEST_WORD
            and secret.lower() not in _SWITCHES
            and is_secret(name)
        ):
            secrets.append(_word(secret))
    shown: list[tuple[str, str]] = []  # patterns, and what stands in their place
    # HOME may be set to another folder than that of the password file
    for home in {environment.get("HOME", ""), str(Path.home())} - {"", "/"}:
        shown.append((rf"{re.escape(home)}(?![A-Za-z0-9])", "~"))
    shown.append((_HOMES, "~"))
    for user in {environment.get("USER"), environment.get("LOGNAME"), _user()}:
        if user:
            shown.append(
                (_word(user) if names else rf"(?<=/){re.escape(user)}(?=/)", "<user>")
            )
    if names and (node := platform.node()):
        shown.append((_word(node), "<host>"))

    def hide(text: str) -> str:
        # Secrets first: a user name that is replaced inside one would leave the rest of
        # it readable.
        for pattern in secrets:
            text = re.sub(pattern, _MASK, text)
        text = mask_assigned(mask(text)) if short else mask(text)
        for pattern, instead in shown:
            text = re.sub(pattern, instead, text)
        return text

    return hide


def _word(text: str) -> str:
    """Return the pattern of a text that no letter or digit continues."""
    return rf"(?<![A-Za-z0-9]){re.escape(text)}(?![A-Za-z0-9])"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in some containers
        return ""


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def is_secret(name: str) -> bool:
    """Return True if the value of the variable `name` is a secret."""
    return bool(_NAME.search(name))


def is_private(name: str) -> bool:
    """Return True if the variable `name` is not to be recorded: secrets and sessions."""
    return is_secret(name) or bool(_SESSION.search(name))


def mask(text: str) -> str:
    """Return `text` without credentials in addresses and their queries and without values of a known shape."""
    text = _IN_ADDRESS.sub("://<credentials>@", text)
    text = _BEARER.sub(rf"\1{_MASK}", _SHAPES.sub(_MASK, text))
    return _QUERY.sub(_masked, text)


def mask_assigned(text: str) -> str:
    """Return a value of the environment without values assigned to secret names: --token=X, key=X, "password": "X".

    Not for program text, in which `key=` is an ordinary argument.
    """
    return _ASSIGNED.sub(_masked, text)


def _masked(found: re.Match[str]) -> str:
    groups = found.groupdict()
    name = (
        (groups["name"] or groups.get("option", "")).replace("-", "_").replace(".", "_")
    )
    value = groups["value"].strip("\"'")
    if (
        len(value) < _SHORTEST_WORD
        or value.lower() in _SWITCHES
        or not is_private(f"_{name}")
    ):
        return found[0]
    return groups["before"] + groups["value"].replace(value, _MASK)
