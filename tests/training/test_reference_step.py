"""The gauge of the machine's speed, on quiet and on busy machines."""

from __future__ import annotations

import time

import pytest

from scalebench.system.disturbance import Stopwatch, Window
from scalebench.training.reference_step import Gauge


@pytest.mark.parametrize("undisturbed", [True, False])
def test_time_for_which_the_thread_waits_for_a_core_is_left_out_of_disturbed_windows(
    undisturbed, monkeypatch
):
    gauge = Gauge()
    plain = gauge._step
    pause_s = 0.002

    def interrupted():
        plain()
        time.sleep(pause_s)  # as if another program had the core

    monkeypatch.setattr(gauge, "_step", interrupted)
    monkeypatch.setattr(Stopwatch, "stop", lambda _: Window(1.0, undisturbed))
    processor_s = time.thread_time()
    seconds = gauge.seconds()
    processor_s = time.thread_time() - processor_s
    assert seconds > 0
    if undisturbed:
        assert seconds > pause_s
    else:
        assert seconds < processor_s, "one step takes less than all of them together"
