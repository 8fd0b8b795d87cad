"""How single steps differ from their mean: factors on compute, drawn alike for virtual and for paced workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

STATED = ("normal", "lognormal", "exponential")  # a law that can be injected; `measured` is the machine's own
_CHUNK = 1024

JitterKind = Literal["measured", "none", "normal", "lognormal", "exponential"]


def jitter_source(
    kind: JitterKind, sigma: float, *, seed: int, worker: int, measured: Sequence[float] = ()
) -> Callable[[int], float]:
    """A function of the step number: the factor on that step's compute, keyed by (seed, worker, step).

    `measured` draws from the steps of that name; `normal` 1 + sigma z, floored at 0.05; `lognormal` has mean 1 and
    log-deviation sigma; `exponential` is 1 - sigma + sigma e. All have mean 1.
    """
    sample = np.asarray(measured, dtype=np.float64)

    def chunk(index: int) -> list[float]:
        random = np.random.Generator(np.random.Philox(key=[(seed << 20) ^ worker, index]))
        if kind == "normal":
            factors = np.maximum(0.05, 1.0 + sigma * random.standard_normal(_CHUNK))
        elif kind == "lognormal":
            factors = np.exp(sigma * random.standard_normal(_CHUNK) - sigma**2 / 2)
        elif kind == "exponential":
            factors = np.maximum(0.0, 1.0 - sigma) + sigma * random.standard_exponential(_CHUNK)
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
