"""How often each interval holds what it is about, and how often each test raises a false alarm.

    python benchmarks/coverage.py [--studies 20000]

Prints the tables of docs/statistics.md. An entry is a simulation of so many studies, with a fixed seed, through the
functions that results go through; 20,000 of them leave a standard error of 0.15 percentage points. Takes ten minutes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from scalebench.analysis.blocks import Cell
from scalebench.analysis.bootstrap import bootstrap_bounds
from scalebench.analysis.intervals import (
    LEVEL_WHEN_STOPPED,
    Bounds,
    apart,
    calibration_bounds,
    mean_bounds,
    median_bounds,
    welch_bounds,
)
from scalebench.analysis.stability import drift, two_groups_p
from scalebench.analysis.testing import holm, rank_sum_test, signed_rank_test
from scalebench.analysis.validation import VirtualError

SIGMA = 0.05
Array = NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True)
class Noise:
    """What multiplies a quiet run's time: lognormal noise, and with probability `odd` a delay.

    The delay is `factor`, or exponential on logs with mean `tail`.
    """

    name: str
    odd: float = 0.0
    factor: float = 1.0
    tail: float = 0.0

    def draw(self, random: Random, *shape: int) -> Array:
        """Logs of the factors."""
        delay = random.exponential(self.tail, shape) if self.tail else math.log(self.factor)
        return random.normal(0.0, SIGMA, shape) + delay * (random.random(shape) < self.odd)

    @property
    def mean(self) -> float:
        """Of logs, over all runs."""
        return self.odd * (self.tail or math.log(self.factor))

    @property
    def median(self) -> float:
        return float(_many(self)[1_000_000])

    @property
    def trimmed_mean(self) -> float:
        return float(_many(self)[400_000:1_600_000].mean())

    @property
    def log_of_mean(self) -> float:
        """Of the mean factor: what a long run pays for many short steps."""
        return float(np.log(np.exp(_many(self)).mean()))


@cache
def _many(noise: Noise) -> Array:
    """Two million runs in order, for what has no formula."""
    return np.sort(noise.draw(np.random.default_rng(1), 2_000_000))


NOISES = (
    Noise("lognormal"),
    Noise("1 in 20 x1.5", 0.05, 1.5),
    Noise("1 in 10 x1.5", 0.1, 1.5),
    Noise("1 in 10 x3", 0.1, 3.0),
    Noise("1 in 10, tail", 0.1, tail=0.4),
)

Scene = Callable[[Noise, int, int, Random], float]  # noise, n, studies, random -> share


def holds(bounds: Bounds, truth: float | Array) -> float:
    """The share of intervals that hold `truth`."""
    return float(np.mean((bounds.low <= truth) & (truth <= bounds.high)))


def time_mean(noise: Noise, n: int, studies: int, random: Random) -> float:
    """A cell's t interval, about the time of a run that nothing delays."""
    return holds(mean_bounds(noise.draw(random, studies, n)), 0.0)


