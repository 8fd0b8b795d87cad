"""How busy other programs keep this machine while something is measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

SHARE = 0.25  # of the cores: from here on a measurement counts as disturbed
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Elsewhere:
    """Counts, from its making on, the processor time on this process's cores that others took.

    What this process took, and its children that have ended, does not count; what its hypervisor gave to others does.
    """

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()

    def cores(self) -> float:
        """Cores that others kept busy since, on average; 0 where the system does not tell."""
        elapsed = time.perf_counter() - self._began
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        return max(0.0, others / elapsed)


def disturbed(cores: float) -> bool:
    """Whether others that keep `cores` of this process's cores busy disturb what is measured here."""
    return cores > SHARE * len(os.sched_getaffinity(0))


def _busy_s() -> float:
    """Seconds that the cores of this process were not idle since the system began: user, nice, system, irqs, steal."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    ours = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    ticks = [[int(cell) for cell in line.split()[1:9]] for line in lines if line.split(maxsplit=1)[0] in ours]
    return sum(sum(cells[:3]) + sum(cells[5:]) for cells in ticks) / _TICKS_PER_S


def _own_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
