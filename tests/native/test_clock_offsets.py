"""Offsets of clocks: ranks whose clocks are set apart by a known time, and nodes with a clock of their own."""

from __future__ import annotations

import time

import pytest

from scalebench.native.timeline import ClockOffset, align, clock_offsets
from scalebench.training.outcome import Lap, Outcome, WorkerReport
from tests.comm.test_control import on_each

AHEAD = (0.0, 3600.0, -0.25)  # seconds, by rank


def test_offsets_are_found_within_their_error():
    def program(world):
        ahead = AHEAD[world.rank]
        return clock_offsets(
            world, lambda: time.time() + ahead, lambda: time.perf_counter() - 2 * ahead
        )

    found, _ = on_each(3, program)
    assert found[1] is found[2] is None, "rank 0 alone knows them"
    assert found[0][0] == ClockOffset(), "against itself"
    for offset, ahead in zip(found[0][1:], AHEAD[1:], strict=True):
        assert offset.error_s > 0
        # 0.1 ms: two clocks are read in turn
        assert offset.wall_s == pytest.approx(ahead, abs=offset.error_s + 1e-4)
        assert offset.monotonic_s == pytest.approx(
            -2 * ahead, abs=offset.error_s + 1e-4
        )


def report(rank, *laps):
    return WorkerReport(
        rank,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
        1,
        0,
        0,
        [],
        laps=[Lap(*lap) for lap in laps],
    )


def test_laps_of_several_nodes_are_drawn_on_one_clock():
    """Worker 1 works from 0.5 to 1 s by worker 0's clock; its own is 100 s ahead."""
    zero = time.perf_counter()
    workers = [
        report(0, ("forward", zero, zero + 1)),
        report(1, ("forward", zero + 100.5, zero + 101)),
    ]
    outcome = Outcome("run", "completed", workers=workers)
    align(outcome, None, (), [ClockOffset(), ClockOffset(monotonic_s=100.0)])
    assert [tuple(worker.laps[0]) for worker in workers] == [
        ("forward", 0.0, pytest.approx(1.0)),
        ("forward", pytest.approx(0.5), pytest.approx(1.0)),
    ]
