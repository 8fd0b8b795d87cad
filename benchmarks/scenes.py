"""Simulated studies, each with the share of its intervals that hold what they are about.

A scene takes a noise, how many values an interval is made of, how many studies to
simulate, and a random generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.noise import SIGMA, Array, Noise, Random
from scalebench.analysis.intervals import (
    RATIO_WHEN_STOPPED,
    bootstrap_intervals,
    calibration_interval,
    difference_interval,
    level_when_stopped,
    mean_interval,
    median_interval,
    metric_interval,
    relative_width,
    unpaired_metric,
)
from scalebench.analysis.native_check import OF_A_MEDIAN, VirtualError
from scalebench.calibration.steps_under_load import BLOCKS
from scalebench.measured import Measured
from scalebench.pricing.machine import middle

AT_MOST, CI_WIDTH = 20, 0.05  # of studies with `until`

Scene = Callable[[Noise, int, int, Random], float]  # noise, n, studies, random -> share


def holds(bounds: Measured, truth: float | Array) -> float:
    """The share of the intervals offered that hold `truth`."""
    offered = np.isfinite(bounds.low)
    return float(np.mean(((bounds.low <= truth) & (truth <= bounds.high))[offered]))


def time_mean(noise: Noise, n: int, studies: int, random: Random) -> float:
    """A cell's t interval, about the median of all runs."""
    return holds(mean_interval(noise.draw(random, studies, n)), noise.median)


