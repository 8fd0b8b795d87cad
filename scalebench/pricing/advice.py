"""Advice from a grid of predictions: crossovers, knee, the best count for a budget, needed bandwidth and batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from scalebench.errors import UsageError
from scalebench.pricing.grid import Point
from scalebench.pricing.prediction import SERIAL, Case, Predictor
from scalebench.pricing.validity import lacking, outside
from scalebench.study.spec import Component

UTILISATIONS = (0.5, 0.75, 0.9, 0.95)
_FASTEST_LINK = 1e6  # times the cluster's own
_LONGEST_INTERVAL = 4096
_LEAST_AT_KNEE = 1 / 3  # efficiency
_LEAST_GAP = 0.005  # relative difference below which two strategies are alike


class Crossover(NamedTuple):
    """From `workers` on `faster` takes less time than `slower`, which is the faster one below."""

    faster: Component
    slower: Component
    workers: int


class Held(NamedTuple):
    """The least batch and the least interval (powers of two) that hold `efficiency` at a point; None if none does.

    `outside` is True if that batch lies outside what the inputs are known to hold for.
    """

    efficiency: float
    batch: int | None
    interval: int | None
    outside: bool = False


def crossovers(predictor: Predictor, points: Sequence[Point]) -> list[Crossover]:
    """Return where two strategies of a grid change places, by bisection over whole nodes between its counts."""
    by_name: dict[str, dict[int, Point]] = {}
    for point in points:
        by_name.setdefault(str(point.strategy), {})[point.workers] = point
    found = []
    for first, second in combinations(by_name.values(), 2):
        shared = sorted(first.keys() & second.keys())
        told_apart = [
            n
            for n in shared
            if abs(first[n].train_s / second[n].train_s - 1) > _LEAST_GAP
        ]
        for low, high in pairwise(told_apart):
            before, after = (first[n].train_s < second[n].train_s for n in (low, high))
            if before != after:
                slower, faster = first[high].strategy, second[high].strategy
                if after:
                    slower, faster = faster, slower
                found.append(
                    Crossover(
                        faster,
                        slower,
                        _first_where(predictor, faster, slower, low, high),
                    )
                )
    return found


def _first_where(
    predictor: Predictor, faster: Component, slower: Component, low: int, high: int
) -> int:
    """Return the least count, up to a node's workers, at which `faster` is the faster one; it is at `high`."""
    step = predictor.platform.cluster.node.workers_per_node if high > 64 else 1
    case = [Case(predictor.platform, predictor.workload.batch)]
    while high - low > step:
        middle = max(low + 1, (low + high) // 2 // step * step)
        try:
            times = [
                float(predictor.times(each, middle, case).time[0])
                for each in (faster, slower)
            ]
        except UsageError:  # a count that does not suit one of them
            break
        low, high = (low, middle) if times[0] < times[1] else (middle, high)
    return high


def knee(points: Sequence[Point]) -> Point | None:
    """Return the point of the largest efficiency times speedup; None where it lies at an end of `points`.

    Nor where its efficiency is below a third: with speedup p / (1 + a p) it is a half
    at the knee.
    """
    best = max(points, key=lambda point: point.efficiency * point.speedup, default=None)
    inside = best is not None and points[0].workers < best.workers < points[-1].workers
    return (
        best
        if inside and best is not None and best.efficiency >= _LEAST_AT_KNEE
        else None
    )


def best_within(
    points: Sequence[Point], hours: float, seconds_of: Callable[[Point], float]
) -> Point | None:
    """Return the point of the least `seconds_of` that takes at most `hours` of its workers; None if all take more."""
    affordable = [point for point in points if hours_of(point, seconds_of) <= hours]
    return min(affordable, key=seconds_of, default=None)


def hours_of(point: Point, seconds_of: Callable[[Point], float]) -> float:
    """Return the hours of all workers of `point` in its seconds."""
    return point.workers * seconds_of(point) / 3600


def bandwidth_for(predictor: Predictor, point: Point) -> dict[float, float]:
    """Return the factor on the bandwidth between nodes at which workers compute 50, 75, 90 and 95 % of the time.

    Between 241 factors ln(factor) is linear in the share; `inf` where no bandwidth is
    enough.
    """
    factors = np.logspace(-6, np.log10(_FASTEST_LINK), 241)
    cases = [
        Case(predictor.platform.between_nodes(float(factor)), predictor.workload.batch)
        for factor in factors
    ]
    times = predictor.times(point.strategy, point.workers, cases)
    utilisation = times.compute / times.time
    needed = {}
    for wanted in UTILISATIONS:
        enough = np.flatnonzero(utilisation >= wanted)
        if not len(enough):
            needed[wanted] = np.inf
            continue
        low, high = max(0, enough[0] - 1), enough[0]
        part = (
            (wanted - utilisation[low]) / (utilisation[high] - utilisation[low])
            if high
            else 1.0
        )
        needed[wanted] = float(factors[low] * (factors[high] / factors[low]) ** part)
    return needed


def batch_for(
    predictor: Predictor, point: Point, efficiency: float = 0.8
) -> int | None:
    """Return the least batch (a power of two) that fits and holds `efficiency` at the workers of `point`, or None.

    A point's efficiency is against one worker at the same batch.
    """
    workload = predictor.workload
    for power in range(24):
        batch = 1 << power
        try:
            if lacking(predictor, point.strategy, point.workers, batch):
                break
            many = predictor.times(
                point.strategy, point.workers, [Case(predictor.platform, batch)]
            )
            alone = predictor.times(SERIAL, 1, [Case(predictor.platform, batch)])
        except UsageError:  # a global batch smaller than the workers
            continue
        if alone.time[0] / many.time[0] / point.workers >= efficiency:
            return batch
        if batch * (1 if workload.in_all else point.workers) > workload.samples:
            break
    return None


def interval_for(
    predictor: Predictor, point: Point, efficiency: float = 0.8
) -> tuple[str, int] | None:
    """Return the strategy's interval option and its least power of two that holds `efficiency`; None without one.

    Nor where the longest does not hold it, as synchronising less often does not take
    longer.
    """
    strategy = predictor.strategy(point.strategy)
    name = strategy.traits.interval_option
    if name is None:
        return None
    steps = 1 if strategy.synchronisation.unit == "epoch" else point.steps
    # of a training that synchronises
    longest = min(_LONGEST_INTERVAL, int(steps * point.epochs))
    intervals = [
        1 << power
        for power in range(1 if name == "period" else 0, longest.bit_length())
    ]

    def holds(interval: int) -> bool:
        longer = with_option(point.strategy, name, interval)
        times = predictor.times(
            longer, point.workers, [Case(predictor.platform, predictor.workload.batch)]
        )
        return (
            point.speedup * point.train_s / float(times.time[0]) / point.workers
            >= efficiency
        )

    try:
        if not intervals or not holds(intervals[-1]):
            return None
        return name, next(interval for interval in intervals if holds(interval))
    except UsageError:  # an interval that does not suit the training
        return None


def held_at(predictor: Predictor, point: Point, efficiency: float = 0.8) -> Held:
    """Return what holds `efficiency` at the workers of `point`: one point of an iso-efficiency curve (Grama 1993)."""
    interval, batch = (
        interval_for(predictor, point, efficiency),
        batch_for(predictor, point, efficiency),
    )
    beyond = batch is not None and bool(
        outside(predictor, point.strategy, point.workers, batch)
    )
    return Held(efficiency, batch, interval[1] if interval else None, beyond)


def with_option(strategy: Component, name: str, value: object) -> Component:
    """Return the strategy with one option changed."""
    return Component(name=strategy.name, options={**strategy.options, name: value})
