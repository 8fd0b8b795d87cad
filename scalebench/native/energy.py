"""Energy of a run: processors of the nodes by RAPL and GPUs by NVML, else the job by Slurm's accounting.

RAPL and Slurm count whole nodes, idle cores and other programs included. If a part cannot be read, the run has no
energy: neither the sum of the other parts nor zero would be right.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"
_SLURM_S = 10.0  # longest wait for an answer


class Rapl:
    """Energy of this node's packages, and of memory that is counted apart, in joules since `begin`.

    Counters wrap around after some ten minutes under load: call `look` in between.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._files = [
            zone / "energy_uj"
            for zone in sorted(root.glob("intel-rapl:*"))
            if (name := _text(zone / "name")).startswith("package") or name == "dram"
        ]
        self._ranges = [_whole(file.with_name("max_energy_range_uj")) for file in self._files]
        self._last: list[int | None] = []
        self._microjoules: int | None = None

    def begin(self) -> None:
        """Start counting at zero."""
        self._last = [_whole(file) for file in self._files]
        self._microjoules = 0 if self._last else None

    def look(self) -> None:
        """Add the energy since the last look; a counter that cannot be read makes the sum unknown."""
        now = [_whole(file) for file in self._files]
        for before, after, largest in zip(self._last, now, self._ranges, strict=True):
            if self._microjoules is None or before is None or after is None or largest is None:
                self._microjoules = None
            else:
                self._microjoules += (after - before) % (largest + 1)
        self._last = now

    def joules(self) -> float | None:
        """Energy since `begin`, None if unknown."""
        self.look()
        return None if self._microjoules is None else self._microjoules / 1e6


class Gpu:
    """Energy of the GPU with this `uuid` since `begin`, by the counter of NVML (Volta and later)."""

    def __init__(self, uuid: str, library: str = NVML) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        self._begun: int | None = None
        with suppress(OSError, AttributeError):
            found = ctypes.CDLL(library)
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            if found.nvmlInit_v2() == 0 and (
                found.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._device)) == 0
            ):
                self._library = found

    def begin(self) -> None:
        """Start counting at zero."""
        self._begun = self._read()

    def joules(self) -> float | None:
        """Energy since `begin`, None if unknown."""
        now = self._read()
        return None if now is None or self._begun is None else (now - self._begun) / 1e3

    def _read(self) -> int | None:
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        with suppress(AttributeError):
            if self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules)) == 0:
                return millijoules.value
        return None


def slurm_joules() -> float | None:
    """Energy of this job by Slurm's accounting; None outside a job and without accounting."""
    job, program = os.environ.get("SLURM_JOB_ID"), shutil.which("sstat")
    if not job or program is None:
        return None
    command = [program, "--jobs", job, "--allsteps", "--noheader", "--parsable2", "--format=ConsumedEnergyRaw"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_S, check=True).stdout
        return sum(float(line) for line in output.split()) or None
    return None


@dataclass(frozen=True)
class Reading:
    """Joules read by one worker: of its node (by the first worker there), its GPU, the job (by worker 0)."""

    first_on_node: bool
    on_gpu: bool
    node: float | None = None
    gpu: float | None = None
    job: float | None = None


class Meter:
    """The energy counters that one worker reads."""

    def __init__(
        self, *, first_on_node: bool, first: bool, gpu: str | None, slurm: Callable[[], float | None] = slurm_joules
    ) -> None:
        self._first_on_node = first_on_node
        self._rapl = Rapl(POWERCAP) if first_on_node else None
        self._gpu = Gpu(gpu) if gpu else None
        self._slurm = slurm if first else lambda: None
        self._job: float | None = None

    def begin(self) -> None:
        self._job = self._slurm()
        for counter in (self._rapl, self._gpu):
            if counter is not None:
                counter.begin()

    def look(self) -> None:
        """Read the counters; call it some times in a run, as they wrap around."""
        if self._rapl is not None:
            self._rapl.look()

    def end(self) -> Reading:
        node = self._rapl.joules() if self._rapl is not None else None
        gpu = self._gpu.joules() if self._gpu is not None else None
        job = None if self._job is None or (now := self._slurm()) is None else now - self._job
        return Reading(self._first_on_node, self._gpu is not None, node, gpu, job)


def total(readings: Sequence[Reading]) -> tuple[float, str] | None:
    """Joules of a run and their source, from the readings of all workers; None if unknown."""
    node = _sum([reading.node for reading in readings if reading.first_on_node])
    gpus = [reading.gpu for reading in readings if reading.on_gpu]
    gpu = _sum(gpus)
    if gpus:
        found = [(gpu, "nvml")] if node is None else [(node, "rapl"), (gpu, "nvml")]
    else:
        found = [(node, "rapl")]
    joules, source = _sum([part for part, _ in found]), "+".join(name for _, name in found)
    if joules is None:
        joules, source = _sum([reading.job for reading in readings if reading.job is not None]), "slurm"
    return (joules, source) if joules is not None and joules > 0 else None


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _whole(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
