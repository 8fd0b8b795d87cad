"""Grid of predictions: one point for each strategy and worker count, with what binds it and what it costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from scalebench.cluster.mesh import Mesh
from scalebench.errors import UsageError
from scalebench.measured import Measured
from scalebench.pricing import uncertainty
from scalebench.pricing.memory import WorkerMemory, lacking, memory_of
from scalebench.pricing.overlap import hidden_s
from scalebench.pricing.platform import binding, parts
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.workload import SERIAL
from scalebench.study.spec import Component

# least factor by which half of a component's time shortens the training, to count
_REACTS = 1.001


@dataclass(frozen=True, eq=False)
class Point:
    """Prediction of one training.

    `ends_s` are its seconds at each of `uncertainty.ENDS`. `gains` are the factors by
    which the training becomes shorter with half the time of each component, and
    `halves_s` its seconds with half of all communication and with half of all else;
    `outside` says where the point lies outside what its inputs are known to hold for,
    `lacking` which memory it has too little of.
    """

    strategy: Component
    workers: int
    nodes: int
    batch: float
    steps: int
    epochs: float
    epoch_s: float
    train_s: float
    speedup: float
    compute_s: float
    data_s: float
    other_s: float
    exposed_s: float
    hidden_s: float
    wait_s: float
    bubble_s: float
    memory: WorkerMemory
    gains: dict[str, float]
    halves_s: tuple[float, float]
    queued: bool
    known: uncertainty.Uncertainty
    ends_s: tuple[float, ...]
    lacking: str = ""
    outside: tuple[str, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)
    micro_batches: int = 1

    @property
    def batch_global(self) -> float:
        """Samples in a step of all replicas, each of which takes `batch`."""
        return self.batch * self.mesh.data

    @property
    def time(self) -> Measured:
        """Seconds of the training with their interval."""
        return uncertainty.with_interval(self.train_s, self.ends_s, self.known.margin)

    @property
    def marked(self) -> bool:
        """True where the point lies outside what is known, or does not fit."""
        return bool(self.outside or self.lacking)

    @property
    def step_s(self) -> float:
        """Seconds of an epoch divided by its number of steps."""
        return self.epoch_s / self.steps

    @property
    def efficiency(self) -> float:
        return self.speedup / self.workers

    @property
    def utilisation(self) -> float:
        """Share of the training in which a worker computes."""
        return self.compute_s / self.train_s

    @property
    def worker_hours(self) -> float:
        return self.workers * self.train_s / 3600

    @property
    def shares(self) -> dict[str, float]:
        """Return the share of the time that follows each component: twice what half of its time takes off.

        They add up to less than 1 where a part hides behind another one, and shortening
        one of them does not help; to more where one waits for another in steps, as
        Horovod's gradients for its cycle.
        """
        return {
            name: 2 * (1 - 1 / gain)
            for name, gain in self.gains.items()
            if gain >= _REACTS
        }

    @property
    def binds(self) -> str:
        """The component whose halving shortens the training most, in parentheses that of a server or shared model.

        It is one of communication or one of all others, as `platform.binding` says.
        """
        communicating = (self.exposed_s - self.wait_s) / self.train_s
        best = max(
            binding(self.gains, communicating, self.halves_s),
            key=lambda name: self.gains[name],
        )
        return f"{best} (queue)" if self.queued and best.startswith("network") else best


Refused = dict[str, dict[int, str]]  # reasons by strategy and workers


@dataclass
class Grid:
    """Points of a prediction, and one line for each reason why others are not predicted."""

    points: list[Point] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def of(self, strategy: Component) -> list[Point]:
        """Return the points of a strategy by ascending workers."""
        return [point for point in self.points if point.strategy == strategy]

    def advised(self) -> list[Point]:
        """Return the points to choose from: those that fit, and of them those inside what is known if there are any."""
        fitting = [point for point in self.points if not point.lacking]
        return [point for point in fitting if not point.outside] or fitting

    def without_effect(self) -> list[str]:
        """Return the components that no point reacts to."""
        names = dict.fromkeys(name for point in self.points for name in point.gains)
        return [
            name
            for name in names
            if all(point.gains.get(name, 1.0) < _REACTS for point in self.points)
        ]


def predict(
    predictor: Predictor, strategies: Sequence[Component], counts: Sequence[int]
) -> Grid:
    """Predict `strategies` at each worker count, and name those that do not suit by the reason."""
    grid = Grid()
    refused: dict[str, Refused] = {}  # by the reason without its numbers
    alone = float(
        predictor.times(
            SERIAL, 1, [Case(predictor.platform, predictor.workload.batch)]
        ).time[0]
    )
    for strategy in strategies:
        for workers in counts:
            try:
                # Replicas of several workers take larger batches: speedup compares at
                # equal global batches.
                base = alone
                if predictor.mesh(strategy, workers).parts > 1:
                    base = _alone_at(predictor, strategy, workers)
                grid.points.append(_point(predictor, strategy, workers, base))
            except UsageError as error:
                reason = str(error).partition(": ")[2] or str(error)
                # What is refused for one reason shares a line; the numbers in it differ.
                same = refused.setdefault(re.sub(r"\d[\d,]*", "", reason), {})
                same.setdefault(str(strategy), {})[workers] = reason
    grid.refusals += map(_in_a_line, refused.values())
    return grid


def _in_a_line(refused: Refused) -> str:
    """Return the strategies, by the worker counts of each, with the reason at the largest count."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for strategy, reasons in refused.items():
        alike.setdefault(tuple(reasons), []).append(strategy)
    places = [
        f"{', '.join(names)} at {', '.join(f'{n:,}' for n in counts)} worker{'s' * (counts != (1,))}"
        for counts, names in alike.items()
    ]
    _, reason = max(pair for own in refused.values() for pair in own.items())
    return f"{'; '.join(places)}: {reason}"


