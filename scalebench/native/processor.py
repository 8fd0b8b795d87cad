"""The processor or GPU of one worker: its name, peak memory, and cores as the kernel reports them.

What a kernel does not report, as clock rates and throttling in most virtual machines,
is None.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

import torch

from scalebench.errors import EngineError
from scalebench.records.machine_facts import cpu_model, text_of

_ROOT = Path("/")
_KHZ_PER_MHZ = 1000
_THROTTLES = (
    "core_throttle_count",
    "package_throttle_count",
)  # of Intel; others report none


def device_name(device: torch.device) -> str:
    """The name of the processor or GPU model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model()


def gpu_name(device: torch.device) -> str:
    """A name unique among the GPUs of all nodes; their numbers differ from process to process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def require_gpus_of_their_own(names: Sequence[str]) -> None:
    """Check that no two workers share a GPU, which NCCL refuses.

    Raises:
        EngineError: two of the GPU `names`, in the order of workers, are equal.
    """
    for worker, name in enumerate(names):
        if (first := names.index(name)) < worker:
            raise EngineError(
                f"engine nccl takes a GPU for each worker, but workers {first} and {worker} share one "
                f"({len(set(names))} GPUs for {len(names)} workers); start fewer on a node, or use --engine gloo"
            )


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of process and device: one launch serves many runs."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> tuple[float, float | None]:
    """Peak MiB of this process since `forget_peak_memory`, and of the device."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) / 1024
    on_device = (
        torch.cuda.max_memory_allocated(device) / 2**20
        if device.type == "cuda"
        else None
    )
    return peak, on_device


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
            (
                now - then
                for now, then in zip(self.throttles, before.throttles, strict=True)
            ),
            default=None,
        )


def clock_rate(cores: Collection[int], root: Path = _ROOT) -> float | None:
    """Return the mean clock rate of `cores` in MHz: by cpufreq, else by /proc/cpuinfo."""
    frequencies = [
        text_of(
            root / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq"
        ).strip()
        for core in cores
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
    folders = [
        root / f"sys/devices/system/cpu/cpu{core}/thermal_throttle"
        for core in sorted(cores)
    ]
    counters = [
        text_of(folder / name).strip() for folder in folders for name in _THROTTLES
    ]
    return (
        tuple(int(counter) for counter in counters)
        if all(map(str.isdecimal, counters))
        else ()
    )
