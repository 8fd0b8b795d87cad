"""The cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def cores_with_threads() -> list[frozenset[int]]:
    """Return the CPUs of each core: its hardware threads, or one where the system does not tell which share a core."""
    cpus = sorted(os.sched_getaffinity(0))
    threads: dict[tuple[str, str], set[int]] = {}
    for cpu in cpus:
        topology = _CPUS / f"cpu{cpu}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text()
            core = (topology / "core_id").read_text()
        except OSError:
            return [frozenset({each}) for each in cpus]
        threads.setdefault((package, core), set()).add(cpu)
    return [frozenset(together) for together in threads.values()]
