"""Rounds of timed windows among a group of ranks, each round beside a reference step of rank 0.

Which windows count, and the cost that follows, is said by `Found`; `of_a_lone_worker`
times steps of a script with the hooks and wrappers of an engine, beside reference
steps.
"""

from __future__ import annotations

import operator
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalebench.calibration.quiet_rounds import Round, Until, are_enough, quiet_rounds
from scalebench.cluster.engine_costs import EngineCost
from scalebench.comm.engines.base import Engine, Place
from scalebench.system.clock import WallClock, sleep_until
from scalebench.system.disturbance import BackgroundLoad, Stopwatch, taken_by, typical
from scalebench.training.reference_step import Gauge, Step

if TYPE_CHECKING:
    from mpi4py import MPI

# Horovod's default; it keeps the cycle of its last start where none is stated
CYCLE_S = 1e-3
_WINDOW_S = 3e-3  # aimed at; at least one operation
_MOST = 100  # operations of a window
_ROUNDS, _FEWEST_ROUNDS = 5, 2  # at least, within the time and within twice the time
# share of the cores that others may take in a round of engines with threads of their
# own
_OTHERS = 0.2
_LARGE, _FEW, _SOME = (
    1 << 20,
    2,
    8,
)  # bytes, and operations of a window with more and with less
# operations of a window that each follow some computing, from none to a cycle long, or
# a sleep
_PAUSES = 12
# The excess after a sleep grows up to about 10 ms, and no longer.
_SLEEP_S = 1e-2

