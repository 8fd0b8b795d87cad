"""Disturbance of measurements by other programs: short windows that are each checked, and the time that others took.

A window counts as undisturbed if no thread of the process waited for a core for more
than `DELAY` of the window (Linux counts that wait in /proc/self/task/*/schedstat, in
nanoseconds), the hypervisor took none of the machine's cores (`steal` in /proc/stat),
and, where the process computes without a pause, its processor time is at least
`COMPUTED` of the wall time. Windows of a few milliseconds pass even beside busy
programs, as each lies within one slice of the scheduler; a whole run does not.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

DELAY = 0.02  # share of a window that threads may wait for a core
COMPUTED = 0.97  # share of a computing window that the thread has to compute
PRECISION = 0.02  # relative half width of an interval at which measuring ends
FEWEST = 12  # undisturbed windows for a median
# of the cores: above it a native run, or a calibration of engines, is disturbed
SHARE = 0.25
_SHORTEST_S = 0.2  # for a share: the kernel counts in ticks of 10 ms
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Window(NamedTuple):
    """Wall time of a window in seconds; `undisturbed` if no other program used its core."""

    seconds: float
    undisturbed: bool


class Stopwatch:
    """Timer of consecutive windows. `computes`: the calling thread computes all the time and never sleeps.

    `shares_cores`: threads of the process compete for a core (engines with a progress
    thread), so that waiting for a core is part of the timed operation and not a
    disturbance.
    """

    def __init__(self, *, computes: bool = True, shares_cores: bool = False) -> None:
        self._computes, self._shares_cores = computes, shares_cores
        self.start()

    def start(self) -> None:
        """Begin a window."""
        self._steal = _steal_ticks()
        self._waited = _waited_for_core_s()
        self._cpu = time.thread_time()
        self._began = time.perf_counter()

    def stop(self) -> Window:
        """End the window."""
        seconds = time.perf_counter() - self._began
        computed = time.thread_time() - self._cpu
        waited = _waited_for_core_s() - self._waited
        undisturbed = (
            _steal_ticks() == self._steal
            and (self._shares_cores or waited <= DELAY * seconds)
            and (not self._computes or computed >= COMPUTED * seconds)
        )
        return Window(seconds, undisturbed)


class Typical(NamedTuple):
    """Median of `n` values, and the half width of its 95 % interval relative to it; infinite below FEWEST values."""

    value: float
    half_width: float
    n: int

    @property
    def precise(self) -> bool:
        """True if the relative half width is at most PRECISION."""
        return self.half_width <= PRECISION


def typical(values: Sequence[float]) -> Typical:
    """Return the median with the distribution-free interval of the order statistics n/2 -+ 0.98 sqrt(n)."""
    x = np.sort(np.asarray(values, dtype=float))
    if len(x) == 0:
        return Typical(math.nan, math.inf, 0)
    middle = float(np.median(x))
    if len(x) < FEWEST or middle <= 0:
        return Typical(middle, math.inf, len(x))
    # 1.96 standard deviations, sqrt(n) / 2 each, of the number of values below the median.
    reach = 0.98 * math.sqrt(len(x))
    low = x[max(0, math.floor(len(x) / 2 - reach))]
    high = x[min(len(x) - 1, math.ceil(len(x) / 2 + reach))]
    return Typical(middle, float(high - low) / 2 / middle, len(x))


def _waited_for_core_s() -> float:
    """Return seconds in which threads of this process were runnable without a core; 0 if Linux does not count them."""
    waited = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            waited += int((task / "schedstat").read_bytes().split()[1])
        except (
            OSError,
            IndexError,
        ):  # the thread has just ended, or the kernel keeps no statistics
            continue
    return waited * 1e-9


def _steal_ticks() -> int:
    """Return the steal time over all cores in ticks of 10 ms; 0 if unavailable."""
    try:
        with Path("/proc/stat").open("rb") as stat:
            return int(stat.readline().split()[8])
    except (OSError, IndexError):
        return 0


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
