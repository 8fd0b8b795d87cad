"""The software under a study: scalebench's own commit, packages, and how MPI, Horovod, NCCL and gloo were built."""

from __future__ import annotations

import json
import mmap
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalebench.records.machine import output_of, text_of

_HOROVOD_FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
_FIRST_BYTES = 64 << 20
# What of Open MPI moves messages and accelerator memory.
_OPEN_MPI_FRAMEWORKS = ("pml", "btl", "mtl", "osc", "coll", "accelerator", "op")
_LONG_FACTS = ("config:cli", "option:threads")  # whose values hold colons


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
    return output_of(_beside("mpirun"), "--version").partition("\n")[0] or None


def mpi_build() -> dict[str, Any] | None:
    """How that MPI was built, without who built it, where and when: None where it does not tell.

    Open MPI's `ompi_info` tells; MPICH's `mpirun --version` holds the options of its configure.
    """
    told = dict(_parsed(output_of(_beside("ompi_info"), "--parsable", "--all")))
    if "ompi:version:full" in told:
        return _open_mpi(told)
    options = re.search(r"Configure options:(.*)", output_of(_beside("mpirun"), "--version"))
    return {"options": configure_options(options[1])} if options else None


def configure_options(line: str) -> list[str]:
    """The switches of a configure line; the values of `--with-x=/path` and of variables, which may name people, not."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation without its end
        words = line.split()
    pairs = (word.partition("=") for word in words if re.match(r"--(with|without|enable|disable)-", word))
    return sorted(f"{name}={value}" if re.fullmatch(r"[\w.,:+-]+", value) else name for name, _, value in pairs)


def torch() -> dict[str, Any] | None:
    """Version, commit, CUDA or HIP, how it was built, and what it brings to communicate with."""
    folder = _folder_of("torch")
    text = text_of(folder / "version.py") if folder else ""
    found = re.findall(r"^(__version__|cuda|hip|git_version)\b[^=]*= *'([^']*)'", text, flags=re.MULTILINE)
    if folder is None or not found:
        return None
    facts: dict[str, Any] = {name.strip("_"): value for name, value in found}
    return facts | _torch_build()


def _torch_build() -> dict[str, Any]:
    """What only the library itself knows; a command that trains has imported it anyway."""
    import torch as library
    from torch import distributed

    told = library.__config__.show()
    settings = dict(re.findall(r"\b((?:USE|BLAS|LAPACK|BUILD)_\w+)=([\w.+-]*)", told))
    lines = [line.strip(" -") for line in told.splitlines()[1:]]
    has = distributed.is_available()
    return {
        "compiler": lines[0] if lines else None,
        "libraries": [line for line in lines if re.match(r"Intel|OpenMP|CuDNN|CUDA Runtime|Magma", line)],
        "settings": settings,
        "gloo": {"transports": _gloo_transports()} if has and distributed.is_gloo_available() else None,
        "nccl": _nccl() if has and distributed.is_nccl_available() else None,
        "mpi": has and distributed.is_mpi_available(),
    }


def horovod() -> dict[str, Any] | None:
    """What it was built against (its metadata.json), and what `horovodrun --check-build` tells, read from its library.

    That command takes many seconds of processor time; what it tells is which classes the library has.
    """
    folder = _folder_of("horovod")
    if folder is None:
        return None
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = dict(json.loads(text_of(folder / "metadata.json") or "{}"))
    libraries = {name: sorted((folder / part).glob("mpi_lib*.so")) for name, part in _HOROVOD_FRAMEWORKS.items()}
    facts["frameworks"] = [name for name, found in libraries.items() if found]
    library = next((found[0] for found in libraries.values() if found), None)
    if library is not None:
        facts["controllers"] = _with_class(library, "Controller", ("MPI", "Gloo"))
        facts["tensor_operations"] = _with_class(library, "Allreduce", ("NCCL", "DDL", "CCL", "MPI", "Gloo"))
    return facts


def modules(environment: Mapping[str, str]) -> list[str] | None:
    """The environment modules that are loaded (Lmod, Environment Modules)."""
    return [name for name in environment.get("LOADEDMODULES", "").split(":") if name] or None


def _beside(program: str) -> str:
    """`program` beside this Python, else its name, to be found on PATH."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else program


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    """ompi_info's `name:of:fact:value`, longest names first tried: key -> value."""
    for line in text.splitlines():
        name, _, value = line.rpartition(":") if '"' not in line else line.partition(':"')
        for fact in _LONG_FACTS:
            if line.startswith(f"{fact}:"):
                name, value = fact, line[len(fact) + 1 :]
        yield name, value.strip('"')


def _open_mpi(told: Mapping[str, str]) -> dict[str, Any]:
    components: dict[str, list[str]] = {}
    for fact in told:
        kind = re.fullmatch(r"mca:(\w+):(\w+):version", fact)
        if kind and kind[1] in _OPEN_MPI_FRAMEWORKS:
            components.setdefault(kind[1], []).append(kind[2])
    return {
        "version": told["ompi:version:full"],
        "repository": told.get("ompi:version:repo"),
        "mpi_standard": told.get("mpi-api:version:full"),
        "compiler": " ".join(filter(None, (told.get("compiler:c:familyname"), told.get("compiler:c:version")))) or None,
        "threads": told.get("option:threads"),
        "debug": told.get("option:debug"),
        "cuda": told.get("mca:mpi:base:param:mpi_built_with_cuda_support:value"),
        "options": configure_options(told.get("config:cli", "")),
        "components": {kind: sorted(names) for kind, names in sorted(components.items())},
    }


def _nccl() -> str | None:
    """The version of the NCCL that a CUDA build of torch is linked with, else of the package that it installs."""
    from torch.cuda import nccl

    with suppress(AttributeError, RuntimeError, OSError):
        return ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    versions = package_versions()
    return next((version for name, version in versions.items() if name.startswith("nvidia-nccl")), None)


@cache
def _gloo_transports() -> list[str]:
    """How torch's gloo can carry messages; GLOO_DEVICE_TRANSPORT chooses, and tcp is what it takes by itself."""
    folder = _folder_of("torch")
    library = folder / "lib/libtorch_cpu.so" if folder else None
    if library is None or not library.exists():
        return []
    symbols = {name: f"4gloo9transport{len(name)}{name}" for name in ("tcp", "uv", "ibverbs")}
    for within in (_FIRST_BYTES, None):  # of half a gigabyte: the names lie together, as a rule near the beginning
        found = [name for name, symbol in symbols.items() if _holds(library, symbol, within)]
        if found:
            return found
    return []


def _with_class(library: Path, kind: str, names: Iterable[str]) -> list[str]:
    """Which of Horovod's classes, `name` and `kind` in one word, are in its library."""
    return [name for name in names if _holds(library, f"{len(name + kind)}{name}{kind}")]


def _holds(library: Path, symbol: str, within: int | None = None) -> bool:
    """Whether `symbol` is in the first `within` bytes of `library`."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(symbol.encode(), 0, len(content) if within is None else within) >= 0


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
