"""The machine under a study: processor, memory, GPUs, network, container, as the kernel and the drivers tell it.

What cannot be found out is None. Nothing here names the machine or its user.
"""

from __future__ import annotations

import os
import platform
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path("/")
_SIF_ID = slice(48, 64)  # of an Apptainer image's header: launch line 32, magic 10, version 3, architecture 3, then id
_SIF_MAGIC = slice(32, 41)


def output_of(*command: str) -> str:
    """What a command prints, nothing if it is missing, fails or takes over ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def text_of(path: Path) -> str:
    """What a file holds, nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_model(root: Path = _ROOT) -> str:
    """The processor's name."""
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.processor() or "unknown"


def cpu(root: Path = _ROOT, pid: int = 0) -> dict[str, Any]:
    """Processor, cores, those the process `pid` may use, NUMA nodes with their cores, and the frequency governor."""
    numa = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return {
        "model": cpu_model(root),
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(pid)),
        "numa_nodes": {node.name: text_of(node / "cpulist").strip() for node in numa} or None,
        "governor": text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
    }


def memory_mib() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def memory_limit_mib(root: Path = _ROOT) -> int | None:
    """What a container or a batch job may take of it; None: all."""
    limit = text_of(root / "sys/fs/cgroup/memory.max").strip()
    return int(limit) // 2**20 if limit.isdigit() else None


def usable_memory_mib() -> int:
    """Physical memory, or the part of it that this process may take."""
    limit = memory_limit_mib()
    return memory_mib() if limit is None else min(memory_mib(), limit)


def gpus() -> list[dict[str, str]] | None:
    """Each GPU's name, driver and memory, as nvidia-smi tells them."""
    told = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    rows = (line.split(", ") for line in told.splitlines())
    return [dict(zip(("name", "driver", "memory"), row, strict=False)) for row in rows] or None


def network(root: Path = _ROOT) -> list[dict[str, Any]] | None:
    """Network cards that are up: name, driver and speed in Mbit/s; InfiniBand and RoCE ports with their rate."""
    found = []
    for card in sorted((root / "sys/class/net").glob("*")):
        if not (card / "device").exists() or text_of(card / "operstate").strip() == "down":
            continue  # loopback, bridges, virtual ones
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
        rate, layer = text_of(port / "rate").strip(), text_of(port / "link_layer").strip()
        found.append({"name": f"{port.parents[1].name}:{port.name}", "rate": rate or None, "link_layer": layer or None})
    return found or None


def container(environment: Mapping[str, str], root: Path = _ROOT) -> dict[str, str | None] | None:
    """Which kind of container this is, its image and the image's digest or id; None outside of one.

    Docker tells no image from within: `SCALEBENCH_IMAGE` and `SCALEBENCH_IMAGE_DIGEST` say it where somebody set them.
    """
    image, digest = environment.get("SCALEBENCH_IMAGE"), environment.get("SCALEBENCH_IMAGE_DIGEST")
    podman = dict(line.split("=", 1) for line in text_of(root / "run/.containerenv").splitlines() if "=" in line)
    sif = environment.get("APPTAINER_CONTAINER") or environment.get("SINGULARITY_CONTAINER")
    if sif:
        kind, image, digest = "apptainer", image or Path(sif).name, digest or _sif_id(Path(sif))
    elif (root / "run/.containerenv").exists():
        kind = "podman"
        image, digest = image or podman.get("image", "").strip('"'), digest or podman.get("imageid", "").strip('"')
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
    return f"sif:{uuid.UUID(bytes=header[_SIF_ID])}" if header[_SIF_MAGIC] == b"SIF_MAGIC" else None
