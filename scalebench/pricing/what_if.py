"""What-if: the time of a training along one axis, or in the plane of two, and what binds it in each cell.

The axes of Barrachina et al., Computing 2021 (batch, flop rate, memory bandwidth, link
bandwidth, cluster size), and latency, jitter, the interval between synchronisations,
and the stages, tensor degree and micro-batches of a replica in parts. The bandwidths of
links are in Gbit/s of one card, between nodes (`network-bandwidth`) or inside them
(`node-bandwidth`), or factors (`0.5x`) on the platform's; other rates and latency are
factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import UsageError, nearest
from scalebench.formatting import digits, seconds, share
from scalebench.measured import Measured
from scalebench.pricing.memory import lacking
from scalebench.pricing.platform import RATES, Platform, binding, parts
from scalebench.pricing.prediction import SERIAL, Case, Predictor
from scalebench.pricing.program import Identity
from scalebench.pricing.uncertainty import (
    ENDS,
    cases_at_ends,
    outside,
    seconds_at_ends,
    uncertainty_of,
)
from scalebench.strategies import registry
from scalebench.strategies.traits import Varied
from scalebench.study.spec import Component

Floats = NDArray[np.float64]
# Axis -> component of a platform that it multiplies; the others have values of their
# own.
FACTORS = {
    "flops": "compute",
    "memory-bandwidth": "memory bandwidth",
    "latency": "network latency",
}
BANDWIDTHS = ("network-bandwidth", "node-bandwidth")
# divisions of a model, each by an option of its strategy
DIVISIONS: tuple[Varied, ...] = ("pipeline", "tensor", "micro_batches")
COUNTS = ("batch", "workers", "interval", *DIVISIONS)
MOST_ROWS = 24  # cells of which each has a row with its interval
_GBIT = 1e9 / 8  # bytes/s
_OLD_NAMES = {"link-bandwidth": "network-bandwidth"}
_POINTS, _MOST_POINTS = 50, 1000
_LEAST = 1e-9
_FACTORS_WRITTEN = re.compile(
    r"[^x,.:]*(\.[^x,.:]*)?x((,|\.\.)[^x,.:]*(\.[^x,.:]*)?x)*(:[^x]*)?"
)
_FORM = "expected AXIS=LOW..HIGH, AXIS=LOW..HIGH:POINTS or AXIS=VALUE,VALUE,..."
AXES = (
    "batch",
    "flops",
    "memory-bandwidth",
    *BANDWIDTHS,
    "workers",
    "latency",
    "jitter",
    "interval",
    *DIVISIONS,
)


@dataclass(frozen=True)
class Axis:
    """Values of one of AXES: factors on the platform's own, Gbit/s, samples, workers, a share, or an interval.

    `relative` values of a bandwidth of links are factors, too.
    """

    name: str
    values: tuple[float, ...]
    relative: bool = False

    def __post_init__(self) -> None:
        # A frozen value is set here once: an old name of an axis means its new one.
        object.__setattr__(self, "name", _OLD_NAMES.get(self.name, self.name))
        if self.name not in AXES:
            raise UsageError(f"unknown axis {self.name!r}; {nearest(self.name, AXES)}")
        if self.relative and self.name not in (*FACTORS, *BANDWIDTHS):
            raise UsageError(
                f"axis {self.name}: takes no factors on the platform's own; leave the x out"
            )
        least = 0.0 if self.name == "jitter" else 1.0 if self.name in COUNTS else _LEAST
        wrong = [value for value in self.values if not least <= value < math.inf]
        if wrong or not self.values:
            raise UsageError(
                f"axis {self.name}: expected values of {least:g} or more, got {(*wrong, 'none')[0]}"
            )

    def at(self, value: float) -> str:
        """Return `network-bandwidth 100 Gbit/s`, `latency 0.500 x`, `workers 1,024`."""
        return f"{self.name} {self.text(value)}"

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.name in COUNTS:
            return f"{value:,.0f}"
        return f"{digits(value)}{'' if self.name == 'jitter' else f' {self.unit}'}"

    @property
    def unit(self) -> str:
        """`Gbit/s`, `x` for factors, or nothing."""
        if self.name in BANDWIDTHS and not self.relative:
            return "Gbit/s"
        return "x" if self.name in (*FACTORS, *BANDWIDTHS) else ""

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Return the axis of `AXIS=LOW..HIGH`, `AXIS=LOW..HIGH:POINTS` or `AXIS=VALUE,VALUE,...`.

        A range is logarithmic, that of jitter linear. Values such as `0.5x` are
        factors.
        """
        name, equals, said = text.partition("=")
        relative = "x" in said
        if relative and not _FACTORS_WRITTEN.fullmatch(said):
            raise UsageError(
                f"axis {text!r}: {_FORM}; factors all have an x, as 0.5x,2x"
            )
        said = said.replace("x", "")
        span, _, points = said.partition(":")
        low, dots, high = span.partition("..")
        try:
            if not equals:
                raise ValueError
            if not dots:
                values = sorted({float(value) for value in said.split(",")})
            else:
                ends, count = (float(low), float(high)), int(points or _POINTS)
                if not 2 <= count <= _MOST_POINTS:
                    raise UsageError(
                        f"axis {name}: expected 2 to {_MOST_POINTS:,} points, got {count:,}"
                    )
                if (
                    not (0 if name == "jitter" else _LEAST)
                    <= ends[0]
                    < ends[1]
                    < math.inf
                ):
                    raise UsageError(
                        f"axis {name}: expected a range that rises from above 0, got {span}"
                    )
                values = (np.linspace if name == "jitter" else np.geomspace)(
                    *ends, count
                ).tolist()
            if name in COUNTS:
                # Counts of a logarithmic range coincide when rounded.
                values = sorted({float(round(value)) for value in values})
        except (ValueError, OverflowError):
            raise UsageError(f"axis {text!r}: {_FORM}") from None
        return cls(name, tuple(values), relative)

    @property
    def title(self) -> str:
        """Name with its unit."""
        units = dict.fromkeys(("workers", *DIVISIONS), "")
        units |= {
            "batch": "samples",
            "interval": "steps or epochs",
            "jitter": "share of a step",
        }
        unit = units.get(
            self.name, "Gbit/s" if self.unit == "Gbit/s" else "times the platform's"
        )
        return f"{self.name.replace('-', ' ')} ({unit})" if unit else self.name


