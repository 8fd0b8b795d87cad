"""What-if: the time of a training along one axis, or in the plane of two, and what binds it in each cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from scalebench.errors import UsageError
from scalebench.formatting import seconds, share
from scalebench.measured import Measured
from scalebench.pricing.axes import (
    QUANTITIES,
    Axis,
    ChangedPlatforms,
    PricedCell,
    Quantity,
    Shares,
)
from scalebench.pricing.memory import lacking
from scalebench.pricing.platform import Platform, binding, parts
from scalebench.pricing.prediction import Case, Predictor
from scalebench.pricing.uncertainty import (
    ENDS,
    cases_at_ends,
    outside,
    seconds_at_ends,
    uncertainty_of,
)
from scalebench.pricing.workload import SERIAL
from scalebench.study.spec import Component

Floats = NDArray[np.float64]
MOST_ROWS = 24  # cells of which each has a row with its interval


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
    def varies_workers(self) -> bool:
        """True if one of the axes is the number of workers."""
        return any(axis.name == "workers" for axis in self.axes)

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
    rows, columns = (*(len(axis.values) for axis in axes), 1)[:2]
    groups: dict[tuple[int, str], tuple[Component, list[tuple[int, Case]]]] = {}
    platforms: dict[tuple[float, ...], Platform] = {}
    kept = ChangedPlatforms()
    for place, values in enumerate(product(*(axis.values for axis in axes))):
        cell = PricedCell(predictor, strategy, workers, kept)
        for axis, value in zip(axes, values, strict=True):
            axis.quantity.give(cell, value, axis.relative)
        key = tuple(
            value
            for axis, value in zip(axes, values, strict=True)
            if not axis.quantity.is_whole
        )
        # shared, so that its step times are computed once
        platform = platforms.setdefault(key, cell.platform)
        _, own = groups.setdefault(
            (cell.workers, str(cell.strategy)), (cell.strategy, [])
        )
        own.append((place, Case(platform, cell.batch)))
    plane = _priced(predictor, groups, tuple(axes), (rows, columns), kept)
    # Intervals take four prices more for each cell: those that are printed have them.
    if plane.train_s.size <= MOST_ROWS:
        plane = _with_intervals(predictor, groups, plane)
    if without := plane.without_effect():
        (_, _), (strategy, ((_, case), *_)) = next(iter(groups.items()))
        workers = next(iter(groups))[0]
        plane = replace(
            plane,
            reasons={
                name: _why(predictor, strategy, workers, case, QUANTITIES[name])
                for name in without
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
    predictor: Predictor,
    strategy: Component,
    workers: int,
    case: Case,
    quantity: Quantity,
) -> str:
    """Return why the training of one cell does not react to `quantity`."""
    if quantity.between_workers and workers == 1:
        return "a single worker neither sends nor waits"
    node = case.platform.cluster.node.workers_per_node
    if absence := quantity.absence(workers, node):
        return absence
    times = predictor.times(strategy, workers, [case])
    whole, exposed = float(times.time[0]), float(times.comm[0] - times.wait[0])
    hidden = max(0.0, float(times.transfer[0]) - exposed)
    waiting, compute = float(times.wait[0]), float(times.compute[0])
    taken = (exposed, hidden, waiting, compute)
    return quantity.reason(Shares(*(share(part / whole) for part in taken)))


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
    kept: ChangedPlatforms,
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
