"""Memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")


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