Operation = Callable[[], object]
GRID = (4, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
_LOWER = 0.1  # quantile of disturbed times
Key = tuple[str, int]  # an operation's name, and bytes
_AFTER_SLEEPING: Key = ("after sleeping", 4 << 10)
_PAIRS, _STEPS = 12, 4  # windows of an engine's step in a round, and steps of each


class ProbeRounds:
    """Times operations among the ranks of `mpi`, for `seconds` at most; all ranks call each method together."""

    def __init__(self, mpi: MPI.Comm, seconds: float) -> None:
        self.mpi, self._seconds = mpi, seconds
        self.clock = WallClock()
        self.gauge = Gauge()
        self._family = (
            os.getppid(),
            *mpi.allgather(os.getpid()),
        )  # mpirun, bound to no core, and the ranks

    def measure(
        self, one_round: Callable[[], list[Sample]], *, relative: bool
    ) -> Found:
        """Repeat `one_round` until all costs are precise or the time is over; `relative`: to the reference step.

        Beside many busy programs one round may take longer than all rounds may: a
        second one may take as long again.
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
            lambda rounds: self.mpi.bcast(
                until(rounds) if self.mpi.rank == 0 else None
            ),
        )
        return Found(rounds)

    def _samples(
        self, one_round: Callable[[], list[Sample]], *, relative: bool
    ) -> Samples:
        """Return the samples of all ranks; threads of engines' own disturb each other, so that others' load decides."""
        background = BackgroundLoad(taken_by(self._family), of=self._family[0])
        # Every rank sees all samples, so that all decide alike.
        samples = self.mpi.allgather(one_round())
        if not relative and (background.share() or 0.0) > _OTHERS:
            return [
                [sample._replace(undisturbed=False) for sample in own]
                for own in samples
            ]
        return samples

    def _reference(self) -> float:
        """Time of the reference step on rank 0 while the others sleep."""
        sleep_until_all_arrive(self.mpi)
        seconds = self.gauge.seconds() if self.mpi.rank == 0 else None
        sleep_until_all_arrive(self.mpi)
        return float(self.mpi.bcast(seconds))

    def window(
        self, key: Key, operation: Operation, *, least: int = 1, together: bool = False
    ) -> Sample:
        """Time a window of `operation` on this rank, or `together` on all ranks, equally often."""
        operation()
        began = time.perf_counter()
        operation()
        trial_s = time.perf_counter() - began
        count = int(min(_MOST, max(least, _WINDOW_S / max(trial_s, 1e-7))))
        # A collective operation must be made equally often on all ranks.
        count = self.mpi.bcast(count) if together else count
        stopwatch = Stopwatch(computes=False)
        for _ in range(count):
            operation()
        seconds, undisturbed = stopwatch.stop()
        return Sample(key, seconds / count, undisturbed)

    def after_a_step(self, key: Key, operation: Operation) -> Sample:
        """Time a window of operations, each after a reference step, so that caches are as in training.

        A barrier lies between the two: waiting for other ranks is not part of the cost
        of an operation.
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
        return Sample(
            key, fmean(each), stopwatch.stop().undisturbed, tuple(each), in_phases=True
        )

    def after_sleeping(self, operation: Operation) -> Sample:
        """Time a window of operations on 4 KiB, before each of which all ranks sleep up to one moment, as paced ones.

        Caches have cooled then, cores rest, and threads of the engine wait to be woken.
        """
        operation()
        stopwatch = Stopwatch(computes=False, shares_cores=True)
        each = []
        for _ in range(_PAUSES):
            # The clock is one for all processes of a host.
            sleep_until(self.mpi.bcast(time.perf_counter() + _SLEEP_S))
            began = time.perf_counter()
            operation()
            each.append(time.perf_counter() - began)
        undisturbed = stopwatch.stop().undisturbed
        return Sample(_AFTER_SLEEPING, fmean(each), undisturbed, tuple(each))

    def one_by_one(self, key: Key, operation: Operation, count: int) -> list[Sample]:
        """Time `count` operations, each for itself, one after the other."""
        operation()
        stopwatch = Stopwatch(computes=False, shares_cores=True)
        moments = [time.perf_counter()]
        for _ in range(count):
            operation()
            moments.append(time.perf_counter())
        undisturbed = stopwatch.stop().undisturbed
        return [
            Sample(key, after - before, undisturbed)
            for before, after in pairwise(moments)
        ]


def sleep_until_all_arrive(group: MPI.Comm) -> None:
    """Wait at a barrier without taking the core from ranks that still measure."""
    done = group.Ibarrier()
    while not done.Test():
        time.sleep(1e-3)


class Sample(NamedTuple):
    """Seconds of one operation in one window, and whether the window was undisturbed.

    `each` has the seconds of single operations where they were timed, `in_phases` if
    each began at another phase of a cycle, the same ones in every window.
    """

    key: Key
    seconds: float
    undisturbed: bool
    each: tuple[float, ...] = ()
    in_phases: bool = False


Samples = list[list[Sample]]  # of one round, by rank


class Found:
    """The windows of all rounds so far, and the reference step of each round, in seconds.

    Of each window the first rank's time counts; it is undisturbed if it was so on every
    rank.
    """

    def __init__(self, rounds: Sequence[Round[Samples]]) -> None:
        self.references = [each.reference_s for each in rounds]
        self._windows: dict[Key, list[tuple[int, Sample]]] = {}
        for number, each in enumerate(rounds):
            for sample in _together(each.found):
                self._windows.setdefault(sample.key, []).append((number, sample))

    @property
    def reference_s(self) -> float:
        """Mean reference step of all rounds, as for a run: a shared machine changes between two speeds."""
        return fmean(self.references)

    def values(self, key: Key, *, relative: bool) -> list[float]:
        """Seconds of the undisturbed windows, at the mean reference step if `relative`.

        If fewer than FEWEST were undisturbed, the lower decile of all takes their
        place, as other programs only add to a time: of single operations by their
        phase, where these were timed, and of windows elsewhere.
        """
        windows = self._windows[key]
        scales = [
            self.reference_s / self.references[number] if relative else 1.0
            for number, _ in windows
        ]
        kept = [
            scale * one.seconds
            for scale, (_, one) in zip(scales, windows, strict=True)
            if one.undisturbed
        ]
        if are_enough(len(kept), len(windows)):
            return kept
        each = [one.each or (one.seconds,) for _, one in windows]
        table = np.array(scales)[:, None] * np.array(each)
        # of one round the operations are all there is
        if len(windows) == 1 and not windows[0][1].in_phases:
            table = table.T
        return [float(np.quantile(table, _LOWER, axis=0).mean())]

    def seconds(self, key: Key, *, relative: bool = True) -> float:
        """Median cost of an operation; zero where the step before it, which is subtracted, was disturbed more."""
        return max(0.0, typical(self.values(key, relative=relative)).value)

    def least(self, key: Key, *, relative: bool = True) -> float:
        """10 % quantile of the windows: the cost without waits of the operation's own threads for a core."""
        return max(0.0, float(np.quantile(self.values(key, relative=relative), 0.1)))

    def curve(
        self, name: str, grid: Sequence[int], *, relative: bool = True
    ) -> list[tuple[int, float]]:
        """(bytes, seconds) of an operation."""
        return [
            (nbytes, self.seconds((name, nbytes), relative=relative)) for nbytes in grid
        ]

    def pause_s(self, name: str, *, relative: bool) -> float:
        """Return the seconds by which an operation costs more after its ranks slept, at least zero.

        They depend on what has to wake up and not on the bytes: 4 KiB stand for all.
        """
        _, nbytes = _AFTER_SLEEPING
        costs = [
            self.seconds(key, relative=relative)
            for key in (_AFTER_SLEEPING, (name, nbytes))
        ]
        return max(0.0, costs[0] - costs[1])

    def share_undisturbed(self) -> float:
        """Share of all windows that were undisturbed."""
        flags = [
            one.undisturbed for windows in self._windows.values() for _, one in windows
        ]
        return sum(flags) / len(flags) if flags else 1.0

    def precise(self, *, relative: bool) -> bool:
        """Return True if each cost is known precisely and no larger message costs less than a smaller one."""
        if not all(
            typical(self.values(key, relative=relative)).precise
            for key in self._windows
        ):
            return False
        curves: dict[str, list[float]] = {}
        for name, nbytes in sorted(self._windows):
            curves.setdefault(name, []).append(
                self.seconds((name, nbytes), relative=relative)
            )
        return all(
            a <= b * 1.02 for curve in curves.values() for a, b in pairwise(curve)
        )


def _together(samples: Samples) -> Iterator[Sample]:
    """Yield the windows of one round, of which each rank has a sample: those of one key in their order."""
    windows: dict[tuple[Key, int], list[Sample]] = {}
    for of_rank in samples:
        seen: Counter[Key] = Counter()
        for sample in of_rank:
            windows.setdefault((sample.key, seen[sample.key]), []).append(sample)
            seen[sample.key] += 1
    for own in windows.values():
        yield own[0]._replace(undisturbed=all(sample.undisturbed for sample in own))


def entry(
    name: str,
    points: Sequence[tuple[int, float]],
    *,
    ranks: int,
    source: str,
    nodes: int = 1,
    **others: float,
) -> EngineCost:
    """The largest costs within `points`, (bytes, seconds), that never fall with the bytes."""
    # A larger message that took less time shows that the smaller one was delayed: other
    # programs only add to a time.
    costs = np.minimum.accumulate([seconds for _, seconds in reversed(points)])[
        ::-1
    ].tolist()
    curve = [
        (nbytes, seconds) for (nbytes, _), seconds in zip(points, costs, strict=True)
    ]
    return EngineCost(
        engine=name,
        ranks=ranks,
        nodes=nodes,
        alpha_s=costs[0],
        points=curve,
        source=source,
        **others,
    )


def of_a_lone_worker(
    engine: Engine,
    rounds: ProbeRounds,
    wrap: Callable[[], Step],
    others: Callable[[], Sequence[Sample]] = tuple,
) -> list[Sample]:
    """Time steps of a lone worker that `wrap` makes for the engine, relative to reference steps beside them.

    First of rank 0 while the others sleep, then of all ranks at the same time; `others`
    are timed after them.
    """
    group = rounds.mpi.Split(rounds.mpi.rank)
    samples = []
    with engine.connect(Place(group, rounds.clock, one_node=True)):
        wrapped = wrap()
        if rounds.mpi.rank == 0:
            samples += beside_reference(rounds, ("alone", 0), wrapped, operator.truediv)
        sleep_until_all_arrive(rounds.mpi)
        samples += beside_reference(rounds, ("together", 0), wrapped, operator.truediv)
        samples += others()
        del wrapped
    group.Free()
    return samples


def beside_reference(
    rounds: ProbeRounds,
    key: Key,
    step: Operation,
    compared: Callable[[float, float], float],
) -> list[Sample]:
    """Time windows of `step`, each `compared` with the reference step beside it: their difference or ratio.

    Both follow untimed steps: reading the counters, and other steps, evict caches.
    """
    samples = []
    for _ in range(_PAIRS):
        # DDP's main thread waits for gloo's on this core
        stopwatch = Stopwatch(computes=False, shares_cores=True)
        rounds.gauge.steps(_STEPS)
        reference_s = rounds.gauge.steps(_STEPS)
        for _ in range(_STEPS):
            step()
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        seconds = (time.perf_counter() - began) / _STEPS
        samples.append(
            Sample(key, compared(seconds, reference_s), stopwatch.stop().undisturbed)
        )
    return samples


def added_by_hooks(found: Found) -> tuple[float, float]:
    """Seconds, at least zero, of the engine's step beyond the reference step: of one worker, and of all at once."""
    alone, together = (
        found.seconds((name, 0), relative=False) - 1.0 for name in ("alone", "together")
    )
    return max(0.0, alone) * found.reference_s, max(0.0, together) * found.reference_s
