import os
import subprocess
import sys
import time

import pytest

from scalebench.elsewhere import Elsewhere, disturbed, taken_by

SPIN = "import time; end = time.perf_counter() + {}; [None for _ in iter(lambda: time.perf_counter() < end, False)]"


def test_what_others_take_counts_and_what_this_process_takes_does_not():
    other = subprocess.Popen([sys.executable, "-c", SPIN.format(3)])  # not ended yet: as good as a stranger
    try:
        time.sleep(0.5)
        elsewhere = Elsewhere()
        time.sleep(1.0)
        with_other = elsewhere.cores()
    finally:
        other.kill()
        other.wait()
    assert with_other > 0.1  # a core, or its part of one on a busy machine


def test_own_work_and_that_of_ended_children_is_not_elsewhere(monkeypatch):
    elsewhere, own, began = Elsewhere(), process_and_children_s(), time.perf_counter()
    end = began + 0.5
    while time.perf_counter() < end:
        pass
    subprocess.run([sys.executable, "-c", SPIN.format(0.5)], check=True)
    others, elapsed = elsewhere.cores(), time.perf_counter() - began
    own = process_and_children_s() - own
    monkeypatch.setattr(elsewhere, "_taken", lambda: elsewhere._own)  # as if this one did nothing
    everything = elsewhere.cores()
    assert own / elapsed > 0.1
    assert everything - others == pytest.approx(own / elapsed, abs=0.1)  # ticks of 10 ms


def process_and_children_s():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def test_a_quarter_of_the_cores_disturbs():
    assert not disturbed(0.0)
    assert disturbed(1e6)


def test_the_processes_of_a_launch_are_not_elsewhere():
    rank = subprocess.Popen([sys.executable, "-c", SPIN.format(3)])
    try:
        time.sleep(0.2)
        cores = len(os.sched_getaffinity(0))
        began, spent = time.perf_counter(), taken_by([rank.pid])
        theirs, launch, stranger = spent(), Elsewhere(spent), Elsewhere(lambda: 0.0)
        time.sleep(1.0)
        took, without, whole = spent() - theirs, launch.cores(), stranger.cores()
        rate = took / (time.perf_counter() - began)
        assert took > 0.1
        assert whole - without == pytest.approx(rate, abs=0.1)  # ticks of 10 ms
        assert stranger.share() == pytest.approx(whole / cores, abs=0.1)
    finally:
        rank.kill()
        rank.wait()
    assert spent() == 0.0, "one that has ended tells nothing"


def test_of_an_instant_no_share_is_told(monkeypatch):
    elsewhere = Elsewhere()
    assert elsewhere.share() is None
    monkeypatch.setattr(elsewhere, "_began", elsewhere._began - 1)
    assert 0.0 <= elsewhere.share() <= 1.0
