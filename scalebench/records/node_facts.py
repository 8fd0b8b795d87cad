"""Hardware of a study as reported by kernel and drivers: processor, memory, GPUs, network, container.

Unavailable facts are None. No fact names the machine or its user.
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
    """Return the output of a command; empty if it is missing, fails or takes over ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
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
        "numa_nodes": {node.name: text_of(node / "cpulist").strip() for node in numa} or None,
        "governor": text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
    }


def gpus() -> list[dict[str, str]] | None:
    """Return name, driver and memory of each GPU, from nvidia-smi."""
    table = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    rows = (line.split(", ") for line in table.splitlines())
    return [dict(zip(("name", "driver", "memory"), row, strict=False)) for row in rows] or None


def network(root: Path = _ROOT) -> list[dict[str, Any]] | None:
    """Return active network cards (name, driver, speed in Mbit/s) and InfiniBand and RoCE ports (rate)."""
    found = []
    for card in sorted((root / "sys/class/net").glob("*")):
        if not (card / "device").exists() or text_of(card / "operstate").strip() == "down":
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
        found.append({"name": f"{port.parents[1].name}:{port.name}", "rate": rate or None, "link_layer": layer or None})
    return found or None


def container(environment: Mapping[str, str], root: Path = _ROOT) -> dict[str, str | None] | None:
    """Return kind, image and image digest or id of the container; None outside of a container.

    Docker does not expose the image inside: set `SCALEBENCH_IMAGE` and `SCALEBENCH_IMAGE_DIGEST` to record it.
    """
    image = environment.get("SCALEBENCH_IMAGE")
    digest = environment.get("SCALEBENCH_IMAGE_DIGEST")
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
