"""The software under a study: scalebench's own commit, packages, and how MPI, Horovod, NCCL and gloo were built."""

from __future__ import annotations

import json
import mmap
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalebench.records.machine import output_of, text_of

# A symbol that Horovod's library refers to only if it was built with the transport.
_HOROVOD_TRANSPORTS = {"mpi": b"MPI_Allreduce", "gloo": b"gloo", "nccl": b"ncclAllReduce"}


def package_versions() -> dict[str, str]:
    """Every installed distribution and its version, by name."""
    found = {str(item.metadata["Name"]).lower(): item.version for item in distributions() if item.metadata["Name"]}
    return dict(sorted(found.items()))


def git() -> dict[str, str | bool | None]:
    """Commit and state of the checkout that scalebench runs from; None where it was installed as a package."""
    package = Path(__file__).resolve().parents[1]
    at = ("git", "-C", str(package))
    if not output_of(*at, "ls-files", "--", "__init__.py"):
        return {"git_commit": None, "git_dirty": None}
    changed = output_of(*at, "status", "--porcelain", "--untracked-files=no", "--", str(package))
    return {"git_commit": output_of(*at, "rev-parse", "HEAD") or None, "git_dirty": bool(changed)}


def mpi() -> str | None:
    """The MPI whose mpirun starts the processes: that beside this Python, else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    told = output_of(str(beside), "--version") if beside.exists() else output_of("mpirun", "--version")
    return told.partition("\n")[0] or None


def torch() -> dict[str, Any] | None:
    """Version, commit, CUDA or HIP, and what it brings to communicate with; read as text, importing takes seconds."""
    folder = _folder_of("torch")
    text = text_of(folder / "version.py") if folder else ""
    found = re.findall(r"^(__version__|cuda|hip|git_version)\b[^=]*= *'([^']*)'", text, flags=re.MULTILINE)
    if folder is None or not found:
        return None
    has_cuda = any((folder / "lib").glob("libtorch_cuda*"))
    return {name.strip("_"): value for name, value in found} | {
        "gloo": (folder / "include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp").exists(),
        "nccl": _nccl() if has_cuda else None,
    }


def horovod() -> dict[str, Any] | None:
    """What it was built against (its metadata.json), and the transports in its library."""
    folder = _folder_of("horovod")
    if folder is None:
        return None
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = dict(json.loads(text_of(folder / "metadata.json") or "{}"))
    library = next(iter(sorted((folder / "torch").glob("mpi_lib_v2*.so"))), None)
    return facts | {"transports": _transports(library) if library else None}


def modules(environment: Mapping[str, str]) -> list[str] | None:
    """The environment modules that are loaded (Lmod, Environment Modules)."""
    return [name for name in environment.get("LOADEDMODULES", "").split(":") if name] or None


def _nccl() -> str | None:
    """The version of the NCCL package that CUDA builds of torch install."""
    versions = package_versions()
    return next((version for name, version in versions.items() if name.startswith("nvidia-nccl")), None)


def _transports(library: Path) -> list[str]:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [name for name, symbol in _HOROVOD_TRANSPORTS.items() if content.find(symbol) >= 0]


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
