"""One number of a prediction varied, or two: the answer in words, their table, and rows with all columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from scalebench.errors import UsageError
from scalebench.formatting import counted, percent
from scalebench.measured import Measured
from scalebench.predictions.asked import training_asked_for
from scalebench.predictions.points import engine_asked_for
from scalebench.pricing import advice
from scalebench.pricing.axes import Axis
from scalebench.pricing.uncertainty import ENDS, ends_in_words
from scalebench.pricing.what_if import Plane, what_if
from scalebench.tables.table import CHANGE, SHARE, Column, Table, fields, text

if TYPE_CHECKING:
    from scalebench.pricing.prediction import Predictor
    from scalebench.study.spec import Component

_WORKERS = 64  # where no count is given
_NAMED = 4  # cells
_COMPARED = 2  # strategies whose times a sentence has; the rows have those of more


@dataclass(frozen=True)
class Variation:
    """The cells of each strategy, at `workers` where that is not an axis, and their predictor."""

    predictor: Predictor
    strategies: Sequence[Component]
    planes: Sequence[Plane]
    workers: int
    refusals: Sequence[str] = ()

    def answer(self, price: float | None = None) -> list[str]:
        """Return the decision, what changes along the axis and which strategy to take where; nothing of many cells."""
        chosen, planes, workers = self.strategies, self.planes, self.workers
        # Of many cells the ends of the interval are not priced.
        if planes[0].ends is None:
            return []
        along_workers = planes[0].varies_workers
        place = (
            ""
            if along_workers
            else f"{self.predictor.platform.device.counted(workers)}: "
        )
        said = [place + text for text in _answers(chosen, planes)]
        # Few values of one axis are decided on one by one, others are compared as a
        # whole.
        if (
            len(planes[0].axes) == 1
            and not along_workers
            and len(planes[0].axes[0].values) <= _NAMED
        ):
            decision = _decision(self.predictor, chosen, planes, workers, price)
            caveat = advice.epochs_taken_as_equal(chosen) if len(chosen) > 1 else ""
            said = [
                decision,
                *(said if len(chosen) <= _COMPARED else []),
                *([f"  {caveat}."] if caveat else []),
            ]
        elif len(chosen) > 1:
            said.append(place + _preferred(chosen, planes))
        return [*said, *engine_asked_for(self.predictor, chosen[0])]

    @property
    def is_priced_in_few_cells(self) -> bool:
        """Return True if cells are few enough for rows, and so have their times at the ends of the intervals."""
        return self.planes[0].ends is not None

    def remarks(self) -> Iterator[str]:
        """Yield what rows do not say of each strategy; everything where cells are too many for rows."""
        for strategy, plane in zip(self.strategies, self.planes, strict=True):
            for sentence in (
                plane.remarks() if self.is_priced_in_few_cells else plane.sentences()
            ):
                yield f"{strategy}: {sentence}" if len(self.planes) > 1 else sentence
        yield from (f"Not predicted: {refusal}." for refusal in self.refusals)

    def table(self) -> Table:
        """Return a table with a row for each strategy and cell."""
        strategies, planes, platform = (
            self.strategies,
            self.planes,
            self.predictor.platform,
        )
        axes, rows = planes[0].axes, []
        for strategy, plane in zip(strategies, planes, strict=True):
            first = float(plane.train_s.flat[0])
            for place, values in enumerate(product(*(axis.values for axis in axes))):
                time = plane.time(divmod(place, plane.train_s.shape[1]))
                rows.append(
                    {
                        "strategy": str(strategy),
                        **{
                            axis.name: axis.text(value)
                            for axis, value in zip(axes, values, strict=True)
                        },
                        "training": time,
                        "difference": time.value / first - 1 if place else math.nan,
                        "efficiency": Measured(float(plane.efficiency.flat[place])),
                        "outside": "*" * bool(plane.marked.flat[place]),
                        "bound by": plane.components[plane.bound.flat[place]],
                    }
                )
        columns: list[Column[Any]] = [
            Column("strategy", text("strategy"), shared=True),
            *(Column(axis.name, text(axis.name)) for axis in axes),
            Column("training", itemgetter("training"), advice.SPAN),
            Column("difference", fields("difference"), CHANGE),
            Column(
                "efficiency",
                itemgetter("efficiency"),
                SHARE,
                mark=itemgetter("outside"),
            ),
            Column("bound by", text("bound by"), left=True),
        ]
        title = f"modelled ({platform.device.source}): {self.predictor.training}"
        marked = any(plane.marked.any() for plane in planes)
        notes = (
            ["* outside what the inputs are known to hold for, or too large: below"]
            if marked
            else []
        )
        return Table.of(
            title,
            columns,
            rows,
            ["difference: to the first row of the strategy", *notes],
        )

    def rows(self) -> list[dict[str, object]]:
        """Return a row with all columns for each cell."""
        axes = self.planes[0].axes
        names = [
            # Names of columns hold the unit, as those of records do.
            axis.name.replace("-", "_")
            + ("_gbit_per_s" if axis.unit == "Gbit/s" else "")
            for axis in axes
        ]
        rows: list[dict[str, object]] = []
        for strategy, plane in zip(self.strategies, self.planes, strict=True):
            for place, values in enumerate(product(*(axis.values for axis in axes))):
                rows.append(
                    {
                        "execution": "modelled",
                        "strategy": str(strategy),
                        **dict(zip(names, values, strict=True)),
                        "train_s": plane.train_s.flat[place],
                        "train_s_low": ""
                        if plane.low is None
                        else plane.low.flat[place],
                        "train_s_high": ""
                        if plane.high is None
                        else plane.high.flat[place],
                        "samples_per_s": plane.throughput.flat[place],
                        "efficiency": plane.efficiency.flat[place],
                        "bound_by": plane.components[plane.bound.flat[place]],
                        "fits": "no" if plane.lacking.flat[place] else "",
                        "outside": plane.outside.flat[place],
                    }
                )
        return rows


def varied_training(
    model: str | None,
    strategies: Sequence[str],
    workers: Sequence[int] | None,
    varied: Sequence[str],
    flags: Mapping[str, Any],
    note: Callable[[str], None] = lambda _: None,
    **unfit: object,
) -> Variation:
    """Price the training along the axes `varied`; options that go with several counts only are refused as `unfit`.

    Nothing is trained: the recorded schedule is priced in every cell, and again with
    half the time of each component.
    """
    if given := [name for name, value in unfit.items() if value is not None]:
        flag = given[0].replace("_", "-")
        raise UsageError(
            f"--{flag}: does not go with --vary, which gives times; leave one of them out"
        )
    if workers is not None and len(workers) > 1:
        raise UsageError(
            f"--workers: --vary takes one count, got {len(workers)}; vary them with --vary workers=4,64"
        )
    # three axes have no picture
    if not 1 <= len(varied) <= 2:
        raise UsageError(f"--vary: one axis or two, got {len(varied)}")
    axes = [Axis.parse(text) for text in varied]
    asked = training_asked_for(model, strategies, flags, note)
    count = max(workers or asked.workers, default=_WORKERS)
    found: list[Component] = []
    planes: list[Plane] = []
    refusals: list[UsageError] = []
    for strategy in asked.strategies:
        try:
            planes.append(what_if(asked.predictor, strategy, count, axes))
            found.append(strategy)
        except UsageError as error:
            refusals.append(error)
    # of a study those strategies count that have the axis; who names some means all
    if refusals and (strategies or not asked.workers or not planes):
        raise refusals[0]
    said = [str(error) for error in refusals]
    return Variation(asked.predictor, found, planes, count, said)


def _answers(strategies: Sequence[Component], planes: Sequence[Plane]) -> Iterator[str]:
    """Yield how the last value of an axis differs from its first, or where the least time is."""
    axes = planes[0].axes
    if len(axes) == 1 and len(axes[0].values) > 1:
        axis, parts, most_of_all = axes[0], [], 0.0
        only_at_an_end: list[str] = []
        for strategy, plane in zip(strategies, planes, strict=True):
            changes = _changes(plane, plane, -1)
            most_of_all = max(most_of_all, *map(abs, changes))
            # A change at an end of the interval alone is a risk, not a prediction.
            if abs(changes[0]) < advice.CLEARLY <= max(map(abs, changes)):
                only_at_an_end.append(str(strategy))
            spans = [advice.SPAN.text(plane.time((n, 0))) for n in (-1, 0)]
            band = f"{percent(min(changes)).removesuffix(' %')} to {percent(max(changes))} over the interval"
            parts.append(
                f"{strategy} {spans[0]} instead of {spans[1]}, {percent(changes[0])} ({band})"
            )
        verdict = "" if most_of_all >= advice.CLEARLY else "; no difference to speak of"
        if only_at_an_end:
            verdict = f"; more than a tenth for {' and '.join(only_at_an_end)} at an end of the interval only"
        yield f"{axis.at(axis.values[-1])} instead of {axis.text(axis.values[0])}: {'; '.join(parts)}{verdict}."
    elif len(strategies) == 1:
        (plane,) = planes
        cell = plane.least()
        span = advice.SPAN.text(plane.time(cell))
        yield f"the least time of {strategies[0]} is {span}, at {plane.where(cell)}."


def _decision(
    predictor: Predictor,
    strategies: Sequence[Component],
    planes: Sequence[Plane],
    workers: int,
    price: float | None,
) -> str:
    """Return what to take at the first value of an axis, on how many nodes, for how much, and what another changes."""
    axis, node = planes[0].axes[0], predictor.platform.cluster.node
    nodes = -(-workers // node.workers_per_node)
    hour, each = predictor.platform.hours

    # The fastest, or one that averages gradients where it takes hardly longer: it needs
    # no more epochs.
    def best(place: int) -> int:
        return advice.preferred(
            strategies, [float(plane.train_s[place, 0]) for plane in planes]
        )

    first = best(0)
    time = planes[first].time((0, 0))
    said = f"Decision: {strategies[first]} on {nodes:,} node{'s' * (nodes > 1)} ({counted(workers, 'worker')}) with "
    said += f"{axis.at(axis.values[0])}: {advice.SPAN.text(time)} for "
    said += advice.hours_span(time, workers * each, hour, price)
    for place in range(1, len(axis.values)):
        taken = best(place)
        time = planes[taken].time((place, 0))
        own = (
            "the same"
            if taken == first
            else f"{strategies[taken]}, which averages gradients and takes hardly longer"
        )
        if taken != first and not advice.averages_gradients(strategies[taken]):
            own = f"{strategies[taken]} instead"
        changes = _changes(planes[taken], planes[taken], place)
        band = f"{percent(min(changes)).removesuffix(' %')} to {percent(max(changes))} over the interval"
        said += f"; with {axis.text(axis.values[place])} {own}, {advice.SPAN.text(time)} for "
        said += f"{advice.hours_span(time, workers * each, hour, price)}, {percent(changes[0])} ({band})"
        # Against the time of another strategy it would mix the axis with the choice.
        said += " of its own time with the first" * (taken != first)
    return said + _at_ends(strategies, planes)


def _changes(plane: Plane, base: Plane, place: int) -> list[float]:
    """Return the change of a cell's time against that of the first cell of `base`: as predicted, and at each end."""
    assert plane.ends is not None
    assert base.ends is not None
    # Each end is divided by the same end: what slows both cells cancels.
    change = float(plane.train_s[place, 0] / base.train_s[0, 0]) - 1
    return [change, *(plane.ends[place, 0] / base.ends[0, 0] - 1).tolist()]


