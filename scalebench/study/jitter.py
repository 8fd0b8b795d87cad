"""Factors on the compute of single steps, equal for virtual and paced workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

STATED = ("normal", "lognormal", "exponential")  # laws that can be injected; `measured` is the jitter of the machine
MOST_SIGMA = {"normal": 0.3, "exponential": 1.0}  # above it step times would be negative
_CHUNK = 1024
_CUT = 3.0  # standard deviations at which the normal law is truncated on both sides
_CUT_SIGMA = 0.98657839  # standard deviation of the truncated law: sqrt(1 - 2 c phi(c) / (2 Phi(c) - 1))

Floats = NDArray[np.float64]
JitterKind = Literal["measured", "none", "normal", "lognormal", "exponential"]


def jitter_source(kind: JitterKind, sigma: float, *, seed: int, worker: int, measured: Sequence[float] = ()) -> Jitter:
    """Return the factor on compute as a function of the step number, keyed by (seed, worker, step).

    `measured` resamples the measured steps. The other laws have mean 1 and standard deviation `sigma`, that of a step's
    time relative to its mean (z standard normal, e standard exponential):

        normal       1 + sigma z / 0.9866, z within +-3              sigma <= 0.3
        lognormal    exp(s z - s^2 / 2), s^2 = ln(1 + sigma^2)
        exponential  1 - sigma + sigma e                             sigma <= 1
    """
    sample = np.asarray(measured, dtype=np.float64)

    def chunk(index: int) -> Floats:
        random = np.random.Generator(np.random.Philox(key=[(seed << 20) ^ worker, index]))
        if kind == "normal":
            drawn = random.standard_normal(2 * _CHUNK)  # 0.3 % are truncated
            return 1.0 + sigma / _CUT_SIGMA * drawn[np.abs(drawn) <= _CUT][:_CHUNK]
        if kind == "lognormal":
            variance = np.log1p(sigma**2)
            factors: Floats = np.exp(np.sqrt(variance) * random.standard_normal(_CHUNK) - variance / 2)
            return factors
        if kind == "exponential":
            return 1.0 - sigma + sigma * random.standard_exponential(_CHUNK)
        return sample[random.integers(len(sample), size=_CHUNK)]

    if kind == "none" or (kind == "measured" and len(sample) == 0):
        return Jitter(lambda index: np.ones(_CHUNK))
    return Jitter(chunk)


class Jitter:
    """Factor on compute by step number; `chunk(i)` are those of the i-th thousand of steps."""

    def __init__(self, chunk: Callable[[int], Floats]) -> None:
        self._chunk = chunk
        self._held: tuple[int, Floats, list[float]] = (-1, np.empty(0), [])

    def __call__(self, step: int) -> float:
        index, place = divmod(step, _CHUNK)
        return self._of(index)[1][place]

    def span(self, low: int, high: int) -> Floats:
        """Return the factors of the steps from `low` to before `high`."""
        parts = []
        for index in range(low // _CHUNK, (high - 1) // _CHUNK + 1):
            begin = index * _CHUNK
            parts.append(self._of(index)[0][max(low - begin, 0) : high - begin])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _of(self, index: int) -> tuple[Floats, list[float]]:
        if self._held[0] != index:
            factors = self._chunk(index)
            self._held = index, factors, factors.tolist()
        return self._held[1:]
