"""Interval of a predicted time: from the source of its steps, the links, jitter, and the distance from what is known.

The training is priced at four ends: steps as fast and as slow as their source may be
off (`devices.StepError`), on links at the speed that the cluster states and at the
least share of it that published measurements reached. At the slow end of the links
hidden communication delays a step all the same, and jitter that nobody stated is as
large as found. The interval spans the ends, and widens with the square root of the
doublings of workers from a single one. These are the terms of the intervals of
published measurements (`validation.held_out`), of which 93 % held with these alone.

Where a calibration measured the engine, its links are not varied, and doublings count
beyond what it measured. Where a prediction lies outside what its inputs are known to
hold for, `outside` says it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from scalebench.formatting import share
from scalebench.measured import Measured
from scalebench.pricing.devices import MeasuredSteps, StepError
from scalebench.pricing.platform import Platform
from scalebench.pricing.prediction import Case, Predictor, Times
from scalebench.study.spec import Component

# Of the base rows of experiments/published/scaling.csv (a test compares them with the
# fit).
LEAST_SHARE = 0.37  # of the stated speed of links
JITTER = (0.003, 0.035)
PER_DOUBLING = 0.056  # half of the 95 % interval of ln T
# Of paced runs with twice and four times the workers of the calibration
# (experiments/this-machine, shaped-links).
MEASURED_PER_DOUBLING = 0.10

# With fewer steps between synchronisations a study is warned, too.
_FEW_STEPS = 8

ENDS = (
    "fast steps",
    "slow steps",
    "fast steps on slow links",
    "slow steps on slow links",
)
_BOTH = {
    "fast steps": ENDS[::2],
    "slow steps": ENDS[1::2],
    "slow links": ENDS[2:],
}  # whatever the other one is


class Uncertainty(NamedTuple):
    """What the interval of trainings among a number of workers is made of."""

    step: StepError
    least_share: float  # of the speed of links
    # 0 where what was measured reaches as far.
    doublings: float
    per_doubling: float

    @property
    def margin(self) -> float:
        """Factor for the distance."""
        # Errors of doublings are taken as independent, so that their variances add.
        return math.exp(self.per_doubling * math.sqrt(self.doublings))

    def __str__(self) -> str:
        """`devices reached 29 to 142 % of their roofline; links 37 to 100 % of their speed; 17 % for 8 doublings`."""
        said = [self.step.why]
        if self.least_share < 1:
            said.append(
                f"links {100 * self.least_share:.0f} to 100 % of the stated speed"
            )
        if self.doublings:
            said.append(
                f"{share(self.margin - 1)} for {self.doublings:.1f} doublings of workers"
            )
        return "; ".join(said)


def ends_in_words(ends: Sequence[str]) -> str:
    """Return `slow links` for both ends with these, `fast steps or slow steps` where no words are for all."""
    return next(
        (words for words, own in _BOTH.items() if set(own) == set(ends)),
        " or ".join(ends),
    )


def uncertainty_of(
    predictor: Predictor,
    strategy: Component,
    workers: int,
    batch: int | None = None,
    changed: Platform | None = None,
) -> Uncertainty:
    """Return how uncertain a training by `strategy` among `workers` is, on the platform or on a changed one."""
    platform = changed or predictor.platform
    _, samples = predictor.batches(strategy, workers, batch)
    # A stage computes a micro-batch at a time.
    samples /= predictor.micro_batches(strategy, workers)
    step = platform.device.under(
        min(workers, platform.cluster.node.workers_per_node)
    ).error(samples)
    entries = platform.engines.measured(predictor.engine(strategy))
    # A lone worker uses no links.
    if workers == 1:
        return Uncertainty(step, 1.0, 0.0, 0.0)
    if not entries:
        return Uncertainty(step, LEAST_SHARE, math.log2(workers), PER_DOUBLING)
    nodes = -(-workers // platform.cluster.node.workers_per_node)
    # Ranks and nodes: more nodes at equal ranks are unmeasured, too.
    beyond = [
        workers / max(entry.ranks for entry in entries),
        nodes / max(entry.nodes for entry in entries),
    ]
    return Uncertainty(
        step, 1.0, max(0.0, *map(math.log2, beyond)), MEASURED_PER_DOUBLING
    )


def platforms_at_ends(platform: Platform, known: Uncertainty) -> list[Platform]:
    """Return the platform at each of ENDS."""
    # A stated jitter is not varied.
    calm, uneven = platform.jitter_range or (platform.jitter, platform.jitter)
    fast, slow = (
        replace(platform, device=platform.device.slower(ratio))
        for ratio in known.step[:2]
    )
    found = []
    # In the order of ENDS.
    for linked, jitter in ((1.0, calm), (known.least_share, uneven)):
        for each in (fast, slow):
            changed = each if linked == 1 else each.changed("network bandwidth", linked)
            found.append(replace(changed, jitter=jitter))
    return found


def seconds_at_ends(times: Times, first: int) -> tuple[float, ...]:
    """Return the seconds of whole trainings at ENDS, which are the cases from `first` on."""
    own = slice(first, first + len(ENDS))
    exposed = times.comm[own] - times.wait[own]
    # At the slow end, what overlaps slows compute down by as much as it takes.
    hidden = np.maximum(0.0, times.transfer[own] - exposed)
    hidden[: len(ENDS) // 2] = 0.0  # all of it is hidden, as predicted
    seconds: list[float] = (times.time[own] + hidden).tolist()
    return tuple(seconds)


def with_interval(time: float, ends: Sequence[float], margin: float) -> Measured:
    """Return a time with its interval by its ends."""
    # It has a jitter of its own, by which it may lie outside the ends.
    return Measured(time, min(*ends, time) / margin, max(*ends, time) * margin)


def cases_at_ends(platform: Platform, known: Uncertainty, batch: int) -> list[Case]:
    """Return a case for each of ENDS."""
    return [Case(each, batch) for each in platforms_at_ends(platform, known)]


def outside(
    predictor: Predictor, strategy: Component, workers: int, batch: int | None = None
) -> tuple[str, ...]:
    """Return where a training lies outside the range of its inputs."""
    platform, node = predictor.platform, predictor.platform.cluster.node
    steps, samples = predictor.batches(strategy, workers, batch)
    samples /= predictor.micro_batches(strategy, workers)
    program, found = predictor.strategy(strategy), []
    if workers > (room := platform.cluster.nodes * node.workers_per_node):
        found.append(f"beyond the {room:,} workers of {platform.cluster.name}")
    found += platform.device.outside(
        predictor.workload.layers, samples, min(workers, node.workers_per_node)
    )
    measured = any(
        not entry.stated for entry in platform.engines.entries
    ) or isinstance(platform.device, MeasuredSteps)
    # A named arithmetic is that of steps and means of gradients: there is nothing else
    # to measure, but where workers take these steps by shares of layers.
    besides = (
        program.traits.shares_layers(workers) or program.arithmetic(workers) is None
    )
    if (
        workers > 1
        and measured
        and besides
        and str(strategy) not in platform.operations
    ):
        found.append(f"what {strategy} computes beside steps was not measured")
    if workers > 1:
        found += _of_engine(predictor, predictor.engine(strategy), workers)
    if steps < _FEW_STEPS:
        found.append(f"fewer than {_FEW_STEPS} steps an epoch")
    if not program.deterministic:
        found.append("steady state of a queue")
    if program.traits.adapts and workers > 1:
        found.append("the first layout is kept")
    return tuple(found)


def _of_engine(predictor: Predictor, engine: str, workers: int) -> list[str]:
    """Return what of the collectives among `workers` was not measured, if any was."""
    # Rounded up, without floating-point numbers.
    nodes = -(-workers // predictor.platform.cluster.node.workers_per_node)
    own = predictor.platform.engines.measured(engine)
    if not own:
        return []
    most_nodes = max(entry.nodes for entry in own)
    if nodes > most_nodes:
        return [
            f"{engine} measured on {most_nodes} node{'s' * (most_nodes > 1)}, its links are modelled beyond"
        ]
    # Ranks on one node do not say how an engine does between nodes.
    most = max(entry.ranks for entry in own if (entry.nodes > 1) == (nodes > 1))
    return [f"{engine} measured among {most} ranks"] if workers > most else []
