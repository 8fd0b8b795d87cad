"""Energy of a run: processors of the nodes by RAPL and GPUs by NVML, else the job by Slurm's accounting.

RAPL and Slurm count whole nodes, idle cores and other programs included. If a part cannot be read, the run has no
energy: neither the sum of the other parts nor zero would be right.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from scalebench.native.nvml import Gpu

POWERCAP = Path("/sys/class/powercap")
_SLURM_S = 10.0  # longest wait for an answer
_UNKNOWN_TO_SLURM = (2.0**32 - 2, 2.0**64 - 2)  # its NO_VAL and NO_VAL64
_SOURCES = ("rapl", "nvml", "slurm")

Joules = dict[str, float | None]  # by source; None is a counter that could not be read


class Counter:
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
                    if math.isinf(largest)
                    else (after - before) % (largest + 1)
                )
        self._last = now

    def joules(self) -> float | None:
        """Energy since `begin`, None if unknown."""
        self.look()
        return None if self._counted is None else self._counted / self._per_joule


def rapl(root: Path) -> Counter:
    """The counter of this node's packages, and of memory that is counted apart."""
    files = [
        zone / "energy_uj"
        for zone in sorted(root.glob("intel-rapl:*"))
        if (name := _text(zone / "name")).startswith("package") or name == "dram"
    ]
    largest = [_whole(file.with_name("max_energy_range_uj")) for file in files]
    return Counter(lambda: [_whole(file) for file in files], 1e6, largest)


def nvml(gpu: Gpu) -> Counter:
    """The counter of a GPU, by NVML."""
    return Counter(lambda: [gpu.millijoules()], 1e3)


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


class Meter:
    """The energy counters that one worker reads: of its node (`first_on_node`), its GPU, the job (`first`)."""

    def __init__(
        self,
        *,
        first_on_node: bool,
        first: bool,
        gpu: Gpu | None,
        slurm: Callable[[], Mapping[str, float]] = slurm_joules,
    ) -> None:
        self._rapl = rapl(POWERCAP) if first_on_node else None
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


def total(readings: Sequence[Joules]) -> tuple[float, str] | None:
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


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _whole(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