@dataclass(frozen=True)
class Plane:
    """Cells of one or two axes: seconds, throughput (samples/s), efficiency, and the binding component, (n, m).

    `bound` holds places in `components`, `outside` and `lacking` say where a cell lies
    outside what the inputs are known to hold for and does not fit; with one axis m is
    1. `low`, `high` and `ends` (n, m, 4) are the intervals of the times and the times
    at `uncertainty.ENDS`, of MOST_ROWS cells or fewer. `reasons` say why an axis has no
    effect.
    """

    axes: tuple[Axis, ...]
    components: tuple[str, ...]
    train_s: Floats
    throughput: Floats
    efficiency: Floats
    bound: NDArray[np.int64]
    outside: NDArray[np.str_]
    lacking: NDArray[np.str_]
    ends: Floats | None = None
    low: Floats | None = None
    high: Floats | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def marked(self) -> NDArray[np.bool_]:
        """True for cells outside what is known, or that do not fit."""
        return np.asarray((self.outside != "") | (self.lacking != ""))

    def least(self) -> tuple[int, int]:
        """Return the cell with the least time, of those that fit and are inside what is known if there are any."""
        allowed = [
            self.lacking == "",
            ~self.marked,
        ]  # one of the last of these that have cells
        chosen = next(
            (each for each in reversed(allowed) if each.any()),
            np.ones(self.train_s.shape, dtype=bool),
        )
        row, column = divmod(
            int(np.where(chosen, self.train_s, np.inf).argmin()), self.train_s.shape[1]
        )
        return row, column

    def time(self, cell: tuple[int, int]) -> Measured:
        """Return the seconds of a cell with their interval."""
        assert self.low is not None
        assert self.high is not None
        times = self.train_s, self.low, self.high
        value, low, high = (float(of[cell]) for of in times)
        return Measured(value, low, high)

    def where(self, cell: tuple[int, int]) -> str:
        """Return a cell's values of the axes."""
        return ", ".join(
            axis.at(axis.values[place])
            for axis, place in zip(self.axes, cell, strict=False)
        )

    def sentences(self) -> list[str]:
        """Return the range of times and where the least is, the share and place of each binding component."""
        said = [
            f"{self.train_s.size:,} cells, modelled: {seconds(float(self.train_s.min()))} to "
            f"{seconds(float(self.train_s.max()))} of training; the least at {self.where(self.least())}"
        ]
        said += [
            f"bound by {name}: {share(part)} of the cells{self._borders(place)}"
            for place, name in enumerate(self.components)
            if (part := self.share_bound_by(name))
        ]
        return said + self.remarks()

    def remarks(self) -> list[str]:
        """Return which axes the time does not react to, and where cells are outside what is known, or too large."""
        said = [
            f"the time does not react to {name}: {self.reasons.get(name, 'nothing waits for it')}"
            for name in self.without_effect()
        ]
        for what, texts in (
            ("outside what the inputs are known to hold for", self.outside),
            ("too large", self.lacking),
        ):
            if len(reasons := list(dict.fromkeys(texts[texts != ""].tolist()))):
                more = "; ..." if len(reasons) > 1 else ""
                said.append(
                    f"{what}, {share(float((texts != '').mean()))} of the cells: {reasons[0]}{more}"
                )
        return said

    def share_bound_by(self, component: str) -> float:
        """Return the share of cells that `component` binds."""
        return float((self.bound == self.components.index(component)).mean())

    def _borders(self, component: int) -> str:
        """Return between which values of the first axis a component binds; with a second one its first and last."""
        axis, columns = self.axes[0], self.bound.shape[1]
        found = []
        for column in range(columns) if len(self.axes) == 1 else (0, columns - 1):
            here = [
                axis.values[row]
                for row in range(len(axis.values))
                if self.bound[row, column] == component
            ]
            if here:
                text = f"{axis.at(min(here))} to {axis.text(max(here))}"
                at = (
                    f" at {self.axes[1].at(self.axes[1].values[column])}"
                    if len(self.axes) > 1
                    else ""
                )
                found.append(text + at)
        return f", {'; '.join(found)}" if found else ""

    def without_effect(self) -> list[str]:
        """Return the axes along which no time changes by 0.1 %."""
        found = []
        for place, axis in enumerate(self.axes):
            if len(axis.values) == 1:
                continue
            spread = self.train_s.max(axis=place) / self.train_s.min(axis=place)
            if (spread < 1.001).all():
                found.append(axis.name)
        return found


