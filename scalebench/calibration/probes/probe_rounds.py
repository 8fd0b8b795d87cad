"""Rounds of timed windows among a group of ranks, each round beside a reference step of rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

from mpi4py import MPI

from scalebench.calibration.probes.probe_samples import Found, Key, Sample, Samples
from scalebench.calibration.quiet_rounds import Until, quiet_rounds
from scalebench.system.background_load import BackgroundLoad, taken_by
from scalebench.system.clock import WallClock
from scalebench.system.stopwatch import Stopwatch
from scalebench.training.reference_step import Gauge

CYCLE_S = 1e-3  # Horovod's default; it keeps the cycle of its last start where none is stated
_WINDOW_S = 3e-3  # aimed at; at least one operation
_MOST = 100  # operations of a window
_ROUNDS, _FEWEST_ROUNDS = 5, 2  # at least, within the time and within twice the time
_OTHERS = 0.2  # share of the cores that others may take in a round of engines with threads of their own
_LARGE, _FEW, _SOME = 1 << 20, 2, 8  # bytes, and operations of a window with more and with less
_PAUSES = 12  # operations of a window that each follow some computing, from none to a cycle long

Operation = Callable[[], object]


class ProbeRounds:
    """Times operations among the ranks of `mpi`, for `seconds` at most; all ranks call each method together."""

    def __init__(self, mpi: MPI.Comm, seconds: float) -> None:
        self.mpi, self._seconds = mpi, seconds
        self.clock = WallClock()
        self.gauge = Gauge()
        self._family = (os.getppid(), *mpi.allgather(os.getpid()))  # mpirun, bound to no core, and the ranks

    def measure(self, one_round: Callable[[], list[Sample]], *, relative: bool) -> Found:
        """Repeat `one_round` until all costs are precise or the time is over; `relative`: to the reference step.

        Beside many busy programs one round may take longer than all rounds may: a second one may take as long again.
        """
        until: Until[Samples] = Until(
            self._seconds,
            fewest=_FEWEST_ROUNDS,
            patience=2.0,
            least=_ROUNDS,
            precise=lambda rounds: Found(rounds).precise(relative=relative),
        )
        rounds = quiet_rounds(
            lambda: self._samples(one_round, relative=relative),
            self._reference,
            lambda rounds: self.mpi.bcast(until(rounds) if self.mpi.rank == 0 else None),
        )
        return Found(rounds)

    def _samples(self, one_round: Callable[[], list[Sample]], *, relative: bool) -> Samples:
        """Return the samples of all ranks; threads of engines' own disturb each other, so that others' load decides."""
        background = BackgroundLoad(taken_by(self._family), of=self._family[0])
        samples = self.mpi.allgather(one_round())
        if not relative and (background.share() or 0.0) > _OTHERS:
            return [[sample._replace(undisturbed=False) for sample in own] for own in samples]
        return samples

    def _reference(self) -> float:
        """Time of the reference step on rank 0 while the others sleep."""
        sleep_until_all_arrive(self.mpi)
        seconds = self.gauge.seconds() if self.mpi.rank == 0 else None
        sleep_until_all_arrive(self.mpi)
        return float(self.mpi.bcast(seconds))

    def window(self, key: Key, operation: Operation, *, least: int = 1, together: bool = False) -> Sample:
        """Time a window of `operation` on this rank, or `together` on all ranks, equally often."""
        operation()
        began = time.perf_counter()
        operation()
        trial_s = time.perf_counter() - began
        count = int(min(_MOST, max(least, _WINDOW_S / max(trial_s, 1e-7))))
        count = self.mpi.bcast(count) if together else count
        stopwatch = Stopwatch(computes=False)
        for _ in range(count):
            operation()
        seconds, undisturbed = stopwatch.stop()
        return Sample(key, seconds / count, undisturbed)

    def after_a_step(self, key: Key, operation: Operation) -> Sample:
        """Time a window of operations, each after a reference step, so that caches are as in training.

        A barrier lies between the two: waiting for other ranks is not part of the cost of an operation.
        """
        operation()
        steps = _FEW if key[1] > _LARGE else _SOME
        stopwatch, each = Stopwatch(computes=False), []
        for _ in range(steps):
            self.gauge.steps(1)
            self.mpi.Barrier()
            began = time.perf_counter()
            operation()
            each.append(time.perf_counter() - began)
        return Sample(key, fmean(each), stopwatch.stop().undisturbed, tuple(each))

    def after_computing(self, key: Key, operation: Operation) -> Sample:
        """Time a window of operations, each after computing for none to one cycle, so that it starts at any phase."""
        operation()
        stopwatch = Stopwatch(computes=False, shares_cores=True)
        each = []
        for place in range(_PAUSES):
            ready = time.perf_counter() + (place + 0.5) / _PAUSES * CYCLE_S
            while (began := time.perf_counter()) < ready:
                pass
            operation()
            each.append(time.perf_counter() - began)
        return Sample(key, fmean(each), stopwatch.stop().undisturbed, tuple(each), in_phases=True)

    def one_by_one(self, key: Key, operation: Operation, count: int) -> list[Sample]:
        """Time `count` operations, each for itself, one after the other."""
        operation()
        stopwatch, moments = Stopwatch(computes=False, shares_cores=True), [time.perf_counter()]
        for _ in range(count):
            operation()
            moments.append(time.perf_counter())
        undisturbed = stopwatch.stop().undisturbed
        return [Sample(key, after - before, undisturbed) for before, after in pairwise(moments)]


def sleep_until_all_arrive(group: MPI.Comm) -> None:
    """Wait at a barrier without taking the core from ranks that still measure."""
    done = group.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)