def _at_ends(strategies: Sequence[Component], planes: Sequence[Plane]) -> str:
    """Return in which cells an end of the interval says another strategy."""
    if len(strategies) == 1:
        return "."
    axes = planes[0].axes
    cells = list(product(*(axis.values for axis in axes)))
    # strategy, end of the interval -> cells
    others: dict[tuple[str, str], list[str]] = {}
    for place, values in enumerate(cells):
        row, column = divmod(place, planes[0].train_s.shape[1])
        name = strategies[
            advice.preferred(
                strategies, [float(plane.train_s[row, column]) for plane in planes]
            )
        ]
        for end, words in enumerate(ENDS):
            seconds = [
                float(plane.ends[row, column, end])
                for plane in planes
                if plane.ends is not None
            ]
            other = strategies[advice.preferred(strategies, seconds)]
            if other is not name:
                others.setdefault((str(other), words), []).append(_cell(axes, values))
    if not others:
        return "; the strategy is the same at both ends of the interval."
    # strategy, its cells -> ends of the interval
    alike: dict[tuple[str, str], list[str]] = {}
    for (name_of, words), own in others.items():
        alike.setdefault((name_of, _where(own, len(cells))), []).append(words)
    ends = "; ".join(
        f"{name_of} {where} with {ends_in_words(words)}"
        for (name_of, where), words in alike.items()
    )
    return f"; not at both ends of the interval: {ends}."


