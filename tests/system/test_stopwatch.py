"""Detection of disturbed windows, and the median of undisturbed ones."""

from __future__ import annotations

import math
import multiprocessing
import os
import time

import numpy as np
import pytest

from scalebench.system import stopwatch as undisturbed
from scalebench.system.stopwatch import (
    COMPUTED,
    DELAY,
    FEWEST,
    PRECISION,
    Stopwatch,
    Window,
    typical,
)


@pytest.fixture
def machine(monkeypatch):
    """Frozen clock, processor time, waits for a core in seconds, and steal ticks."""

    class Machine:
        wall = cpu = waited = 0.0
        steal = 0

        def passes(self, wall, cpu=None, waited=0.0, steal=0):
            self.wall, self.cpu = (
                self.wall + wall,
                self.cpu + (wall if cpu is None else cpu),
            )
            self.waited, self.steal = self.waited + waited, self.steal + steal

    here = Machine()
    monkeypatch.setattr(undisturbed.time, "perf_counter", lambda: here.wall)
    monkeypatch.setattr(undisturbed.time, "thread_time", lambda: here.cpu)
    monkeypatch.setattr(undisturbed, "_waited_for_core_s", lambda: here.waited)
    monkeypatch.setattr(undisturbed, "_steal_ticks", lambda: here.steal)
    return here


@pytest.mark.parametrize(
    ("options", "passed", "undisturbed"),
    [
        ({}, {}, True),
        ({}, {"waited": 0.9 * DELAY}, True),
        ({}, {"waited": 1.1 * DELAY}, False),
        ({"shares_cores": True}, {"waited": 1.1 * DELAY}, True),
        ({}, {"cpu": COMPUTED + 0.01}, True),
        ({}, {"cpu": COMPUTED - 0.01}, False),
        ({"computes": False}, {"cpu": 0.1}, True),
        ({"computes": False, "shares_cores": True}, {"steal": 1}, False),
    ],
    ids=[
        "alone",
        "waits little",
        "waits",
        "own threads wait",
        "computes",
        "is held up",
        "sleeps",
        "hypervisor",
    ],
)
def test_window_is_disturbed_by_waits_pauses_and_steal(
    machine, options, passed, undisturbed
):
    # before the first window: counts for nothing
    machine.passes(5.0, cpu=0.0, waited=5.0, steal=5)
    stopwatch = Stopwatch(**options)
    machine.passes(1.0, **passed)
    assert stopwatch.stop() == (pytest.approx(1.0), undisturbed)
    stopwatch.start()
    machine.passes(2.0)
    assert stopwatch.stop() == (pytest.approx(2.0), True), "each window for itself"


def _spin(core, started):
    os.sched_setaffinity(0, {core})
    started.set()
    while True:
        pass


def _computing(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_windows_beside_a_busy_process_on_the_same_core_are_disturbed():
    """The other process uses half of the core in time slices shorter than the window of 0.2 s."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    busy = context.Process(target=_spin, args=(core, started), daemon=True)
    busy.start()
    try:
        assert started.wait(60)
        os.sched_setaffinity(0, {core})
        windows = []
        for _ in range(5):
            stopwatch = Stopwatch()
            _computing(0.2)
            windows.append(stopwatch.stop())
    finally:
        os.sched_setaffinity(0, cores)
        busy.kill()
        busy.join()
    assert not any(window.undisturbed for window in windows), windows
    assert all(
        isinstance(window, Window) and window.seconds >= 0.2 for window in windows
    )


def test_sleeping_window_is_disturbed():
    stopwatch = Stopwatch()
    time.sleep(0.02)
    assert not stopwatch.stop().undisturbed


def test_median_needs_twelve_values_for_an_interval():
    assert math.isnan(typical([]).value)
    few = typical([1.0] * (FEWEST - 1))
    assert (few.value, few.half_width, few.n, few.precise) == (
        1.0,
        math.inf,
        FEWEST - 1,
        False,
    )
    enough = typical([1.0] * FEWEST)
    assert (enough.value, enough.half_width, enough.precise) == (1.0, 0.0, True)
    assert not typical([0.0] * FEWEST).precise, "relative to nothing"


def test_interval_is_robust_and_covers_the_median():
    calm = [1.0 + 0.001 * k for k in range(40)]
    assert typical([*calm, 100.0]).half_width < PRECISION
    assert not typical([1.0 + 0.05 * k for k in range(20)]).precise
    random = np.random.default_rng(0)
    held = 0
    for draw in random.lognormal(0.0, 0.3, (1000, 50)):
        low, high = np.sort(draw)[[18, 32]]  # 25 -+ 0.98 sqrt(50)
        found = typical(draw)
        assert found.half_width == pytest.approx((high - low) / 2 / found.value)
        held += low <= 1.0 <= high
    # 95 % and a little more, as order statistics come in steps
    assert 930 <= held <= 990
