"""The noise of simulated times, and what intervals of such times are about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

SIGMA = 0.05
Array = NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True)
class Noise:
    """Return the factor on a quiet run's time: lognormal noise, and with probability `odd` a delay.

    The delay is `factor`, or exponential on logs with mean `tail`.
    """

    name: str
    odd: float = 0.0
    factor: float = 1.0
    tail: float = 0.0

    def draw(self, random: Random, *shape: int) -> Array:
        """Logs of the factors."""
        delay = (
            random.exponential(self.tail, shape) if self.tail else math.log(self.factor)
        )
        return random.normal(0.0, SIGMA, shape) + delay * (
            random.random(shape) < self.odd
        )

    @property
    def mean(self) -> float:
        """Of logs, over all runs."""
        return self.odd * (self.tail or math.log(self.factor))

    @property
    def median(self) -> float:
        """Of logs, over all runs: what intervals of times are about."""
        return float(_many(self)[1_000_000])

    @property
    def middle(self) -> float:
        """Of logs, the mean of the middle three fifths: what the bootstrap is about."""
        return float(_many(self)[400_000:1_600_000].mean())

    @property
    def middle_time(self) -> float:
        """Log of the mean factor of the middle three fifths: what a calibration is about."""
        return float(np.log(np.exp(_many(self)[400_000:1_600_000]).mean()))


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
