"""What a worker computes on and how much memory it took: of this process and of its device."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from scalebench.errors import EngineError


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def gpu_name(device: torch.device) -> str:
    """What tells it from every other GPU, of this node and of others; which number it has depends on who asks."""
    return str(torch.cuda.get_device_properties(device).uuid)


def require_gpus_of_their_own(names: Sequence[str]) -> None:
    """NCCL takes one rank for each GPU.

    Raises:
        EngineError: two workers have the same; `names` are of all workers, in their order.
    """
    for worker, name in enumerate(names):
        if (first := names.index(name)) < worker:
            raise EngineError(
                f"engine nccl takes a GPU for each worker, but workers {first} and {worker} share one "
                f"({len(set(names))} GPUs for {len(names)} workers); start fewer on a node, or use --engine gloo"
            )


def forget_peak_memory(device: torch.device) -> None:
    """A launch serves many runs: the kernel's high-water mark is put back before each."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> tuple[float, float | None]:
    """MiB of this process since `forget_peak_memory`, and of the device."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) / 1024
    on_device = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return peak, on_device
