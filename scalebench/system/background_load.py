"""How busy other programs keep this machine while something is measured."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SHARE = 0.25  # of the cores: from here on a calibration of engines counts as disturbed, and is not kept for others
_SHORTEST_S = 0.2  # over which a share is told: the kernel counts in ticks of 10 ms
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Processor seconds of this process, and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def taken_by(processes: Sequence[int]) -> Callable[[], float]:
    """Processor seconds of these processes, as long as they live."""
    return lambda: sum(map(_process_s, processes))


class BackgroundLoad:
    """Counts, from its making on, the processor time that others took on the cores that process `of` may use.

    What `own` tells does not count; what this machine's hypervisor gave to other machines does.
    """

    def __init__(self, own: Callable[[], float] = own_s, of: int = 0) -> None:
        self._cores, self._taken = os.sched_getaffinity(of), own
        self._began, self._busy, self._own = time.perf_counter(), _busy_s(self._cores), own()

    def cores(self) -> float:
        """Cores that others kept busy since, on average; 0 where the system does not tell."""
        elapsed = time.perf_counter() - self._began
        others = (_busy_s(self._cores) - self._busy) - (self._taken() - self._own)
        return max(0.0, others / elapsed)

    def share(self) -> float | None:
        """The part of the cores' time that others took since; None where that cannot be told, or of an instant."""
        if not self._busy or time.perf_counter() - self._began < _SHORTEST_S:
            return None
        return min(1.0, self.cores() / len(self._cores))


def disturbed(cores: float) -> bool:
    """Whether others that keep `cores` of this process's cores busy disturb what is measured here."""
    return cores > SHARE * len(os.sched_getaffinity(0))


def _busy_s(cores: set[int]) -> float:
    """Seconds that `cores` were not idle since the system began: user, nice, system, irqs, steal."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    ours = {f"cpu{cpu}" for cpu in cores}
    ticks = [[int(cell) for cell in line.split()[1:9]] for line in lines if line.split(maxsplit=1)[0] in ours]
    return sum(sum(cells[:3]) + sum(cells[5:]) for cells in ticks) / _TICKS_PER_S


def _process_s(pid: int) -> float:
    try:
        said = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    user, system = said.rpartition(")")[2].split()[11:13]  # fields 14 and 15; the second, a name, may hold anything
    return (int(user) + int(system)) / _TICKS_PER_S
