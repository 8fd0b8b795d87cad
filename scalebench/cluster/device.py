"""Devices on which workers compute: peak arithmetic, memory and launch overhead; shipped by name, or YAML files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from scalebench.errors import ClusterError, nearest
from scalebench.study.spec import Name
from scalebench.study.validation import StrictModel, read_as

Dtype = Literal["float64", "float32", "tf32", "bfloat16", "float16"]


class Device(StrictModel):
    """Device of one worker. Rates below 1e9 are refused: they were given in the unit of a data sheet."""

    name: Name
    description: str = ""
    kind: Literal["gpu", "cpu"] = Field(
        "gpu", description="what its hours are counted as: GPU-hours or core-hours"
    )
    peak_flops_per_s: dict[Dtype, PositiveFloat] = Field(
        min_length=1, description="dense matrix products, by dtype"
    )
    memory_bandwidth_bytes_per_s: PositiveFloat = Field(
        description="bytes/s between the device and its memory"
    )
    # The least that any kernel takes: it bounds models of many small layers.
    launch_overhead_s: PositiveFloat = Field(
        description="seconds of a kernel that computes nothing"
    )
    memory_gib: PositiveFloat = Field(description="GiB of the device's memory")
    multiprocessors: PositiveInt | None = Field(
        None,
        description="each computes a tile of a matrix product at a time; without them tiles fill a device",
    )
    source: str = Field(
        min_length=3,
        description="source of the numbers; `assumed` with a range if there is none",
    )

    @field_validator("peak_flops_per_s")
    @classmethod
    def _flops_in_si(cls, peaks: dict[Dtype, float]) -> dict[Dtype, float]:
        for dtype, peak in peaks.items():
            if peak < 1e9:
                raise ValueError(
                    f"expected flop/s, 312 Tflop/s as 312e12, got {peak:g} for {dtype}"
                )
        return peaks

    @field_validator("memory_bandwidth_bytes_per_s")
    @classmethod
    def _bandwidth_in_si(cls, bandwidth: float) -> float:
        if bandwidth < 1e9:
            raise ValueError(f"expected bytes/s, 900 GB/s as 900e9, got {bandwidth:g}")
        return bandwidth

    @field_validator("launch_overhead_s")
    @classmethod
    def _overhead_in_si(cls, overhead: float) -> float:
        if overhead > 1e-2:
            raise ValueError(f"expected seconds, 5 us as 5e-6, got {overhead:g}")
        return overhead

    def peak(self, dtype: str) -> float:
        """Return flop/s in `dtype`. Raises ClusterError if the device states none."""
        known: dict[str, float] = dict(self.peak_flops_per_s.items())
        if dtype not in known:
            raise ClusterError(
                f"device {self.name}: no peak_flops_per_s in {dtype}; it has {', '.join(known)}"
            )
        return known[dtype]


def device_names() -> list[str]:
    """Return the names of the shipped devices."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in _shipped().iterdir()
        if entry.name.endswith(".yaml")
    )


def describe_devices() -> list[tuple[str, str]]:
    """Return (name, one-line summary) of each shipped device."""
    return [(name, load_device(name).description) for name in device_names()]


def load_device(name_or_path: str | Path) -> Device:
    """Return the shipped device of that name, or the device in that YAML file.

    Raises:
        ClusterError: unknown name (the nearest is named), unreadable file, or invalid key.
    """
    text = str(name_or_path)
    path = Path(text)
    if text in device_names():
        path = Path(str(_shipped() / f"{text}.yaml"))
    # Neither a shipped name nor a file: most likely a misspelt name.
    elif path.suffix not in {".yaml", ".yml"} and not path.is_file():
        raise ClusterError(
            f"unknown device {text!r}, and no such file; {nearest(text, device_names())}"
        )
    return read_as(path, Device, ClusterError, "device")


def _shipped() -> Any:
    return resources.files("scalebench.cluster") / "devices"
