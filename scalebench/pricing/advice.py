"""Advice from a grid of predictions: which strategy on how many nodes, crossovers, knee, and what would be needed.

The choice is the point of least time; it is said whether it is the same at both ends of
the interval. Fewer workers are chosen where more of them save less than a tenth of it.
Where a strategy that does not average gradients in every batch is the fastest, one that
does is chosen in its place unless that costs more than a tenth: so little is not worth
the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np

from scalebench.errors import UsageError
from scalebench.formatting import counted, digits, seconds, share
from scalebench.measured import Measured
from scalebench.pricing.devices import TimeModel
from scalebench.pricing.grid import Point
from scalebench.pricing.memory import lacking
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.uncertainty import ENDS, ends_in_words, outside
from scalebench.pricing.workload import SERIAL
from scalebench.strategies import registry
from scalebench.study.spec import Component
from scalebench.tables.table import SECONDS, Form

CLEARLY = 0.10  # least share of the time that a choice is changed for
_NAMED = 4  # strategies that the answer names

Seconds = Callable[[Point], float]


class Choice(NamedTuple):
    """The chosen point, the fastest of its worker count, and the choice at each of ENDS."""

    point: Point
    fastest: Point
    at_ends: tuple[Point, ...]

    @property
    def changes(self) -> dict[str, Point]:
        """Return the ends at which another point is chosen."""
        return {
            end: other
            for end, other in zip(ENDS, self.at_ends, strict=True)
            if other is not self.point
        }


def averages_gradients(strategy: Component) -> bool:
    """Return True if every step takes the mean over the global batch, so that epochs to target depend on that alone."""
    return registry.create(
        strategy.name, strategy.options, "virtual"
    ).traits.mean_over_global_batch


def choose(
    points: Sequence[Point], scale: Mapping[Point, float], hours: float = float("inf")
) -> Choice | None:
    """Return the choice among `points` that take at most `hours` of their workers; None if all take more.

    `scale` has the epochs to a target relative to those of the training, by point.
    """

    def seconds_at(end: int | None) -> Seconds:
        return lambda point: (
            scale.get(point, 1.0)
            * (point.train_s if end is None else point.ends_s[end])
        )

    chosen, fastest = _chosen(points, seconds_at(None), hours)
    if chosen is None or fastest is None:
        return None
    at_ends = [
        _chosen(points, seconds_at(end), hours)[0] or chosen for end in range(len(ENDS))
    ]
    return Choice(chosen, fastest, tuple(at_ends))


def _chosen(
    points: Sequence[Point], time: Seconds, hours: float
) -> tuple[Point | None, Point | None]:
    """Return the chosen point and the fastest one of its worker count."""
    affordable = [
        point for point in points if point.workers * time(point) / 3600 <= hours
    ]
    if not affordable:
        return None, None
    soon = [
        point
        for point in affordable
        if time(point) <= min(map(time, affordable)) / (1 - CLEARLY)
    ]
    fewest = min(point.workers for point in soon)
    rivals = [point for point in affordable if point.workers == fewest]
    chosen = preferred(
        [point.strategy for point in rivals], [time(point) for point in rivals]
    )
    return rivals[chosen], min(rivals, key=time)


def preferred(strategies: Sequence[Component], seconds: Sequence[float]) -> int:
    """Return the place of the strategy to take: the fastest, or one that averages gradients and takes hardly longer."""
    fastest = min(range(len(strategies)), key=seconds.__getitem__)
    exact = [
        place
        for place, strategy in enumerate(strategies)
        if averages_gradients(strategy)
    ]
    best = min(exact, key=seconds.__getitem__, default=fastest)
    return best if seconds[best] <= seconds[fastest] / (1 - CLEARLY) else fastest


def span(point: Point, scale: float = 1.0) -> str:
    """Return `4.6 min (3.1 to 9)`: the time of a point with its interval in the unit of the time."""
    return SPAN.text(point.time.map(lambda seconds: seconds * scale))


def seconds_span(value: float, low: float, high: float) -> str:
    """Return seconds with an interval in the same unit, with two digits: `4.6 min (3.1 to 9.0)`."""
    number, unit = seconds(value).split()
    factor = float(number.replace(",", "")) / value if value else 1.0
    return f"{digits(value * factor, 2)} {unit} ({digits(low * factor, 2)} to {digits(high * factor, 2)})"


SPAN = Form(seconds_span, SECONDS)


def hours_span(time: Measured, workers: float, hour: str, price: float | None) -> str:
    """Return `22 GPU-hours (12 to 104), 44 (24 to 208) at 2 each`: what a time and its bounds cost."""
    hours = [workers * seconds / 3600 for seconds in time[:3]]
    said = (
        f"{digits(hours[0], 2)} {hour} ({digits(hours[1], 2)} to {digits(hours[2], 2)})"
    )
    if price:
        cost = [digits(price * each, 2) for each in hours]
        said += f", {cost[0]} ({cost[1]} to {cost[2]}) at {price:g} each"
    return said


def answer(
    points: Sequence[Point],
    choice: Choice,
    scale: Mapping[Point, float],
    device: TimeModel,
) -> str:
    """Return one sentence: the times of all strategies at the chosen workers, and what their difference is worth."""
    workers = choice.point.workers
    own = sorted(
        (each for each in points if each.workers == workers),
        key=lambda each: scale.get(each, 1.0) * each.train_s,
    )
    named = [
        f"{each.strategy} {span(each, scale.get(each, 1.0))}" for each in own[:_NAMED]
    ]
    left = len(own) - _NAMED
    more = f", {left} more {'is' if left == 1 else 'are'} slower" if left > 0 else ""
    aim = ", to the target" if scale else ""
    return f"{device.counted(workers)}{aim}: {', '.join(named)}{more}{_verdict(own, choice)}"


def _verdict(own: Sequence[Point], choice: Choice) -> str:
    if len(own) < 2:
        return "."
    fastest = choice.fastest
    exact = [each for each in own if averages_gradients(each.strategy)]
    trades = not averages_gradients(fastest.strategy) and bool(exact)
    other = exact[0] if trades else next(each for each in own if each is not fastest)
    saved = 1 - fastest.train_s / other.train_s
    least, most = saved_over(fastest, other)
    if most < CLEARLY:
        return f": no difference{' worth the accuracy' if trades else ' to speak of'}."
    less = (
        f"{fastest.strategy} takes {share(max(0.0, saved))} less than {other.strategy}"
    )
    band = f"{100 * least:.0f} to {100 * most:.0f} % over the interval"
    if least >= CLEARLY:
        return f": {less} ({band}){', to be weighed against its accuracy' if trades else ''}."
    open_ = (
        "whether that is worth the accuracy is open"
        if trades
        else "which one is faster is open"
    )
    return f": {less} ({band}), {open_}."


def saved_over(fastest: Point, other: Point) -> tuple[float, float]:
    """Return the least and the most share of the time that one point saves over another, at ENDS and in between.

    Both are of one training: steps, links and jitter are the same at each end.
    """
    saved = [1 - fastest.train_s / other.train_s]
    saved += [
        1 - one / two for one, two in zip(fastest.ends_s, other.ends_s, strict=True)
    ]
    return min(saved), max(saved)


def decision(
    predictor: Predictor,
    choice: Choice,
    scale: Mapping[Point, float],
    price: float | None,
) -> list[str]:
    """Return what is chosen, for how much, whether that holds at both ends, and what another link changes."""
    point, (hour, each) = choice.point, predictor.platform.hours
    factor = scale.get(point, 1.0)
    time = point.time.map(lambda seconds: factor * seconds)
    place = f"{counted(point.nodes, 'node')} ({counted(point.workers, 'worker')})"
    said = f"Decision: {point.strategy} on {place}, "
    said += hours_span(time, point.workers * each, hour, price)
    said += " to the target" if scale else ""
    said += _robust(choice)
    return [said, *_other_links(predictor, choice, factor)]


def _robust(choice: Choice) -> str:
    if not choice.changes:
        return "; it is the same at both ends of the interval."
    words: dict[str, list[str]] = {}
    for end, other in choice.changes.items():
        words.setdefault(
            f"{other.strategy} at {counted(other.workers, 'worker')}", []
        ).append(end)
    ends = "; ".join(
        f"{point} with {ends_in_words(own)}" for point, own in words.items()
    )
    links_alone = not set(choice.changes) & set(ENDS[:2])
    what = (
        "Collectives measured there (scalebench calibrate)"
        if links_alone
        else "A measured step time (--step-time)"
    )
    return f"; not at both ends of the interval: {ends}. {what} would tell."


def _other_links(predictor: Predictor, choice: Choice, scale: float) -> list[str]:
    """Say what half and twice the bandwidth between nodes change in `scale` times the training."""
    point, platform, batch = choice.point, predictor.platform, predictor.workload.batch
    if point.nodes == 1:
        return []
    own = platform.cluster.links.inter.bandwidth_bytes_per_s * 8 / 1e9
    rivals = [point, choice.fastest] if choice.fastest is not point else [point]
    parts = []
    for factor in (0.5, 2.0):
        case = [Case(platform.between_nodes(factor), batch)]
        times = [
            float(predictor.times(each.strategy, each.workers, case).time[0])
            for each in rivals
        ]
        change = times[0] / point.train_s - 1
        text = f"on links of {digits(factor * own)} Gbit/s {seconds(scale * times[0])}"
        # Less would be printed as 0.0 %.
        text += f" ({100 * change:+.1f} %)" if abs(change) >= 5e-4 else " (no change)"
        if len(times) > 1:
            saved = 1 - times[1] / times[0]
            text += f", {rivals[1].strategy} {share(saved)} {'less' if saved > 0 else 'more'}"
        parts.append(text)
    return [f"  Between nodes {digits(own)} Gbit/s: {'; '.join(parts)}."]


def epochs_taken_as_equal(strategies: Sequence[Component]) -> str:
    """Return a caveat that names the strategies whose steps do not take the mean gradient; empty without any."""
    averaging = dict.fromkeys(
        str(strategy) for strategy in strategies if not averages_gradients(strategy)
    )
    if not averaging:
        return ""
    return (
        f"Epochs are taken as equal: {', '.join(averaging)} may need more for the same accuracy, as a step does not "
        "take the mean of all gradients"
    )


def interval_words(points: Sequence[Point]) -> str:
    """Return what the interval of the last of `points` is made of."""
    return f"Intervals: {points[-1].known}."


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
    # Whole nodes, where a single worker more or less is no question.
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
        # Larger batches find no more samples.
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
    name = strategy.traits.options.get("interval")
    if name is None:
        return None
    steps = 1 if strategy.synchronisation.epochs else point.steps
    # of a training that synchronises
    longest = min(_LONGEST_INTERVAL, int(steps * point.epochs))
    powers = (1 << power for power in range(longest.bit_length()))
    least = registry.least_of(strategy, name)
    intervals = [interval for interval in powers if interval >= least]

    def holds(interval: int) -> bool:
        longer = point.strategy.with_option(name, interval)
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
