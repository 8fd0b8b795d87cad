"""The axes of a what-if: each quantity that may vary, with its unit, its range, and how it changes a cell.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from scalebench.errors import UsageError, nearest
from scalebench.formatting import digits
from scalebench.pricing.platform import RATES, Platform
from scalebench.pricing.prediction import Predictor
from scalebench.pricing.program import Identity
from scalebench.strategies import registry
from scalebench.strategies.traits import Varied
from scalebench.study.spec import Component

_GBIT = 1e9 / 8  # bytes/s
_OLD_NAMES = {"link-bandwidth": "network-bandwidth"}
_POINTS, _MOST_POINTS = 50, 1000
_LEAST = 1e-9
_FACTORS_WRITTEN = re.compile(
    r"[^x,.:]*(\.[^x,.:]*)?x((,|\.\.)[^x,.:]*(\.[^x,.:]*)?x)*(:[^x]*)?"
)
_FORM = "expected AXIS=LOW..HIGH, AXIS=LOW..HIGH:POINTS or AXIS=VALUE,VALUE,..."


class ChangedPlatforms:
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


class PricedCell:
    """The platform, batch, strategy and workers of one cell."""

    def __init__(
        self,
        predictor: Predictor,
        strategy: Component,
        workers: int,
        kept: ChangedPlatforms,
    ) -> None:
        self.kept = kept
        self.platform, self.batch = predictor.platform, predictor.workload.batch
        self.strategy, self.workers = strategy, workers
        self.links = predictor.platform.cluster.links
        # Of the strategy as stated: with one of two axes alone, as more stages than
        # micro-batches, it may be none.
        self.options = predictor.strategy(strategy).traits.options


class Shares(NamedTuple):
    """Shares of a training's time, as texts: of communication what is exposed and what hides behind compute."""

    exposed: str
    hidden: str
    waiting: str
    compute: str


def _of_communication(of: Shares) -> str:
    return (
        f"exposed communication is {of.exposed} of it, {of.hidden} hides behind compute"
    )


def _of_waiting(of: Shares) -> str:
    return f"workers wait for each other in {of.waiting} of it"


def _of_kernels(of: Shares) -> str:
    return f"{of.exposed} of it is exposed communication, and no kernel is bound by it"


def _of_compute(of: Shares) -> str:
    return f"{of.compute} of it is compute, which does not change with it"


@dataclass(frozen=True)
class Quantity:
    """A number of a training that may vary: `give` sets it in a cell, `reason` says why a time does not react to it.

    `give` gets the cell, the value, and True if this is a factor on the platform's own.
    """

    name: str
    give: Callable[[PricedCell, float, bool], None]
    reason: Callable[[Shares], str] = _of_compute
    unit: str = ""  # of each value
    counts: str = ""  # what the values are numbers of
    takes_factors: bool = False  # and no others, where it has no unit
    is_whole: bool = False
    least: float = _LEAST
    between_workers: bool = False  # of no effect on a single one
    # why it is absent with so many workers, and so many on a node
    absence: Callable[[int, int], str] = lambda workers, node: ""

    def has_factors(self, relative: bool) -> bool:
        """Return True if values are factors on the platform's own."""
        return self.takes_factors and (relative or not self.unit)


def _component(
    name: str,
    component: str,
    reason: Callable[[Shares], str],
    *,
    between_workers: bool = False,
) -> Quantity:
    """Return the quantity that multiplies a component of the platform."""

    def give(cell: PricedCell, value: float, relative: bool) -> None:
        cell.platform = cell.kept.changed(cell.platform, component, value)

    return Quantity(
        name, give, reason, takes_factors=True, between_workers=between_workers
    )


def _option(name: Varied, counts: str = "") -> Quantity:
    """Return the quantity that an option of strategies states."""

    def give(cell: PricedCell, value: float, relative: bool) -> None:
        if name not in cell.options:
            others = " or ".join(registry.that_vary(name))
            raise UsageError(
                f"axis {name}: strategy {cell.strategy.name} has no option for it; use {others}"
            )
        cell.strategy = cell.strategy.with_option(cell.options[name], round(value))

    return Quantity(name, give, counts=counts, is_whole=True, least=1.0)


def _give_network(cell: PricedCell, value: float, relative: bool) -> None:
    own = 1.0 if relative else cell.links.inter.bandwidth_bytes_per_s / _GBIT
    cell.platform = cell.platform.between_nodes(value / own)


def _give_node(cell: PricedCell, value: float, relative: bool) -> None:
    own = 1.0 if relative else cell.links.intra.bandwidth_bytes_per_s / _GBIT
    cell.platform = cell.platform.inside_nodes(value / own)


def _give_jitter(cell: PricedCell, value: float, relative: bool) -> None:
    # A stated jitter has no range.
    cell.platform = replace(cell.platform, jitter=value, jitter_range=None)


def _give_batch(cell: PricedCell, value: float, relative: bool) -> None:
    cell.batch = round(value)


