"""A GPU by NVML, the library of NVIDIA's driver: its energy, its clock rate, and why it is clocked down.

The functions are those of nvml.h, called as by nvidia-ml-py, which needs not be
installed. What a driver or a GPU does not report is None.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

from scalebench.records.schema import NOT_SLOWED, POWER_CAP

LIBRARY = "libnvidia-ml.so.1"
_SM = 1  # NVML_CLOCK_SM
# Reason -> bits of nvmlClocksThrottleReasons; others, as an idle GPU or a rate that was
# asked for, are no fault.
_REASONS = {
    POWER_CAP: 0x4,
    "hardware": 0x8,
    "thermal": 0x20 | 0x40,
    "power-brake": 0x80,
}


class Gpu:
    """The GPU with this `uuid`."""

    def __init__(self, uuid: str, library: str = LIBRARY) -> None:
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
