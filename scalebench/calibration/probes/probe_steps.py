"""Steps of a script with the hooks and wrappers of an engine, beside reference steps."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence

from scalebench.calibration.probes.probe_rounds import Operation, ProbeRounds, sleep_until_all_arrive
from scalebench.calibration.probes.probe_samples import Found, Key, Sample
from scalebench.comm.engines import named
from scalebench.comm.engines.base import Place
from scalebench.system.stopwatch import Stopwatch
from scalebench.training.reference_step import Step

_PAIRS, _STEPS = 12, 4  # windows of an engine's step in a round, and steps of each


def of_a_lone_worker(
    engine: str,
    rounds: ProbeRounds,
    wrap: Callable[[], Step],
    others: Callable[[], Sequence[Sample]] = tuple,
) -> list[Sample]:
    """Time steps of a lone worker that `wrap` makes for the engine, relative to reference steps beside them.

    First of rank 0 while the others sleep, then of all ranks at the same time; `others` are timed after them.
    """
    group = rounds.mpi.Split(rounds.mpi.rank)
    samples = []
    with named(engine).connect(Place(group, rounds.clock, one_node=True)):
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
    rounds: ProbeRounds, key: Key, step: Operation, compared: Callable[[float, float], float]
) -> list[Sample]:
    """Time windows of `step`, each `compared` with the reference step beside it: their difference or ratio.

    Both follow untimed steps: reading the counters, and other steps, evict caches.
    """
    samples = []
    for _ in range(_PAIRS):
        stopwatch = Stopwatch(computes=False, shares_cores=True)  # DDP's main thread waits for gloo's on this core
        rounds.gauge.steps(_STEPS)
        reference_s = rounds.gauge.steps(_STEPS)
        for _ in range(_STEPS):
            step()
        began = time.perf_counter()
        for _ in range(_STEPS):
            step()
        seconds = (time.perf_counter() - began) / _STEPS
        samples.append(Sample(key, compared(seconds, reference_s), stopwatch.stop().undisturbed))
    return samples


def added_by_hooks(found: Found) -> tuple[float, float]:
    """Seconds, at least zero, of the engine's step beyond the reference step: of one worker, and of all at once."""
    alone, together = (found.seconds((name, 0), relative=False) - 1.0 for name in ("alone", "together"))
    return max(0.0, alone) * found.reference_s, max(0.0, together) * found.reference_s
