"""Processor time used by other programs during a measurement."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

# of the cores: above it a native run, or a calibration of engines, is disturbed
SHARE = 0.25
_SHORTEST_S = 0.2  # for a share: the kernel counts in ticks of 10 ms
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Return processor seconds of this process and its terminated children."""
    usages = [
        resource.getrusage(who)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def own_and_children_s() -> float:
    """Return processor seconds of this process and its children, those that still run included."""
    with suppress(psutil.Error):  # one has ended meanwhile
        children = psutil.Process().children(recursive=True)
        return own_s() + sum(_process_s(child.pid) for child in children)
    return own_s()


def taken_by(processes: Sequence[int]) -> Callable[[], float]:
    """Return a function for the processor seconds of these processes while they run."""
    return lambda: sum(map(_process_s, processes))


class BackgroundLoad:
    """Processor time of other programs since construction, on the cores usable by the process `of`.

    Processor seconds returned by `own` are subtracted; steal time of the hypervisor
    counts as other programs.
    """

    def __init__(self, own: Callable[[], float] = own_s, of: int = 0) -> None:
        self._cores, self._taken = os.sched_getaffinity(of), own
        self._began = time.perf_counter()
        self._busy = _busy_s(self._cores)
        self._own = own()

    def cores(self) -> float:
        """Return the mean number of cores used by others; 0 if the system does not report it."""
        elapsed = time.perf_counter() - self._began
        # The kernel counts whole ticks, so that the difference may be slightly
        # negative.
        others = (_busy_s(self._cores) - self._busy) - (self._taken() - self._own)
        return max(0.0, others / elapsed)

    def share(self) -> float | None:
        """Return the share of the cores used by others; None if unavailable or over too short a time."""
        if not self._busy or time.perf_counter() - self._began < _SHORTEST_S:
            return None
        return min(1.0, self.cores() / len(self._cores))


def disturbed(cores: float) -> bool:
    """Return True if other programs on `cores` cores disturb a measurement of this process."""
    return cores > SHARE * len(os.sched_getaffinity(0))


def _busy_s(cores: set[int]) -> float:
    """Return busy seconds of `cores` since boot: user, nice, system, irqs, steal."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    ours = {f"cpu{cpu}" for cpu in cores}
    busy = 0
    for line in lines:
        name, *cells = line.split()
        if name in ours:
            # without idle, and waiting for disks
            user, nice, system, _, _, *interrupts_and_steal = map(int, cells[:8])
            busy += user + nice + system + sum(interrupts_and_steal)
    return busy / _TICKS_PER_S


def _process_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # fields 14 and 15; field 2 is a name with any characters
    user, system = fields.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S
