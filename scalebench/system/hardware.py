"""The cores, GPUs and memory that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

_ROOT = Path("/")
_CPUS = Path("/sys/devices/system/cpu")
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # as CUDA_VISIBLE_DEVICES names one


def cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def physical_cores() -> int:
    """Number of cores without hardware threads, to which processes can be bound."""
    return len(cores_with_threads())


def gpus() -> int:
    """Number of NVIDIA GPUs this process may use: those of CUDA_VISIBLE_DEVICES, else all that the driver lists."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:  # CUDA reads up to the first invalid name
        return len(
            list(takewhile(_GPU.fullmatch, (each.strip() for each in given.split(","))))
        )
    listed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return listed or len(list(Path("/dev").glob("nvidia[0-9]*")))


def cores_with_threads() -> list[frozenset[int]]:
    """Return the CPUs of each core: its hardware threads, or one where the system does not tell which share a core."""
    cpus = sorted(os.sched_getaffinity(0))
    threads: dict[tuple[str, str], set[int]] = {}
    for cpu in cpus:
        # Hardware threads of one core have the same package and core.
        topology = _CPUS / f"cpu{cpu}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text()
            core = (topology / "core_id").read_text()
        except OSError:
            return [frozenset({each}) for each in cpus]
        threads.setdefault((package, core), set()).add(cpu)
    return [frozenset(together) for together in threads.values()]


def core_list(cores: Collection[int]) -> str:
    """Return core numbers as `taskset --cpu-list` takes them: `0-3,8`."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], core]
        else:
            ranges.append([core, core])
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in ranges
    )


def cores_in(text: str) -> frozenset[int]:
    """Return the core numbers that `core_list` wrote."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def memory_mib() -> int:
    """Physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def memory_limit_mib(root: Path = _ROOT) -> int | None:
    """Return the memory limit of the container or batch job; None without a limit."""
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(limit) // 2**20 if limit.isdigit() else None


def usable_memory_mib() -> int:
    """Return the smaller of physical memory and memory limit."""
    limit = memory_limit_mib()
    return memory_mib() if limit is None else min(memory_mib(), limit)