def time_mean_of_all(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The same interval, taken for one of the mean over all runs, which it is not offered as."""
    return holds(mean_interval(noise.draw(random, studies, n)), noise.mean)


def time_median(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(median_interval(noise.draw(random, studies, n)), noise.median)


def _stopped(logs: Array, at_least: int) -> Array:
    """After how many runs each of these cells is narrow enough, or was run for the last time."""
    runs = np.full(len(logs), AT_MOST)
    for n in range(AT_MOST - 1, at_least - 1, -1):
        runs[
            relative_width(logs[:, :n], level_when_stopped(n, at_least, AT_MOST))
            <= CI_WIDTH
        ] = n
    return runs


def _joined(found: list[Measured]) -> Measured:
    """The intervals of several groups of studies in one; `n` is that of the first group."""
    return Measured(
        *(np.concatenate(part) for part in list(zip(*found, strict=True))[:3]),
        found[0].n,
    )


def _when_stopped(
    values: Array, runs: Array, bounds: Callable[[Array, int], Measured]
) -> Measured:
    """Intervals of the first `runs` values of each row."""
    found = [bounds(values[runs == n, :n], int(n)) for n in np.unique(runs)]
    return _joined(found)


def time_until(
    noise: Noise, n: int, studies: int, random: Random, times: float
) -> float:
    """`until: {ci_width: 5%, at_least: n, at_most: 20}`, of runs that are so many `times` as noisy."""
    logs = times * noise.draw(random, studies, AT_MOST)
    found = _when_stopped(
        logs,
        _stopped(logs, n),
        lambda own, runs: mean_interval(own, level_when_stopped(runs, n, AT_MOST)),
    )
    return holds(found, times * noise.median)


def median_until(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The median of such cells, where they have enough runs for one."""
    logs = noise.draw(random, studies, AT_MOST)
    return holds(
        _when_stopped(logs, _stopped(logs, n), lambda own, _: median_interval(own)),
        noise.median,
    )


def ratio_until(noise: Noise, n: int, studies: int, random: Random) -> float:
    """Such a cell against a baseline that is run as often, by round: 2.5 % of noise of its own and 5 % of the round."""
    shared = random.normal(0.0, SIGMA, (studies, AT_MOST))
    cell, baseline = (
        shared + noise.draw(random, studies, AT_MOST) / 2 for _ in range(2)
    )
    found = _when_stopped(
        baseline - cell,
        _stopped(cell, n),
        lambda own, _: mean_interval(own, RATIO_WHEN_STOPPED),
    )
    return holds(found, 0.0)


def independent_until(noise: Noise, n: int, studies: int, random: Random) -> float:
    """Welch's interval of two such cells, of two studies; 5 % of noise."""
    first, second = (noise.draw(random, studies, AT_MOST) for _ in range(2))
    stops = _stopped(first, n), _stopped(second, n)
    found = []
    for a in np.unique(stops[0]):
        for b in np.unique(stops[1]):
            both = (stops[0] == a) & (stops[1] == b)
            found.append(
                difference_interval(
                    first[both, :a], second[both, :b], RATIO_WHEN_STOPPED
                )
            )
    return holds(_joined(found), 0.0)


def _pairs(noise: Noise, n: int, studies: int, random: Random) -> Array:
    """Log ratios of two cells whose rounds share noise; both have their own, and their own delays."""
    shared = random.normal(0.0, 2 * SIGMA, (studies, n))
    return (shared + noise.draw(random, studies, n)) - (
        shared + noise.draw(random, studies, n)
    )


def ratio_paired(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(mean_interval(_pairs(noise, n, studies, random)), 0.0)


def ratio_median(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(median_interval(_pairs(noise, n, studies, random)), 0.0)


def ratio_independent(
    noise: Noise, n: int, studies: int, random: Random, more: int = 0
) -> float:
    """Welch's interval of two cells with the same noise, the other of which has so many runs more."""
    return holds(
        difference_interval(
            noise.draw(random, studies, n), noise.draw(random, studies, n + more)
        ),
        0.0,
    )


def ratio_unequal(
    noise: Noise, n: int, studies: int, random: Random, more: int = 0
) -> float:
    """The same where the one with fewer runs has three times the other's spread and no delays."""
    wide = random.normal(0.0, 3 * SIGMA, (studies, n))
    return holds(
        difference_interval(wide, noise.draw(random, studies, n + more)), -noise.median
    )


def time_bootstrap(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The bootstrap interval, about the trimmed mean of all runs; 1,000 resamples."""
    bounds = bootstrap_intervals(
        noise.draw(random, studies, n), resamples=1000, random=random
    )
    return holds(bounds, noise.middle)


def ratio_bootstrap(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(
        bootstrap_intervals(
            _pairs(noise, n, studies, random), resamples=1000, random=random
        ),
        0.0,
    )


def _calibrations(noise: Noise, n: int, studies: int, random: Random) -> Array:
    """Errors of `n` virtual repetitions on logs: each draws from the blocks of steps that were measured once."""
    blocks = np.exp(noise.draw(random, studies, BLOCKS) - noise.middle_time)
    drawn = blocks[
        np.arange(studies)[:, None, None],
        random.integers(BLOCKS, size=(studies, n, BLOCKS)),
    ]
    errors: Array = np.log(middle(drawn[..., None, :]).mean(axis=(-2, -1)))
    return errors


def virtual_time(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The calibration interval, about what the calibration aims at; `noise` is that of the calibration's blocks."""
    return holds(calibration_interval(_calibrations(noise, n, studies, random)), 0.0)


def virtual_ratio(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The calibration interval of a ratio paired by draw: two thirds of the time is the step that both resample, and
    each has a part whose blocks are its own."""
    shared = [_calibrations(noise, n, studies, random) for _ in range(3)]
    return holds(calibration_interval((shared[1] - shared[2]) / 3), 0.0)


def virtual_time_until(
    noise: Noise, n: int, studies: int, random: Random, times: float
) -> float:
    """The calibration interval where draws are made until their mean is known to 5 %."""
    logs = times * _calibrations(noise, AT_MOST, studies, random)
    found = _when_stopped(
        logs,
        _stopped(logs, n),
        lambda own, runs: calibration_interval(
            own, level=level_when_stopped(runs, n, AT_MOST)
        ),
    )
    return holds(found, 0.0)


def _native_medians(
    noise: Noise, shape: tuple[int, ...], spread: float, random: Random
) -> tuple[Array, Array]:
    """Median logs of three native runs whose noise has this spread, about that of all, and the variance as estimated.

    As in `validation._checks`, of cells along the last axis.
    """
    times = spread / SIGMA
    runs = times * noise.draw(random, *shape, 3)
    own = runs.var(axis=-1, ddof=1)
    variance = OF_A_MEDIAN * (own + own.mean(axis=-1, keepdims=True)) / 2 / 3
    return np.median(runs, axis=-1) - times * noise.median, variance


def virtual_time_checked(
    noise: Noise,
    n: int,
    studies: int,
    random: Random,
    wrong: float = 0.1,
    checks: int = 3,
) -> float:
    """The calibration interval with the whole virtual-native error, about the machine's time, as of two studies.

    Three native runs at each of the `checks`; the simulation is off by `wrong`
    (lognormal), each time anew.
    """
    calibration = _calibrations(noise, n, studies, random)
    native, _ = _native_medians(noise, (studies, checks), SIGMA, random)
    errors = (
        calibration.mean(axis=-1)[:, None]
        + random.normal(0, wrong, (studies, checks))
        - native
    )
    error = VirtualError(np.sqrt((errors**2).mean(axis=-1)), checks).whole()
    return holds(
        calibration_interval(
            calibration + random.normal(0, wrong, (studies, 1)), error
        ),
        0.0,
    )


@dataclass(frozen=True)
class Wrong:
    """Standard deviations of a simulation's errors, the noise of native runs, and the number of checks by engine."""

    common: float = 0.1
    engine: float = 0.1
    strategy: float = 0.1
    native: float = 0.02
    checks: tuple[tuple[str, int], ...] = (("mpi", 4), ("horovod", 2), ("gloo", 2))

    def draw(
        self, noise: Noise, studies: int, random: Random
    ) -> tuple[VirtualError, Array, dict[str, Array]]:
        """Return the findings of the checks, the common error, and the error of each engine by name."""
        common, found, engines = random.normal(0, self.common, (studies, 1)), {}, {}
        for engine, number in self.checks:
            engines[engine] = random.normal(0, self.engine, (studies, 1))
            native, variance = _native_medians(
                noise, (studies, number), self.native, random
            )
            own = random.normal(0, self.strategy, (studies, number))
            found[engine] = common + engines[engine] + own - native, variance
        errors = np.concatenate([own for own, _ in found.values()], axis=-1)
        return (
            VirtualError.of(errors, found, {engine: engine for engine in found}),
            common,
            engines,
        )


def virtual_ratio_checked(
    noise: Noise, n: int, studies: int, random: Random, wrong: Wrong, other: str = "mpi"
) -> float:
    """The calibration interval with virtual-native error of a ratio of strategies, on mpi and on the `other` engine."""
    error, _, engines = wrong.draw(noise, studies, random)
    own = random.normal(0, wrong.strategy, (2, studies, 1))
    off = engines["mpi"] + own[0] - engines[other] - own[1]
    top, bottom = (_calibrations(noise, n, studies, random) for _ in range(2))
    return holds(
        calibration_interval((top - bottom) / 3 + off, error.ratio("mpi", other)), 0.0
    )


def virtual_time_of_its_own(
    noise: Noise, n: int, studies: int, random: Random, wrong: Wrong, other: str = "mpi"
) -> float:
    """The same of a time on the `other` engine, about the machine's time times the common factor, that of mpi."""
    error, _, engines = wrong.draw(noise, studies, random)
    off = (
        engines[other] - engines["mpi"] + random.normal(0, wrong.strategy, (studies, 1))
    )
    return holds(
        calibration_interval(
            _calibrations(noise, n, studies, random) + off, error.own(other)
        ),
        0.0,
    )


def agreement_ratio(noise: Noise, n: int, studies: int, random: Random) -> float:
    """Virtual over native time, `n` draws of one calibration and `n` runs, where both agree."""
    virtual, native = (
        _calibrations(noise, n, studies, random),
        noise.draw(random, studies, n),
    )
    return holds(
        difference_interval(virtual, native, draws=(True, False)), -noise.median
    )


def ratio_calibrations(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The ratio of virtual times of two calibrations."""
    top, bottom = (_calibrations(noise, n, studies, random) for _ in range(2))
    return holds(difference_interval(top, bottom, draws=(True, True)), 0.0)


def _metrics(
    noise: Noise, shape: tuple[int, ...], spread: float, random: Random
) -> Array:
    """Accuracies of 360 test samples, 0.95 with `spread` between seeds; where the noise has odd runs, so many seeds end
    lower by 0.03."""
    chance = random.normal(0.95, spread, shape) - 0.03 * (
        random.random(shape) < noise.odd
    )
    return np.asarray(np.round(np.minimum(chance, 1) * 360) / 360)


def metric_mean(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The t interval of accuracy over seeds, about that of the others."""
    return holds(metric_interval(_metrics(noise, (studies, n), 0.01, random)), 0.95)


def metric_difference(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The t interval of the difference of two accuracies, paired by seed; half of their variance is the seed's."""
    seed = np.round(random.normal(0, 0.007, (studies, n)) * 360) / 360
    first, second = (
        seed + _metrics(noise, (studies, n), 0.007, random) for _ in range(2)
    )
    return holds(metric_interval(first - second), 0.0)


def metric_independent(noise: Noise, n: int, studies: int, random: Random) -> float:
    """Welch's interval of the difference of two accuracies without a common seed."""
    first, second = (_metrics(noise, (studies, n), 0.01, random) for _ in range(2))
    return holds(unpaired_metric(first, second), 0.0)
