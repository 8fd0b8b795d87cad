"""Clock rates of a GPU and why it is clocked down, with a fake NVML."""

from __future__ import annotations

import ctypes

from scalebench.native.sensors import Gpu, GpuClocks


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
