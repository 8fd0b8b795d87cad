"""The processor of a worker, read from a kernel's files, and its GPU."""

from __future__ import annotations

import os

import pytest

from scalebench.errors import EngineError
from scalebench.native.sensors import (
    Cores,
    clock_rate,
    require_gpus_of_their_own,
    throttle_counters,
)


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
        match=r"workers 1 and 3 share one \(3 GPUs for 4 workers\); start fewer",
    ):
        require_gpus_of_their_own(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])
