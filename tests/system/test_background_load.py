import os
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from scalebench.system import background_load as background
from scalebench.system.background_load import (
    BackgroundLoad,
    disturbed,
    own_and_children_s,
    taken_by,
)

SPIN = "import time; end = time.perf_counter() + {}; [None for _ in iter(lambda: time.perf_counter() < end, False)]"


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
        time.sleep(0.5)
        halt(child)
        with stand_still() as now:
            with_child, own = others.cores(), own_and_children_s() - others._own
            others._taken = lambda: others._own  # as if neither did anything
            assert own > 0.05
            assert others.cores() - with_child == pytest.approx(
                own / (now - others._began), abs=0.05
            )
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def stand_still(monkeypatch):
    """Freeze time and machine counters as seen by `BackgroundLoad`."""

    @contextmanager
    def still():
        now, busy = time.perf_counter(), background._busy_s(os.sched_getaffinity(0))
        with monkeypatch.context() as patch:
            patch.setattr(background, "time", SimpleNamespace(perf_counter=lambda: now))
            patch.setattr(background, "_busy_s", lambda cores: busy)
            yield now

    return still


def test_own_work_and_ended_children_are_excluded(monkeypatch, stand_still):
    others, own, began = BackgroundLoad(), process_and_children_s(), time.perf_counter()
    end = began + 0.5
    while time.perf_counter() < end:
        pass
    subprocess.run([sys.executable, "-c", SPIN.format(0.5)], check=True)
    with stand_still() as now:
        own = process_and_children_s() - own
        without = others.cores()
        # as if this one did nothing
        monkeypatch.setattr(others, "_taken", lambda: others._own)
        rate = own / (now - began)
        assert rate > 0.02
        # ticks of 10 ms
        assert others.cores() - without == pytest.approx(rate, abs=0.05)


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
        time.sleep(1.0)
        halt(rank)
        with stand_still() as now:
            rate = (spent() - theirs) / (now - began)
            assert rate > 0.05
            # ticks of 10 ms
            assert stranger.cores() - launch.cores() == pytest.approx(rate, abs=0.05)
            assert stranger.share() == min(
                1.0, stranger.cores() / len(os.sched_getaffinity(0))
            )
    finally:
        rank.kill()
        rank.wait()
    assert spent() == 0.0, "one that has ended tells nothing"


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