def _alone_at(predictor: Predictor, strategy: Component, workers: int) -> float:
    """Return the seconds of serial training at the global batch of replicas that have several workers."""
    workload = predictor.workload
    together = (
        workload.batch
        if workload.in_all
        else workload.batch * predictor.mesh(strategy, workers).data
    )
    return float(
        predictor.times(SERIAL, 1, [Case(predictor.platform, together)]).time[0]
    )


def _point(
    predictor: Predictor, strategy: Component, workers: int, alone: float
) -> Point:
    platform, workload = predictor.platform, predictor.workload
    steps, batch = predictor.batches(strategy, workers)
    cases = [Case(platform, workload.batch)]
    components = predictor.components(strategy, platform)
    # Everything that a point is asked is priced in one call: its cases share a walk.
    cases += [Case(platform.improved(name), workload.batch) for name in components]
    cases += [
        Case(platform.improved(*names), workload.batch) for names in parts(components)
    ]
    known = uncertainty.uncertainty_of(predictor, strategy, workers)
    cases += uncertainty.cases_at_ends(platform, known, workload.batch)
    times = predictor.times(strategy, workers, cases)
    train_s = float(times.time[0])
    halves = 1 + len(components)
    first_end = halves + 2
    gains = dict(
        zip(components, (train_s / times.time[1:halves]).tolist(), strict=True)
    )
    return Point(
        strategy=strategy,
        workers=workers,
        nodes=-(-workers // platform.cluster.node.workers_per_node),
        batch=batch,
        steps=steps,
        epochs=workload.epochs,
        epoch_s=train_s / workload.epochs,
        train_s=train_s,
        speedup=alone / train_s,
        compute_s=float(times.compute[0]),
        data_s=float(times.data[0]),
        other_s=float(times.other[0]),
        exposed_s=float(times.comm[0]),
        hidden_s=hidden_s(
            float(times.transfer[0]), float(times.comm[0] - times.wait[0]), train_s
        ),
        wait_s=float(times.wait[0]),
        bubble_s=float(times.bubble[0]),
        memory=memory_of(predictor, strategy, workers),
        gains=gains,
        halves_s=(float(times.time[halves]), float(times.time[halves + 1])),
        queued=bool(times.queued[0]),
        known=known,
        ends_s=uncertainty.seconds_at_ends(times, first_end),
        lacking=lacking(predictor, strategy, workers),
        outside=uncertainty.outside(predictor, strategy, workers),
        mesh=predictor.mesh(strategy, workers),
        micro_batches=predictor.micro_batches(strategy, workers),
    )