def what_if(
    predictor: Predictor, strategy: Component, workers: int, axes: Sequence[Axis]
) -> Plane:
    """Price the training by `strategy` in every cell of one axis or two."""
    if len({axis.name for axis in axes}) < len(axes):
        raise UsageError(f"axis {axes[0].name} is given twice; name two different ones")
    first, second = axes[0], axes[1] if len(axes) > 1 else None
    columns = second.values if second else (float("nan"),)
    shape = (len(first.values), len(columns))
    groups: dict[tuple[int, str], tuple[Component, list[tuple[int, Case]]]] = {}
    platforms: dict[tuple[float, ...], Platform] = {}
    kept = _Parts()
    for place, (one, other) in enumerate((a, b) for a in first.values for b in columns):
        named = {first.name: one} | ({second.name: other} if second else {})
        cell = _PricedCell(predictor, strategy, workers, kept)
        cell.set(named, {axis.name for axis in axes if axis.relative})
        key = tuple(value for name, value in named.items() if name not in COUNTS)
        # shared, so that its step times are computed once
        platform = platforms.setdefault(key, cell.platform)
        _, own = groups.setdefault(
            (cell.workers, str(cell.strategy)), (cell.strategy, [])
        )
        own.append((place, Case(platform, cell.batch)))
    plane = _priced(predictor, groups, tuple(axes), shape, kept)
    # Intervals take four prices more for each cell: those that are printed have them.
    if plane.train_s.size <= MOST_ROWS:
        plane = _with_intervals(predictor, groups, plane)
    if without := plane.without_effect():
        (_, _), (strategy, ((_, case), *_)) = next(iter(groups.items()))
        workers = next(iter(groups))[0]
        plane = replace(
            plane,
            reasons={
                name: _why(predictor, strategy, workers, case, name) for name in without
            },
        )
    return plane


