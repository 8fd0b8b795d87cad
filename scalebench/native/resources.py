"""The device of a worker, and the peak memory of its process and of the device."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from scalebench.errors import EngineError
from scalebench.records.machine import cpu_model


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
    on_device = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return peak, on_device
