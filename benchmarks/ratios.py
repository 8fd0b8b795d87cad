"""Side by side in one process: A and B in turn, the ratio pair by pair, medians of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """Seconds of A and of B, run in turn."""

    name: str
    a: list[float]
    b: list[float]

    @property
    def ratio(self) -> float:
        """The median of A / B over the pairs."""
        return statistics.median(x / y for x, y in zip(self.a, self.b, strict=True))

    def line(self, goal: str) -> str:
        ratios = sorted(x / y for x, y in zip(self.a, self.b, strict=True))
        return (
            f"{self.name:38s} {statistics.median(self.a) * 1e3:10.3f} ms {statistics.median(self.b) * 1e3:10.3f} ms   "
            f"{self.ratio:6.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})   goal {goal}"
        )


def compare(name: str, a: Callable[[], object], b: Callable[[], object], pairs: int = 7) -> Comparison:
    """Time `a` and `b` in turn, `pairs` times each, after one warm-up of both; which goes first alternates."""
    a(), b()
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            begin = time.perf_counter()
            (a, b)[which]()
            seconds[which].append(time.perf_counter() - begin)
    return Comparison(name, *seconds)