def _preferred(strategies: Sequence[Component], planes: Sequence[Plane]) -> str:
    """Return which strategy to take in which cells, and where an end of the interval says another one."""
    axes = planes[0].axes
    cells = list(product(*(axis.values for axis in axes)))
    best: dict[str, list[str]] = {}
    for place, values in enumerate(cells):
        row, column = divmod(place, planes[0].train_s.shape[1])
        name = str(
            strategies[
                advice.preferred(
                    strategies, [float(plane.train_s[row, column]) for plane in planes]
                )
            ]
        )
        best.setdefault(name, []).append(_cell(axes, values))
    said = (
        "to take (the fastest; one that averages gradients if it takes hardly longer): "
    )
    said += "; ".join(f"{name} {_where(own, len(cells))}" for name, own in best.items())
    return said + _at_ends(strategies, planes)


def _cell(axes: Sequence[Axis], values: Sequence[float]) -> str:
    return ", ".join(axis.at(value) for axis, value in zip(axes, values, strict=True))


def _where(cells: Sequence[str], of: int) -> str:
    if len(cells) == of:
        return "in both cells" if of == 2 else "in every cell"
    more = f" and {len(cells) - _NAMED} more" if len(cells) > _NAMED else ""
    return f"at {'; '.join(cells[:_NAMED])}{more}"