def _with_intervals(
    predictor: Predictor,
    groups: dict[tuple[int, str], tuple[Component, list[tuple[int, Case]]]],
    plane: Plane,
) -> Plane:
    """Add the interval of each cell."""
    cells = plane.train_s.size
    ends, margins = np.empty((cells, len(ENDS))), np.empty(cells)
    for (workers, _), (strategy, own) in groups.items():
        for place, case in own:
            known = uncertainty_of(
                predictor, strategy, workers, case.batch, case.platform
            )
            times = predictor.times(
                strategy, workers, cases_at_ends(case.platform, known, case.batch)
            )
            ends[place], margins[place] = seconds_at_ends(times, 0), known.margin
    shape, centre = plane.train_s.shape, plane.train_s.ravel()
    low = np.minimum(ends.min(axis=1), centre) / margins
    high = np.maximum(ends.max(axis=1), centre) * margins
    return replace(
        plane,
        ends=ends.reshape(*shape, -1),
        low=low.reshape(shape),
        high=high.reshape(shape),
    )


def _why(
    predictor: Predictor, strategy: Component, workers: int, case: Case, axis: str
) -> str:
    """Return why the training of one cell does not react to `axis`."""
    node = case.platform.cluster.node.workers_per_node
    if axis in (*BANDWIDTHS, "latency", "jitter", "interval") and workers == 1:
        return "a single worker neither sends nor waits"
    if axis == "network-bandwidth" and workers <= node:
        return f"all {workers:,} workers are on one node"
    if axis == "node-bandwidth" and node == 1:
        return "a node holds one worker"
    times = predictor.times(strategy, workers, [case])
    whole, exposed = float(times.time[0]), float(times.comm[0] - times.wait[0])
    hidden = max(0.0, float(times.transfer[0]) - exposed)
    if axis in (*BANDWIDTHS, "latency", "interval"):
        return f"exposed communication is {share(exposed / whole)} of it, {share(hidden / whole)} hides behind compute"
    if axis == "jitter":
        return f"workers wait for each other in {share(float(times.wait[0]) / whole)} of it"
    if axis in FACTORS:
        return f"{share(exposed / whole)} of it is exposed communication, and no kernel is bound by it"
    return f"{share(float(times.compute[0]) / whole)} of it is compute, which does not change with it"


