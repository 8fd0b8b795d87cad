"""Side by side in one process: A and B in turn, the ratio pair by pair, medians of both; and the line that says so.

Nothing here is asserted. A goal is printed beside what was measured, with the load that
others put on the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

_HEADER = ("", "measured", "against", "result", "goal", "", "load")
_LAYOUT = "{:<46s} {:>14s} {:>14s}   {:<26s} {:<9s} {:<7s} {:>5s}"


@dataclass(frozen=True)
class Goal:
    """`result` is to be at most, or at least, `limit`."""

    sense: str  # <= or >=
    limit: float
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.sense} {self.limit:g}{' ' if self.unit else ''}{self.unit}"

    def is_met(self, result: float) -> bool:
        return result <= self.limit if self.sense == "<=" else result >= self.limit


@dataclass(frozen=True)
class Finding:
    """One line of the table: what was measured, against what, and what came of it."""

    name: str
    measured: str
    against: str
    result: str
    goal: str
    verdict: str  # met, missed, or empty where there is no goal
    # the one-minute load average, its least and most where it was read several times
    load: str

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(asdict(self).values())


def finding(
    name: str,
    result: float,
    goal: Goal | None,
    said: str,
    measured: str = "",
    against: str = "",
) -> Finding:
    """`result` judged by `goal`; `said` is how it is printed."""
    verdict = "" if goal is None else "met" if goal.is_met(result) else "missed"
    return Finding(
        name,
        measured,
        against,
        said,
        str(goal or ""),
        verdict,
        f"{os.getloadavg()[0]:.1f}",
    )


@dataclass(frozen=True)
class Comparison:
    """Seconds of A and of B, run in turn."""

    a: list[float]
    b: list[float]

    @property
    def ratios(self) -> list[float]:
        """A / B of each pair, ascending."""
        return sorted(x / y for x, y in zip(self.a, self.b, strict=True))

    @property
    def ratio(self) -> float:
        """The median of A / B over the pairs."""
        return statistics.median(self.ratios)

    def finding(self, name: str, goal: Goal | None, per: float = 1.0) -> Finding:
        """A / B with its quartiles; the times shown are divided by `per` (steps in a block)."""
        return finding(
            name,
            self.ratio,
            goal,
            _with_quartiles(self.ratios),
            _of(self.a, per),
            _of(self.b, per),
        )

    def inverse(self, name: str, goal: Goal | None) -> Finding:
        """B / A: how many times as fast A is, or the share of B's bandwidth that A has."""
        ratios = sorted(1 / ratio for ratio in self.ratios)
        return finding(
            name,
            statistics.median(ratios),
            goal,
            _with_quartiles(ratios),
            _of(self.a),
            _of(self.b),
        )


def compare(
    a: Callable[[], object],
    b: Callable[[], object],
    pairs: int = 7,
    timer: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time `a` and `b` in turn, `pairs` times each, after one warm-up of both; which goes first alternates.

    `timer` may be `time.process_time` where both compute in one thread: others on the
    machine then count less.
    """
    a(), b()
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            begin = timer()
            (a, b)[which]()
            seconds[which].append(timer() - begin)
    return Comparison(*seconds)


def show(findings: Iterable[Finding], title: str = "") -> list[Finding]:
    """Print the findings as they come, and return them."""
    shown = []
    print(_LAYOUT.format(title, *_HEADER[1:]).rstrip(), flush=True)
    for found in findings:
        print(_LAYOUT.format(*found.cells).rstrip(), flush=True)
        shown.append(found)
    return shown


def markdown(findings: Iterable[Finding]) -> str:
    """The findings as a table for a page."""
    lines = [
        "| benchmark | measured | against | result | goal | | load |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    return (
        "\n".join([*lines, *(f"| {' | '.join(found.cells)} |" for found in findings)])
        + "\n"
    )


def _of(seconds: list[float], per: float = 1.0) -> str:
    median = statistics.median(seconds) / per
    return f"{median:.3g} s" if median >= 1 else f"{median * 1e3:.4g} ms"


def _with_quartiles(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
