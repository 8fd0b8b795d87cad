"""How single steps differ from their mean: factors on compute, drawn alike for virtual and for paced workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

STATED = ("normal", "lognormal", "exponential")  # a law that can be injected; `measured` is the machine's own
MOST_SIGMA = {"normal": 0.3, "exponential": 1.0}  # with more a step would take less than no time
_CHUNK = 1024
_CUT = 3.0  # deviations at which the normal law is cut off, on both sides
_CUT_SIGMA = 0.98657839  # what is then left of its deviation: sqrt(1 - 2 c phi(c) / (2 Phi(c) - 1))

JitterKind = Literal["measured", "none", "normal", "lognormal", "exponential"]


def jitter_source(
    kind: JitterKind, sigma: float, *, seed: int, worker: int, measured: Sequence[float] = ()
) -> Callable[[int], float]:
    """A function of the step number: the factor on that step's compute, keyed by (seed, worker, step).

    `measured` draws from the steps of that name. The others have mean 1 and standard deviation `sigma`, which is
    therefore that of a step's time relative to its mean, whatever the law (z standard normal, e standard exponential):

        normal       1 + sigma z / 0.9866, z within +-3              sigma <= 0.3
        lognormal    exp(s z - s^2 / 2), s^2 = ln(1 + sigma^2)
        exponential  1 - sigma + sigma e                             sigma <= 1

    Raises:
        ValueError: `sigma` is larger than the law allows: factors would be negative, or their mean above 1.
    """
    if sigma > MOST_SIGMA.get(kind, sigma):
        raise ValueError(f"jitter {kind}: sigma is at most {MOST_SIGMA[kind]}, got {sigma}")
    sample = np.asarray(measured, dtype=np.float64)

    def chunk(index: int) -> list[float]:
        random = np.random.Generator(np.random.Philox(key=[(seed << 20) ^ worker, index]))
        if kind == "normal":
            drawn = random.standard_normal(2 * _CHUNK)  # 0.3 % of them are too far out
            factors = 1.0 + sigma / _CUT_SIGMA * drawn[np.abs(drawn) <= _CUT][:_CHUNK]
        elif kind == "lognormal":
            variance = np.log1p(sigma**2)
            factors = np.exp(np.sqrt(variance) * random.standard_normal(_CHUNK) - variance / 2)
        elif kind == "exponential":
            factors = 1.0 - sigma + sigma * random.standard_exponential(_CHUNK)
        else:
            factors = sample[random.integers(len(sample), size=_CHUNK)]
        values: list[float] = factors.tolist()
        return values

    if kind == "none" or (kind == "measured" and len(sample) == 0):
        return lambda step: 1.0
    held: dict[int, list[float]] = {}

    def factor(step: int) -> float:
        index, place = divmod(step, _CHUNK)
        if index not in held:
            held.clear()
            held[index] = chunk(index)
        return held[index][place]

    return factor