def _marks(
    predictor: Predictor, strategy: Component, workers: int, batches: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Return where trainings at `batches` lie outside what is known, and what of them does not fit."""
    distinct = dict.fromkeys(batches)
    known = {
        batch: "; ".join(outside(predictor, strategy, workers, batch))
        for batch in distinct
    }
    large = {batch: lacking(predictor, strategy, workers, batch) for batch in distinct}
    return [known[batch] for batch in batches], [large[batch] for batch in batches]


def _priced(
    predictor: Predictor,
    groups: dict[tuple[int, str], tuple[Component, list[tuple[int, Case]]]],
    axes: tuple[Axis, ...],
    shape: tuple[int, int],
    kept: _Parts,
) -> Plane:
    cells = shape[0] * shape[1]
    names = tuple(
        dict.fromkeys(
            name
            for strategy, own in groups.values()
            for _, case in own
            for name in predictor.components(strategy, case.platform)
        )
    )
    times_s, alone = np.empty(cells), np.empty(cells)
    bound = np.empty(cells, dtype=np.int64)
    outside_of = np.empty(cells, dtype=object)
    lacking_of = np.empty(cells, dtype=object)
    # Singly, for what saves most, and by parts, for which part binds.
    halved = [(name,) for name in names] + [tuple(part) for part in parts(names)]
    improved: dict[tuple[Platform, tuple[str, ...]], Platform] = {}
    for (workers, _), (strategy, own) in groups.items():
        places = [place for place, _ in own]
        cases = [case for _, case in own]
        marks = _marks(predictor, strategy, workers, [case.batch for case in cases])
        outside_of[places], lacking_of[places] = marks
        for together in halved:
            for _, case in own:
                key = (case.platform, together)
                if key not in improved:
                    has = predictor.components(strategy, case.platform)
                    improved[key] = kept.improved(
                        case.platform, *(name for name in together if name in has)
                    )
                cases.append(Case(improved[key], case.batch))
        priced = predictor.times(strategy, workers, cases)
        times = priced.time.reshape(1 + len(halved), len(own))
        times_s[places] = times[0]
        exposed = (priced.comm - priced.wait)[: len(own)] / priced.time[: len(own)]
        bound[places] = _bound(names, exposed, times)
        # Efficiency is against one worker on the same, changed platform.
        alone[places] = (
            predictor.times(SERIAL, 1, [case for _, case in own]).time / workers
        )
    workload = predictor.workload
    return Plane(
        axes,
        names,
        times_s.reshape(shape),
        (workload.epochs * workload.samples / times_s).reshape(shape),
        (alone / times_s).reshape(shape),
        bound.reshape(shape),
        outside_of.astype(str).reshape(shape),
        lacking_of.astype(str).reshape(shape),
    )


def _bound(
    names: Sequence[str], exposed: NDArray[np.float64], times: NDArray[np.float64]
) -> list[int]:
    """Return, for each cell, the component of those that may bind it that saves most at half its time.

    `exposed` (n,) are shares of exposed communication, `times` (1 + m + 2, n) seconds as
    they are, with each component halved, and with both parts.
    """
    found = []
    for at, communicating in enumerate(exposed):
        halves = (float(times[-2, at]), float(times[-1, at]))
        may_bind = binding(names, float(communicating), halves)
        saved = {
            place: float(times[1 + place, at]) for place in map(names.index, may_bind)
        }
        found.append(min(saved, key=saved.__getitem__))
    return found


class _Parts:
    """Devices and clusters with a component changed, shared by the cells, so that each is priced once."""

    def __init__(self) -> None:
        self._changed: dict[tuple[Identity, str, float], Platform] = {}

    def improved(self, platform: Platform, *components: str) -> Platform:
        """Return the platform with half the time of each of `components`."""
        for component in components:
            platform = self.changed(
                platform, component, 2.0 if component in RATES else 0.5
            )
        return platform

    def changed(self, platform: Platform, component: str, factor: float) -> Platform:
        """Return `platform.changed(component, factor)`."""
        of_device = component in ("compute", "memory bandwidth", "launch overhead")
        if not of_device and not component.startswith("network"):
            return platform.changed(component, factor)
        part = platform.device if of_device else platform.cluster
        key = (Identity(part), component, factor)
        if key not in self._changed:
            self._changed[key] = platform.changed(component, factor)
        other = self._changed[key]
        return (
            replace(platform, device=other.device, operations=other.operations)
            if of_device
            else replace(platform, cluster=other.cluster)
        )


class _PricedCell:
    """The platform and batch of one cell."""

    def __init__(
        self, predictor: Predictor, strategy: Component, workers: int, kept: _Parts
    ) -> None:
        self._kept = kept
        self.platform, self.batch = predictor.platform, predictor.workload.batch
        self.strategy, self.workers = strategy, workers
        self._predictor = predictor

    def set(self, values: dict[str, float], relative: Collection[str] = ()) -> None:
        """Give the cell the value of each axis; those of `relative` are factors."""
        links = self._predictor.platform.cluster.links
        # Of the strategy as stated: with one of two axes alone, as more stages than
        # micro-batches, it may be none.
        options = self._predictor.strategy(self.strategy).traits.options
        for name, value in values.items():
            if name in FACTORS:
                self.platform = self._kept.changed(self.platform, FACTORS[name], value)
            elif name == "network-bandwidth":
                own = (
                    1.0
                    if name in relative
                    else links.inter.bandwidth_bytes_per_s / _GBIT
                )
                self.platform = self.platform.between_nodes(value / own)
            elif name == "node-bandwidth":
                own = (
                    1.0
                    if name in relative
                    else links.intra.bandwidth_bytes_per_s / _GBIT
                )
                self.platform = self.platform.inside_nodes(value / own)
            elif name == "jitter":
                # A stated jitter has no range.
                self.platform = replace(self.platform, jitter=value, jitter_range=None)
            elif name == "batch":
                self.batch = round(value)
            elif name == "workers":
                self.workers = round(value)
            else:
                quantity = cast(Varied, name)
                if quantity not in options:
                    others = " or ".join(registry.that_vary(quantity))
                    raise UsageError(
                        f"axis {name}: strategy {self.strategy.name} has no option for it; use {others}"
                    )
                option = options[quantity]
                self.strategy = self.strategy.with_option(option, round(value))
