"""Readings of the hardware under a run: names, peak memory, clock rates, throttling and energy of processors and GPUs.

What a kernel, a driver or a GPU does not report, as clock rates and throttling in most
virtual machines, is None.

Energy is that of the nodes' processors by RAPL and of GPUs by NVML, else that of the
job by Slurm's accounting. RAPL and Slurm count whole nodes, idle cores and other
programs included. If a part cannot be read, the run has no energy: neither the sum of
the other parts nor zero would be right.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol, Self

import torch

from scalebench.errors import EngineError
from scalebench.records.machine_facts import cpu_model, text_of
from scalebench.records.schema import NOT_SLOWED, POWER_CAP

_ROOT = Path("/")
_KHZ_PER_MHZ = 1000
_THROTTLES = (
    "core_throttle_count",
    "package_throttle_count",
)  # of Intel; others report none
NVML_LIBRARY = "libnvidia-ml.so.1"
_SM = 1  # NVML_CLOCK_SM
# Reason -> bits of nvmlClocksThrottleReasons; others, as an idle GPU or a rate that was
# asked for, are no fault.
_REASONS = {
    POWER_CAP: 0x4,
    "hardware": 0x8,
    "thermal": 0x20 | 0x40,
    "power-brake": 0x80,
}
RAPL_ZONES = Path("/sys/class/powercap")
_SLURM_S = 10.0  # longest wait for an answer
_UNKNOWN_TO_SLURM = (2.0**32 - 2, 2.0**64 - 2)  # its NO_VAL and NO_VAL64
_SOURCES = ("rapl", "nvml", "slurm")

Joules = dict[str, float | None]  # by source; None is a counter that could not be read


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
        # 5 resets the peak of resident memory (proc(5)); needs Linux 4.0.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> tuple[float, float | None]:
    """Peak MiB of this process since `forget_peak_memory`, and of the device."""
    # Without /proc it cannot be reset, and is that of the whole launch.
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
    # Virtual machines rarely have cpufreq.
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


class Gpu:
    """The GPU with this `uuid`, by NVML, the library of NVIDIA's driver.

    The functions are those of nvml.h, called as by nvidia-ml-py, which needs not be
    installed.
    """

    def __init__(self, uuid: str, library: str = NVML_LIBRARY) -> None:
        # torch gives the number alone, NVML takes it with its kind.
        self._name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._library = library

    def millijoules(self) -> int | None:
        """Energy since the driver was loaded (Volta and later)."""
        return self._asked("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def mhz(self) -> int | None:
        """Clock rate of the multiprocessors."""
        return self._asked("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM)

    def slowdowns(self) -> frozenset[str] | None:
        """Return the reasons for which it is clocked down at this moment, of _REASONS."""
        bits = self._asked(
            "nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong()
        )
        return (
            None
            if bits is None
            else frozenset(name for name, mask in _REASONS.items() if bits & mask)
        )

    def _asked(
        self, function: str, found: ctypes.c_uint | ctypes.c_ulonglong, *arguments: int
    ) -> int | None:
        device = ctypes.c_void_p()
        # no such library; no such function in it
        with suppress(OSError, AttributeError):
            nvml = ctypes.CDLL(self._library)
            if (
                nvml.nvmlInit_v2() == 0
                and nvml.nvmlDeviceGetHandleByUUID(
                    self._name.encode(), ctypes.byref(device)
                )
                == 0
                and getattr(nvml, function)(device, *arguments, ctypes.byref(found))
                == 0
            ):
                return int(found.value)
        return None


class GpuClocks:
    """Clock rates of a GPU before and after training, and the reasons for which it was clocked down meanwhile."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._slowdowns: frozenset[str] | None = None
        self.mhz_before: int | None = None
        self.mhz_after: int | None = None

    def begin(self) -> None:
        """Read the rate before training, while the GPU is still warm from the steps before."""
        self.mhz_before, self._slowdowns = self._gpu.mhz(), None

    def look(self) -> None:
        """Add the reasons of this moment; call it some times in a run, right behind work of the GPU."""
        if (found := self._gpu.slowdowns()) is not None:
            self._slowdowns = found | (self._slowdowns or frozenset())

    def end(self) -> None:
        """Read the rate right after training."""
        self.mhz_after = self._gpu.mhz()
        self.look()

    @property
    def slowdowns(self) -> str | None:
        """The reasons as in records: `power-cap+thermal`, `none`; None if they are unknown."""
        return (
            None
            if self._slowdowns is None
            else "+".join(sorted(self._slowdowns)) or NOT_SLOWED
        )


