"""A library in place of NVML, of a driver that knows the GPU 3a5e."""

from __future__ import annotations

import subprocess

import pytest

# Each reading takes 250 mJ and lowers the clock by 100 MHz; the GPU is idle, then at
# its power cap, then too hot.
NVML = """
#include <string.h>
static unsigned long long taken = 5000;
static unsigned int mhz = 1980;
static unsigned int looks = 0;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &taken;
    return strcmp(uuid, "GPU-3a5e") ? 6 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = *(unsigned long long *) device;
    taken += 250;
    return 0;
}
int nvmlDeviceGetClockInfo(void *device, int type, unsigned int *found) {
    *found = mhz;
    mhz -= 100;
    return type == 1 ? 0 : 2;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    static unsigned long long each[] = {0x1, 0x4, 0x40};
    *reasons = each[looks++ % 3];
    return 0;
}
"""


@pytest.fixture
def nvml_library(tmp_path):
    (tmp_path / "nvml.c").write_text(NVML)
    library = str(tmp_path / "libnvml.so")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True
    )
    return library
