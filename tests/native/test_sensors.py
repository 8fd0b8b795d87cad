"""The processor of a worker, read from a kernel's files, and its GPU, with a fake NVML."""

from __future__ import annotations

import ctypes
import os

import pytest

from scalebench.errors import EngineError
from scalebench.native.sensors import (
    Cores,
    Gpu,
    GpuClocks,
    clock_rate,
    require_gpus_of_their_own,
    throttle_counters,
)
from tests.facts import naming


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def kernel(tmp_path):
    """Four cores at 1.0, 1.1, 1.2 and 1.3 GHz, which were throttled 0, 1, 2 and 3 times, their package 7 times."""
    for core in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}"
        write(folder / "cpufreq/scaling_cur_freq", f"{1_000_000 + 100_000 * core}\n")
        write(folder / "thermal_throttle/core_throttle_count", f"{core}\n")
        write(folder / "thermal_throttle/package_throttle_count", "7\n")
    return tmp_path


def test_the_clock_rate_is_the_mean_of_the_cores_in_mhz(kernel):
    assert clock_rate({1, 3}, kernel) == pytest.approx(1200)


def test_without_cpufreq_the_clock_rate_is_that_of_cpuinfo(tmp_path):
    table = "".join(
        f"processor\t: {core}\nmodel name\t: X\ncpu MHz\t\t: {2000 + core}.5\n\n"
        for core in range(4)
    )
    write(tmp_path / "proc/cpuinfo", table)
    assert clock_rate({0, 2}, tmp_path) == pytest.approx(2001.5)


def test_what_a_kernel_does_not_report_is_unknown(tmp_path):
    assert clock_rate({0}, tmp_path) is None
    assert throttle_counters({0}, tmp_path) == ()
    nothing = Cores(frozenset({0}), None, ())
    assert nothing.throttled_since(nothing) is None


def test_the_most_throttled_core_counts(kernel):
    before = throttle_counters({0, 1}, kernel)
    assert before == (0, 7, 1, 7)
    write(
        kernel / "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count",
        "5\n",
    )
    after = Cores(frozenset({0, 1}), None, throttle_counters({0, 1}, kernel))
    assert after.throttled_since(after._replace(throttles=before)) == 4


def test_the_usable_cores_are_those_of_this_process():
    assert Cores.now().usable == os.sched_getaffinity(0)


def test_nccl_workers_that_share_a_gpu_are_refused():
    require_gpus_of_their_own(["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(
        EngineError,
        match=naming("workers 1 and 3", "3 GPUs", "4 workers", "fewer"),
    ):
        require_gpus_of_their_own(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])


def test_clock_rates_and_reasons_of_a_run_are_kept(nvml_library):
    clocks = GpuClocks(Gpu("GPU-3a5e", nvml_library))
    clocks.begin()
    clocks.look()
    assert clocks.slowdowns == "none", "an idle GPU is not clocked down"
    clocks.look()
    clocks.end()
    assert (clocks.mhz_before, clocks.mhz_after) == (1980, 1880)
    assert clocks.slowdowns == "power-cap+thermal"
    clocks.begin()
    assert clocks.slowdowns is None, "of another run"


def test_what_the_driver_does_not_know_is_none(nvml_library, tmp_path):
    for gpu in (Gpu("another", nvml_library), Gpu("3a5e", str(tmp_path / "none.so"))):
        clocks = GpuClocks(gpu)
        clocks.begin()
        clocks.end()
        assert (clocks.mhz_before, clocks.mhz_after, clocks.slowdowns) == (
            None,
            None,
            None,
        )


def test_a_driver_without_a_function_reports_the_others(nvml_library):
    gpu = Gpu("3a5e", nvml_library)
    assert gpu._asked("nvmlDeviceGetNothing", ctypes.c_uint()) is None
    assert gpu.mhz() == 1980