class JouleCounter:
    """Joules since `begin` by the counters that `read` returns, `per_joule` each; None is one that cannot be read.

    A counter above its entry in `largest` wraps around, those of RAPL after some ten
    minutes under load: call `look` in between.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[float | None]],
        per_joule: float,
        largest: Sequence[float | None] = (math.inf,),
    ) -> None:
        self._read, self._per_joule, self._largest = read, per_joule, largest
        self._last: Sequence[float | None] = ()
        self._counted: float | None = None

    def begin(self) -> None:
        """Start counting at zero."""
        self._last = self._read()
        self._counted = 0 if self._last else None

    def look(self) -> None:
        """Add the energy since the last look; a counter that cannot be read makes the sum unknown."""
        now = self._read()
        for before, after, largest in zip(self._last, now, self._largest, strict=True):
            if (
                self._counted is None
                or before is None
                or after is None
                or largest is None
            ):
                self._counted = None
            else:
                self._counted += (
                    after - before
                    # Modulo infinity, a counter that was reset would give infinity.
                    if math.isinf(largest)
                    else (after - before) % (largest + 1)
                )
        self._last = now

    def joules(self) -> float | None:
        """Energy since `begin`, None if unknown."""
        self.look()
        return None if self._counted is None else self._counted / self._per_joule


def rapl(root: Path) -> JouleCounter:
    """The counter of this node's packages, and of memory that is counted apart."""
    files = [
        zone / "energy_uj"
        # AMD's counters have this name, too.
        for zone in sorted(root.glob("intel-rapl:*"))
        # Zones `core` and `uncore` are parts of a package, `psys` the whole board: they
        # would count twice.
        if (name := text_of(zone / "name").strip()).startswith("package")
        or name == "dram"
    ]
    largest = [_whole(file.with_name("max_energy_range_uj")) for file in files]
    return JouleCounter(lambda: [_whole(file) for file in files], 1e6, largest)


def nvml(gpu: Gpu) -> JouleCounter:
    """The counter of a GPU, by NVML."""
    return JouleCounter(lambda: [gpu.millijoules()], 1e3)


def slurm_joules() -> dict[str, float]:
    """Energy of the running steps of this job by Slurm's accounting; empty outside a job and without accounting."""
    job, program = os.environ.get("SLURM_JOB_ID"), shutil.which("sstat")
    if not job or program is None:
        return {}
    command = [
        program,
        "--jobs",
        job,
        "--allsteps",
        "--noheader",
        "--parsable2",
        "--format=JobID,ConsumedEnergyRaw",
    ]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_SLURM_S, check=True
        ).stdout
        steps = (line.split("|") for line in output.split())
        joules = {step: float(energy) for step, energy in steps if energy}
        return {
            step: energy
            for step, energy in joules.items()
            if energy not in _UNKNOWN_TO_SLURM
        }
    return {}


class SlurmCounter:
    """Joules since `begin` by Slurm's accounting of the steps of this job, which `read` returns.

    A step's energy is that of its nodes, whatever else runs there: the steps `batch`,
    `extern` and `0` of a job on one node have the same, and their sum is three times
    what was used. The step that took most since `begin` counts.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]] = slurm_joules) -> None:
        self._read = read
        self._first: Mapping[str, float] = {}

    def begin(self) -> None:
        """Start counting at zero."""
        self._first = self._read()

    def joules(self) -> float | None:
        """Energy since `begin`, None if unknown."""
        now = self._read()
        return max(
            (now[step] - before for step, before in self._first.items() if step in now),
            default=None,
        )


class EnergyCounter(Protocol):
    """What every source of energy offers."""

    def begin(self) -> None: ...
    def joules(self) -> float | None: ...


class EnergyMeter:
    """The energy counters that one worker reads: of its node (`first_on_node`), its GPU, the job (`first`)."""

    def __init__(
        self,
        *,
        first_on_node: bool,
        first: bool,
        gpu: Gpu | None,
        slurm: Callable[[], Mapping[str, float]] = slurm_joules,
    ) -> None:
        self._rapl = rapl(RAPL_ZONES) if first_on_node else None
        self._counters: dict[str, EnergyCounter] = {}
        if self._rapl is not None:
            self._counters["rapl"] = self._rapl
        if gpu is not None:
            self._counters["nvml"] = nvml(gpu)
        if first:
            self._counters["slurm"] = SlurmCounter(slurm)

    def begin(self) -> None:
        for counter in self._counters.values():
            counter.begin()

    def look(self) -> None:
        """Read RAPL's counters; call it some times in a run, as they wrap around."""
        if self._rapl is not None:
            self._rapl.look()

    def end(self) -> Joules:
        """Return the joules of each counter."""
        return {source: counter.joules() for source, counter in self._counters.items()}


def total_energy(readings: Sequence[Joules]) -> tuple[float, str] | None:
    """Joules of a run and their source, from the readings of all workers; None if unknown.

    Without RAPL, the GPUs are counted alone; if no sum is complete, Slurm's is taken.
    """
    parts = {
        source: [reading[source] for reading in readings if source in reading]
        for source in _SOURCES
    }
    known = {
        source: found for source, found in parts.items() if found and None not in found
    }
    used = ["nvml"] if parts["nvml"] else []
    if "rapl" in known or not used:
        used.insert(0, "rapl")
    if not known.keys() >= set(used):
        used = ["slurm"]
    joules = sum(each or 0.0 for source in used for each in known.get(source, ()))
    return (joules, "+".join(used)) if joules > 0 else None


def _whole(path: Path) -> int | None:
    # Since Linux 5.10 root alone reads energy_uj (CVE-2020-8694).
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None