def _give_workers(cell: PricedCell, value: float, relative: bool) -> None:
    cell.workers = round(value)


def _without_network(workers: int, node: int) -> str:
    return f"all {workers:,} workers are on one node" if workers <= node else ""


def _without_links_inside(workers: int, node: int) -> str:
    return "a node holds one worker" if node == 1 else ""


QUANTITIES = {
    each.name: each
    for each in (
        Quantity("batch", _give_batch, counts="samples", is_whole=True, least=1.0),
        _component("flops", "compute", _of_kernels),
        _component("memory-bandwidth", "memory bandwidth", _of_kernels),
        Quantity(
            "network-bandwidth",
            _give_network,
            _of_communication,
            unit="Gbit/s",
            takes_factors=True,
            between_workers=True,
            absence=_without_network,
        ),
        Quantity(
            "node-bandwidth",
            _give_node,
            _of_communication,
            unit="Gbit/s",
            takes_factors=True,
            between_workers=True,
            absence=_without_links_inside,
        ),
        Quantity("workers", _give_workers, is_whole=True, least=1.0),
        _component(
            "latency", "network latency", _of_communication, between_workers=True
        ),
        Quantity(
            "jitter",
            _give_jitter,
            _of_waiting,
            counts="share of a step",
            least=0.0,
            between_workers=True,
        ),
        replace(
            _option("interval", "steps or epochs"),
            reason=_of_communication,
            between_workers=True,
        ),
        _option("pipeline"),
        _option("tensor"),
        _option("micro_batches"),
    )
}


@dataclass(frozen=True)
class Axis:
    """Values of one of QUANTITIES; `relative` values of a bandwidth of links are factors, too."""

    name: str
    values: tuple[float, ...]
    relative: bool = False

    def __post_init__(self) -> None:
        # A frozen value is set here once: an old name of an axis means its new one.
        object.__setattr__(self, "name", _OLD_NAMES.get(self.name, self.name))
        quantity = self.quantity
        if self.relative and not quantity.takes_factors:
            raise UsageError(
                f"axis {self.name}: takes no factors on the platform's own; leave the x out"
            )
        wrong = [
            value for value in self.values if not quantity.least <= value < math.inf
        ]
        if wrong or not self.values:
            raise UsageError(
                f"axis {self.name}: expected values of {quantity.least:g} or more, got {(*wrong, 'none')[0]}"
            )

    @property
    def quantity(self) -> Quantity:
        """What varies."""
        return _named(self.name)

    def at(self, value: float) -> str:
        """Return `network-bandwidth 100 Gbit/s`, `latency 0.500 x`, `workers 1,024`."""
        return f"{self.name} {self.text(value)}"

    def text(self, value: float) -> str:
        """Return a value with its unit."""
        if self.quantity.is_whole:
            return f"{value:,.0f}"
        return f"{digits(value)} {self.unit}".rstrip()

    @property
    def unit(self) -> str:
        """`Gbit/s`, `x` for factors, or nothing."""
        return "x" if self.has_factors else self.quantity.unit

    @property
    def has_factors(self) -> bool:
        """True if the values are factors on the platform's own."""
        return self.quantity.has_factors(self.relative)

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
        if not equals:
            raise UsageError(f"axis {text!r}: {_FORM}")
        quantity = _named(name)
        try:
            values = _values(quantity, said.replace("x", ""))
            if quantity.is_whole:
                # Counts of a logarithmic range coincide when rounded.
                values = sorted({float(round(value)) for value in values})
        except (ValueError, OverflowError):
            raise UsageError(f"axis {text!r}: {_FORM}") from None
        return cls(name, tuple(values), relative)

    @property
    def title(self) -> str:
        """Name with its unit."""
        quantity = self.quantity
        unit = (
            "times the platform's"
            if self.has_factors
            else quantity.unit or quantity.counts
        )
        return f"{self.name.replace('-', ' ')} ({unit})" if unit else self.name


def _named(name: str) -> Quantity:
    found = QUANTITIES.get(_OLD_NAMES.get(name, name))
    if found is None:
        raise UsageError(f"unknown axis {name!r}; {nearest(name, QUANTITIES)}")
    return found


def _values(quantity: Quantity, said: str) -> list[float]:
    """Return the values of a range, or of a list."""
    span, _, points = said.partition(":")
    low, dots, high = span.partition("..")
    if not dots:
        return sorted({float(value) for value in said.split(",")})
    ends, count = (float(low), float(high)), int(points or _POINTS)
    if not 2 <= count <= _MOST_POINTS:
        raise UsageError(
            f"axis {quantity.name}: expected 2 to {_MOST_POINTS:,} points, got {count:,}"
        )
    if not min(quantity.least, _LEAST) <= ends[0] < ends[1] < math.inf:
        raise UsageError(
            f"axis {quantity.name}: expected a range that rises from above 0, got {span}"
        )
    # A range from 0 has no logarithms.
    spaced = np.geomspace if quantity.least else np.linspace
    values: list[float] = spaced(*ends, count).tolist()
    return values
