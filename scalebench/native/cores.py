"""The cores of one worker as the kernel reports them: which it may use, at which clock rate, how often throttled.

What a kernel does not report, as in most virtual machines, is None.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

from scalebench.records.machine import text_of

_ROOT = Path("/")
_KHZ_PER_MHZ = 1000
_THROTTLES = ("core_throttle_count", "package_throttle_count")  # of Intel; others report none


class Cores(NamedTuple):
    """Clock rate of the `usable` cores of this process, mean over them, and their throttle counters since boot."""

    usable: frozenset[int]
    mhz: float | None
    throttles: tuple[int, ...]

    @classmethod
    def now(cls, root: Path = _ROOT) -> Self:
        """Read the state of the cores that this process may use."""
        usable = frozenset(os.sched_getaffinity(0))
        return cls(usable, clock_rate(usable, root), throttle_counters(usable, root))

    def throttled_since(self, before: Cores) -> int | None:
        """Return how often the most throttled core was throttled since `before`."""
        return max(
            (now - then for now, then in zip(self.throttles, before.throttles, strict=True)),
            default=None,
        )


def clock_rate(cores: Collection[int], root: Path = _ROOT) -> float | None:
    """Return the mean clock rate of `cores` in MHz: by cpufreq, else by /proc/cpuinfo."""
    frequencies = [
        text_of(root / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq").strip() for core in cores
    ]
    if all(frequency.isdecimal() for frequency in frequencies):
        return fmean(int(frequency) for frequency in frequencies) / _KHZ_PER_MHZ
    rates: list[float] = []
    core = None
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "processor":
            core = int(value)
        elif name.strip() == "cpu MHz" and core in cores:
            rates.append(float(value))
    return fmean(rates) if rates else None


def throttle_counters(cores: Collection[int], root: Path = _ROOT) -> tuple[int, ...]:
    """Return how often each of `cores` and their packages were throttled since boot, in the order of the cores."""
    folders = [root / f"sys/devices/system/cpu/cpu{core}/thermal_throttle" for core in sorted(cores)]
    counters = [text_of(folder / name).strip() for folder in folders for name in _THROTTLES]
    return tuple(int(counter) for counter in counters) if all(map(str.isdecimal, counters)) else ()