def time_mean_of_all(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The same interval, taken for one of the mean over delayed runs too, which it is not offered as."""
    return holds(mean_bounds(noise.draw(random, studies, n)), noise.mean)


def time_median(noise: Noise, n: int, studies: int, random: Random) -> float:
    """A cell's median, about the median of all runs."""
    return holds(median_bounds(noise.draw(random, studies, n)), noise.median)


def time_when_stopped(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The t interval of a study that repeats from `n` up to 20 times until 5 % wide, at the level for that; the least
    coverage over runs that are half, once, twice, three and four times as noisy."""
    shares = []
    for scale in (0.5, 1.0, 2.0, 3.0, 4.0):
        logs = scale * noise.draw(random, studies, 20)
        held = np.zeros(studies, dtype=bool)
        open_ = np.ones(studies, dtype=bool)
        for runs in range(n, 21):
            centre, low, high = mean_bounds(logs[:, :runs], LEVEL_WHEN_STOPPED)
            stops = open_ & ((np.exp(high - centre) - np.exp(low - centre) <= 0.05) | (runs == 20))
            held[stops] = ((low <= 0) & (high >= 0))[stops]
            open_ &= ~stops
        shares.append(float(held.mean()))
    return min(shares)


def _pairs(noise: Noise, n: int, studies: int, random: Random) -> Array:
    """Log ratios of two cells whose blocks share noise; both have their own, and their own delays."""
    block = random.normal(0.0, 2 * SIGMA, (studies, n))
    return (block + noise.draw(random, studies, n)) - (block + noise.draw(random, studies, n))


def ratio_paired(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(mean_bounds(_pairs(noise, n, studies, random)), 0.0)


def ratio_median(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(median_bounds(_pairs(noise, n, studies, random)), 0.0)


def ratio_independent(noise: Noise, n: int, studies: int, random: Random) -> float:
    """Welch's interval of two cells with the same noise."""
    return holds(welch_bounds(noise.draw(random, studies, n), noise.draw(random, studies, n)), 0.0)


def ratio_unequal(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The same where one cell has three times the other's spread and no delays; about the quiet ratio."""
    return holds(welch_bounds(random.normal(0, 3 * SIGMA, (studies, n)), noise.draw(random, studies, n)), 0.0)


def time_bootstrap(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The bootstrap interval, about the trimmed mean of all runs; 1,000 resamples."""
    bounds = bootstrap_bounds(noise.draw(random, studies, n), resamples=1000, random=random)
    return holds(bounds, noise.trimmed_mean)


def ratio_bootstrap(noise: Noise, n: int, studies: int, random: Random) -> float:
    return holds(bootstrap_bounds(_pairs(noise, n, studies, random), resamples=1000, random=random), 0.0)


def _calibrations(noise: Noise, n: int, studies: int, random: Random) -> Array:
    """Errors of `n` virtual repetitions on logs: each resamples the 20 blocks of steps that were measured."""
    blocks = np.exp(noise.draw(random, studies, 20) - noise.log_of_mean)
    drawn = blocks[np.arange(studies)[:, None, None], random.integers(20, size=(studies, n, 20))]
    errors: Array = np.log(drawn.mean(axis=-1))
    return errors


def virtual_time(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The calibration interval, about what the calibration aims at; `noise` is that of the calibration's blocks."""
    return holds(calibration_bounds(_calibrations(noise, n, studies, random)), 0.0)


def _checked(noise: Noise, n: int, studies: int, random: Random, times: int) -> float:
    """Virtual times off by 10 % (lognormal), checked at three points by three native runs each."""
    shared, checks = _calibrations(noise, n, studies, random), 3
    native = noise.draw(random, studies, checks, 3).mean(axis=-1)
    wrong = shared.mean(axis=-1)[:, None] + random.normal(0, 0.1, (studies, checks)) - native
    errors = [VirtualError(math.sqrt(np.mean(own**2)), checks).half_width(times) for own in wrong]
    own = random.normal(0, 0.1, (studies, 2))
    results = shared + own[:, :1] if times == 1 else np.zeros_like(shared) + own[:, :1] - own[:, 1:]
    centre, _, high = calibration_bounds(results)
    half = np.hypot(high - centre, errors)
    return holds(Bounds(centre, centre - half, centre + half), 0.0)


def virtual_time_checked(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The calibration interval with virtual-native error, about the machine's time."""
    return _checked(noise, n, studies, random, 1)


def virtual_ratio_checked(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The same of a ratio of two virtual times."""
    return _checked(noise, n, studies, random, 2)


def agreement_ratio(noise: Noise, n: int, studies: int, random: Random) -> float:
    """Virtual over native time, `n` draws of one calibration and `n` undelayed-on-average runs, where both agree."""
    virtual, native = _calibrations(noise, n, studies, random), noise.draw(random, studies, n)
    return holds(apart(calibration_bounds(virtual), mean_bounds(native)), 0.0)


def ratio_calibrations(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The ratio of virtual times of two calibrations."""
    top, bottom = (calibration_bounds(_calibrations(noise, n, studies, random)) for _ in range(2))
    return holds(apart(top, bottom), 0.0)


def virtual_ratio(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The calibration interval of a ratio paired by draw: two thirds of the time is the step that both resample, and
    each has a part whose blocks are its own."""
    shared = [_calibrations(noise, n, studies, random) for _ in range(3)]
    return holds(calibration_bounds((shared[1] - shared[2]) / 3), 0.0)


def metric_mean(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The t interval of accuracy over seeds: 360 test samples, 0.95 with a deviation of 0.01 between seeds, so that
    values repeat; 1 in 10 seeds, where the noise has odd runs, ends lower by 0.03."""
    chance = random.normal(0.95, 0.01, (studies, n)) - 0.03 * (random.random((studies, n)) < noise.odd)
    return holds(mean_bounds(np.round(chance * 360) / 360), 0.95)


def metric_difference(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The t interval of the difference of two accuracies, paired by seed; half of their variance is the seed's."""
    seed = random.normal(0.95, 0.007, (studies, n))
    own = [
        np.round((seed + random.normal(0, 0.007, seed.shape) - 0.03 * (random.random(seed.shape) < noise.odd)) * 360)
        for _ in range(2)
    ]
    return holds(mean_bounds((own[0] - own[1]) / 360), 0.0)


def drift_alarm(noise: Noise, n: int, studies: int, random: Random) -> float:
    """How often a study of ten cells that stand still is said to drift at 5 %."""
    alarms = []
    for _ in range(studies // 4):
        order = np.array([block * 10 + random.permutation(10) for block in range(n)])
        cells = [_cell(np.exp(noise.draw(random, n)), order[:, index]) for index in range(10)]
        found = drift(cells)
        alarms.append(found is not None and found.p <= 0.05)
    return float(np.mean(alarms))


def _cell(seconds: Array, order: NDArray[np.int64]) -> Cell:
    return Cell(
        key={}, strategy="", label="", execution="native", engine="mpi", workers=1, batch_global=1, weak=False,
        metric_name="", seconds=dict(enumerate(seconds.tolist())), order=dict(enumerate(order.tolist())),
    )  # fmt: skip


def paired_test_alarm(noise: Noise, n: int, studies: int, random: Random) -> float:
    """How often any of four worker counts is called different at 5 % by Holm, where none is; by blocks."""
    return _family_alarm(lambda: signed_rank_test(*_two(noise, n, random)).p, studies)


def independent_test_alarm(noise: Noise, n: int, studies: int, random: Random) -> float:
    """The same for independent samples."""
    return _family_alarm(lambda: rank_sum_test(*_two(noise, n, random)).p, studies)


def _two(noise: Noise, n: int, random: Random) -> tuple[list[float], list[float]]:
    return np.exp(noise.draw(random, n)).tolist(), np.exp(noise.draw(random, n)).tolist()


def _family_alarm(p: Callable[[], float], studies: int) -> float:
    return float(np.mean([min(holm([p() for _ in range(4)])) <= 0.05 for _ in range(studies // 4)]))


@dataclass(frozen=True)
class Claim:
    """A line of a table: what is offered, and the numbers of values at which it is tried, from the smallest offered."""

    name: str
    scene: Scene
    numbers: tuple[int, ...]


INTERVALS = (
    Claim("time: mean, t", time_mean, (2, 3, 5, 10, 20)),
    Claim("time: median", time_median, (6, 10, 20)),
    Claim("time: stopped when narrow", time_when_stopped, (3, 5)),
    Claim("time: bootstrap", time_bootstrap, (20,)),
    Claim("ratio by block: mean, t", ratio_paired, (2, 3, 5, 10)),
    Claim("ratio by block: median", ratio_median, (6, 10, 20)),
    Claim("ratio by block: bootstrap", ratio_bootstrap, (20,)),
    Claim("ratio, independent: Welch", ratio_independent, (3, 5, 10)),
    Claim("the same, spread 3 to 1", ratio_unequal, (3, 5, 10)),
    Claim("virtual time: calibration", virtual_time, (2, 3, 5)),
    Claim("virtual time: with error", virtual_time_checked, (2, 3, 5)),
    Claim("virtual ratio: with error", virtual_ratio_checked, (2, 3, 5)),
    Claim("virtual / native", agreement_ratio, (2, 3, 5)),
    Claim("virtual ratio: calibration", virtual_ratio, (2, 3, 5)),
    Claim("ratio of two calibrations", ratio_calibrations, (2, 3, 5)),
    Claim("metric: mean, t", metric_mean, (2, 3, 5)),
    Claim("metric: difference by seed", metric_difference, (2, 3, 5)),
)
NOT_OFFERED = (Claim("time: t as mean of all runs", time_mean_of_all, (3, 5, 10, 20)),)
ALARMS = (
    Claim("drift, ten cells", drift_alarm, (3, 5)),
    Claim("signed-rank, Holm of 4", paired_test_alarm, (8, 10)),
    Claim("rank-sum, Holm of 4", independent_test_alarm, (5, 8)),
)


def share(claim: Claim, noise: Noise, n: int, studies: int) -> float:
    """One entry; its seed is its own, whatever else is simulated."""
    seed = [sum(map(ord, claim.name)), NOISES.index(noise), n]
    return claim.scene(noise, n, studies, np.random.default_rng(seed))


def table(claims: tuple[Claim, ...], studies: int) -> str:
    """Markdown, in percent."""
    lines = [f"| | n | {' | '.join(noise.name for noise in NOISES)} |", f"|---|---:|{'---:|' * len(NOISES)}"]
    for claim in claims:
        for n in claim.numbers:
            entries = " | ".join(f"{100 * share(claim, noise, n, studies):.1f}" for noise in NOISES)
            lines.append(f"| {claim.name if n == claim.numbers[0] else ''} | {n} | {entries} |")
    return "\n".join(lines)


GROUPS: dict[str, Callable[[Random, tuple[int, int]], Array]] = {
    "normal": lambda random, shape: random.normal(size=shape),
    "uniform": lambda random, shape: random.random(shape),
    "exponential": lambda random, shape: random.exponential(size=shape),
    "Laplace": lambda random, shape: random.laplace(size=shape),
    "Student t(3)": lambda random, shape: random.standard_t(3, shape),
    "two states 20 % apart": lambda random, shape: (
        random.normal(0, 0.03, shape) + math.log(1.2) * (random.random(shape) < 0.5)
    ),
    "two states 30 % apart": lambda random, shape: (
        random.normal(0, 0.03, shape) + math.log(1.3) * (random.random(shape) < 0.5)
    ),
}


def taken_for_two(shape: str, n: int, studies: int) -> float:
    """How often `n` values on logs of this shape are taken for two groups at 5 %."""
    values = GROUPS[shape](np.random.default_rng(n), (studies, n))
    return float(np.mean([two_groups_p(np.exp(own).tolist()) <= 0.05 for own in values]))


def table_of_groups(studies: int, numbers: tuple[int, ...] = (5, 8, 10, 20)) -> str:
    lines = [f"| | {' | '.join(f'n = {n}' for n in numbers)} |", f"|---|{'---:|' * len(numbers)}"]
    for shape in GROUPS:
        lines.append(f"| {shape} | {' | '.join(f'{100 * taken_for_two(shape, n, studies):.1f}' for n in numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", type=int, default=20_000, help="simulated studies for each entry")
    studies = parser.parse_args().studies
    for title, claims in (("Coverage", INTERVALS), ("Not offered", NOT_OFFERED), ("False alarms", ALARMS)):
        print(f"{title} (%)\n\n{table(claims, studies)}\n", flush=True)
    print(f"Taken for two groups (%); one group but for the last two\n\n{table_of_groups(studies // 4)}")


if __name__ == "__main__":
    main()
