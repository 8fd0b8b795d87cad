"""Detection of disturbed windows, and the median of undisturbed ones."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from scalebench.system import disturbance
from scalebench.system.disturbance import (
    COMPUTED,
    DELAY,
    FEWEST,
    PRECISION,
    BackgroundLoad,
    Stopwatch,
    Window,
    disturbed,
    own_and_children_s,
    taken_by,
    typical,
)

SPIN = "import time\nwhile time.process_time() < {}: pass"


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
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: here.wall)
    monkeypatch.setattr(disturbance.time, "thread_time", lambda: here.cpu)
    monkeypatch.setattr(disturbance, "_waited_for_core_s", lambda: here.waited)
    monkeypatch.setattr(disturbance, "_steal_ticks", lambda: here.steal)
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
        assert started.wait()
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


def test_load_counts_other_processes_only():
    program = "print(flush=True)\nwhile True: pass"
    # a child that has not ended
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()  # it spins
        others = BackgroundLoad()
        time.sleep(0.5)
        with_other = others.cores()
    finally:
        other.kill()
        other.communicate()
    assert with_other > 0.1  # a core, or its part of one on a busy machine


def test_children_that_run_can_be_counted_as_own(stand_still):
    child = psutil.Popen([sys.executable, "-c", "while True: pass"])
    try:
        others = BackgroundLoad(own_and_children_s)
        compute_for(child, 0.3)
        halt(child)
        with stand_still() as now:
            with_child, own = others.cores(), own_and_children_s() - others._own
            others._taken = lambda: others._own  # as if neither did anything
            assert own > 0.2
            # ticks of 10 ms
            excluded_s = (others.cores() - with_child) * (now - others._began)
            assert excluded_s == pytest.approx(own, abs=0.05)
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def stand_still(monkeypatch):
    """Freeze time and machine counters as seen by `BackgroundLoad`."""

    @contextmanager
    def still():
        now, busy = time.perf_counter(), disturbance._busy_s(os.sched_getaffinity(0))
        with monkeypatch.context() as patch:
            patch.setattr(
                disturbance, "time", SimpleNamespace(perf_counter=lambda: now)
            )
            patch.setattr(disturbance, "_busy_s", lambda cores: busy)
            yield now

    return still


def test_own_work_and_ended_children_are_excluded(monkeypatch, stand_still):
    others, own, began = BackgroundLoad(), process_and_children_s(), time.perf_counter()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    subprocess.run([sys.executable, "-c", SPIN.format(0.3)], check=True)
    with stand_still() as now:
        own = process_and_children_s() - own
        without = others.cores()
        # as if this one did nothing
        monkeypatch.setattr(others, "_taken", lambda: others._own)
        assert own > 0.4
        # ticks of 10 ms
        excluded_s = (others.cores() - without) * (now - began)
        assert excluded_s == pytest.approx(own, abs=0.05)


def process_and_children_s():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def test_load_above_a_quarter_of_the_cores_disturbs():
    assert not disturbed(0.0)
    assert disturbed(1e6)


def test_processes_of_a_launch_are_excluded(stand_still):
    rank = psutil.Popen([sys.executable, "-c", "while True: pass"])
    spent = taken_by([rank.pid])
    try:
        halt(rank)
        with stand_still() as began:
            theirs, launch, stranger = (
                spent(),
                BackgroundLoad(spent),
                BackgroundLoad(lambda: 0.0),
            )
        rank.resume()
        compute_for(rank, 0.3)
        halt(rank)
        with stand_still() as now:
            own = spent() - theirs
            assert own > 0.2
            # ticks of 10 ms
            excluded_s = (stranger.cores() - launch.cores()) * (now - began)
            assert excluded_s == pytest.approx(own, abs=0.05)
            assert stranger.share() == min(
                1.0, stranger.cores() / len(os.sched_getaffinity(0))
            )
    finally:
        rank.kill()
        rank.wait()
    assert spent() == 0.0, "one that has ended tells nothing"


def compute_for(process, seconds):
    """Wait until a process has computed for so long: on a busy machine that takes longer."""
    until = sum(process.cpu_times()[:2]) + seconds
    while sum(process.cpu_times()[:2]) < until:
        time.sleep(0.01)


def halt(process):
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)


def test_share_over_too_short_a_time_is_none(monkeypatch):
    others = BackgroundLoad()
    monkeypatch.setattr(others, "_began", time.perf_counter() + 60)
    assert others.share() is None
    monkeypatch.setattr(others, "_began", time.perf_counter() - 1)
    assert 0.0 <= others.share() <= 1.0
