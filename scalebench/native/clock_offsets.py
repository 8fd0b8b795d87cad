"""Offsets of the clocks of several nodes against that of rank 0, by an exchange of messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from scalebench.comm.control import Control

_ROUNDS = 10


@dataclass(frozen=True)
class ClockOffset:
    """How far the clocks of a worker are ahead of those of rank 0, in seconds, each true to within `error_s`.

    `wall_s` is that of the time of day, which log files have; `monotonic_s` that of the clock by which durations are
    measured, which begins with the boot of a node.
    """

    wall_s: float = 0.0
    monotonic_s: float = 0.0
    error_s: float = 0.0


def clock_offsets(
    group: Control,
    wall: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.perf_counter,
) -> list[ClockOffset] | None:
    """Return the offset of each rank of `group` on rank 0; None on the others.

    Cristian (1989, doi:10.1007/BF01784024): rank 0 asks all at t0, a rank answers with its time T, and the last answer
    is here at t1. T was read between t0 and t1, so the offset is T - (t0 + t1) / 2, wrong by at most (t1 - t0) / 2. The
    shortest of some rounds counts. It holds for collectives of any kind, as far as rank 0 is the first to begin.
    """
    found: list[ClockOffset] | None = None
    for _ in range(_ROUNDS):
        group.Barrier()  # all are here: no round waits for a rank that is late
        began = monotonic()
        began_wall = wall()
        group.bcast(None)
        times = group.gather((wall(), monotonic()))
        if times is None:
            continue
        half = (monotonic() - began) / 2
        if found is None or half < found[-1].error_s:
            found = [
                ClockOffset(there_wall - (began_wall + half), there - (began + half), half)
                for there_wall, there in times
            ]
            found[0] = ClockOffset()  # rank 0 has no offset against itself
    return found
