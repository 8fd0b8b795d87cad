"""Predicted points of strategies and worker counts: the answer in words, their table, and rows with all columns.

The epochs to a target of each are by a law that is given, or fitted to runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scalebench.errors import ResultsError, UsageError
from scalebench.formatting import counted, digits, seconds, share
from scalebench.measured import Measured
from scalebench.predictions.asked import training_asked_for
from scalebench.pricing import advice
from scalebench.pricing.grid import Grid, Point, predict
from scalebench.pricing.uncertainty import outside
from scalebench.records.attempts import require_completed_run
from scalebench.records.folder import study_in
from scalebench.study.validation import parse_workers
from scalebench.tables.table import (
    COUNT,
    MEMORY,
    NUMBER,
    SHARE,
    TIME_ALONE,
    Column,
    Table,
)

if TYPE_CHECKING:
    from scalebench.analysis.target import SeriesLaw
    from scalebench.pricing.prediction import Predictor
    from scalebench.study.spec import Component

# the mean batch of an epoch is a little smaller than the one that was asked for
_NEAR = 0.01
_WORKERS = "1..1024"  # of a model, of which no study says how many
_FEW = 3  # points that a line names
_MEMORY = ("parameters", "gradients", "optimizer", "strategy", "activations")
_NAMED_REST = 0.02  # least share of the time that no component explains, to be named


class Target(NamedTuple):
    """Epochs to target of a point, the law that says so, and where the law does not cover it."""

    epochs: Measured
    law: str
    beyond: str


# a point, and the epochs to a target where these are given
_Row = tuple[Point, Target | None]


@dataclass(frozen=True)
class Predicted:
    """The points of a prediction, its predictor, and by their place the epochs to a target, where these are known.

    A budget is in GPU-hours (core-hours) of the cluster, a price in any currency for
    one of them. `of_study`: the worker counts are those of a study.
    """

    predictor: Predictor
    grid: Grid
    to_target: Mapping[int, Target] = field(default_factory=dict)
    of_study: bool = False

    def answer(self, budget: float | None, price: float | None) -> list[str]:
        """Return the answer: times with their intervals, the decision and what it rests on."""
        predictor, grid, to_target = self.predictor, self.grid, self.to_target
        points = (
            [grid.points[place] for place in aimed(grid, to_target)]
            if to_target
            else grid.advised()
        )
        # Times to a target are those of the training, in proportion to the epochs.
        scale = {
            grid.points[place]: aim.epochs.value / grid.points[place].epochs
            for place, aim in to_target.items()
        }
        _, each = predictor.platform.hours
        choice = advice.choose(
            points, scale, math.inf if budget is None else budget / each
        )
        if choice is None:
            return []
        said = [advice.answer(points, choice, scale, predictor.platform.device)]
        said += advice.decision(predictor, choice, scale, price)
        # Epochs that were measured replace the assumption of equal ones.
        if not to_target and (
            caveat := advice.epochs_taken_as_equal([point.strategy for point in points])
        ):
            said.append(f"  {caveat}; --epochs-to-target states what was measured.")
        said.append(f"  {advice.interval_words([choice.point])}")
        platform = predictor.platform
        # One worker waits for no other, whatever its jitter.
        if platform.jitter and max(point.workers for point in points) > 1:
            out = (
                "; --jitter 0 leaves it out"
                if platform.jitter_source != "stated"
                else ""
            )
            said.append(
                f"  Jitter of a step: {100 * platform.jitter:.2g} % ({platform.jitter_source}{out})."
            )
        said += engine_asked_for(predictor, choice.point.strategy)
        if self.of_study:
            said.append(
                "  Workers: those of the study; --workers 1..1024 asks for more."
            )
        return said

    def table(self) -> Table:
        """Return the table of the points."""
        predictor, grid, to_target = self.predictor, self.grid, self.to_target

        has_stages = any(point.mesh.pipeline > 1 for point in grid.points)
        columns: list[Column[_Row]] = [
            # Of columns that do not fit a terminal the highest `spare` goes first.
            Column("strategy", lambda each: str(each[0].strategy), shared=True),
            Column(
                "workers",
                lambda each: Measured(each[0].workers),
                COUNT,
                mark=_mark_outside,
            ),
            Column("step", lambda each: Measured(each[0].step_s), TIME_ALONE),
            Column(
                "epoch", lambda each: Measured(each[0].epoch_s), TIME_ALONE, spare=5
            ),
            Column(
                "training",
                lambda each: each[0].time,
                advice.SPAN,
            ),
            *([Column("to target", _to_the_target, TIME_ALONE)] if to_target else []),
            Column("speedup", lambda each: Measured(each[0].speedup), NUMBER, spare=4),
            Column("efficiency", lambda each: Measured(each[0].efficiency), SHARE),
            Column(
                "exposed", _of_epoch(lambda point: point.exposed_s), TIME_ALONE, spare=1
            ),
            Column(
                "hidden", _of_epoch(lambda point: point.hidden_s), TIME_ALONE, spare=6
            ),
            Column(
                "waiting", _of_epoch(lambda point: point.wait_s), TIME_ALONE, spare=7
            ),
            *(
                [Column("bubble", _of_epoch(_bubble), TIME_ALONE, spare=7)]
                if has_stages
                else []
            ),
            Column(
                "hours", lambda each: Measured(each[0].worker_hours), NUMBER, spare=2
            ),
            Column(
                "memory",
                lambda each: Measured(each[0].memory.total),
                MEMORY,
                spare=3,
                mark=_mark_too_large,
            ),
            Column("bound by", lambda each: each[0].binds, left=True),
        ]
        title = f"modelled ({predictor.platform.device.source}): {predictor.training}"
        rows = [(point, to_target.get(n)) for n, point in enumerate(grid.points)]
        return Table.of(title, columns, rows, self._notes())

    def _notes(self) -> list[str]:
        """Return where points lie outside what the inputs are known to hold for, and the source of layers' times."""
        predictor, grid, to_target = self.predictor, self.grid, self.to_target
        # A reason holds for many points, and is given once.
        beyond = dict.fromkeys(text for point in grid.points for text in point.outside)
        beyond |= dict.fromkeys(aim.beyond for aim in to_target.values() if aim.beyond)
        notes = (
            [f"* outside what the inputs are known to hold for: {'; '.join(beyond)}"]
            if beyond
            else []
        )
        if any(
            predictor.strategy(point.strategy).traits.cuts_model(point.workers)
            for point in grid.points
        ):
            notes.append(
                f"times of layers: {predictor.platform.device.of_layers(predictor.workload.layers)}"
            )
        return notes

    def sentences(self, budget: float | None, price: float | None) -> Iterator[str]:
        """Yield what binds each strategy, what would change that, where they cross, and what is not predicted."""
        predictor, grid, to_target = self.predictor, self.grid, self.to_target
        (hour, each), advised = predictor.platform.hours, grid.advised()
        yield (
            "step, epoch, training: times of a worker; exposed, hidden, waiting: seconds of an epoch; hours: "
            f"worker-hours of the training ({digits(each)} {hour} each)"
        )
        for strategy in dict.fromkeys(str(point.strategy) for point in grid.points):
            points = [point for point in grid.points if str(point.strategy) == strategy]
            # Marked points lie outside what the inputs hold for: no advice rests on
            # them.
            last, bend = (
                points[-1],
                advice.knee([point for point in points if not point.marked]),
            )
            cost = last.worker_hours * each
            gain = f"half of its time makes the training {max(last.gains.values()):.2f} times as fast"
            line = f"{strategy}: at {counted(last.workers, 'worker')} bound by {last.binds} ({gain}: {_shares(last)}); "
            line += (
                f"knee at {bend.workers:,} (efficiency {100 * bend.efficiency:.0f} %); "
                if bend
                else ""
            )
            line += f"{digits(cost)} {hour}{' for all epochs' if to_target else ''}"
            yield (
                line
                + (f", {digits(cost * price)} at {price:g} each" if price else "")
                + "."
            )
            # A single worker uses no link.
            if last.workers > 1:
                yield from _needs(predictor, last)
        for crossing in advice.crossovers(predictor, advised):
            yield f"{crossing.faster} is faster than {crossing.slower} from {counted(crossing.workers, 'worker')} on."
        if budget is not None:
            yield from _best(grid, budget, predictor.platform.hours, to_target)
        yield from target_sentences(grid, to_target)
        # Points that lack the same memory share a line.
        unfitting: dict[str, list[str]] = {}
        for point in grid.points:
            if point.lacking:
                unfitting.setdefault(point.lacking, []).append(
                    f"{point.strategy} at {point.workers:,}"
                )
        for text, where in unfitting.items():
            more = f" and {len(where) - _FEW} more" if len(where) > _FEW else ""
            yield f"Does not fit: {', '.join(where[:_FEW])}{more}: {text}."
        if unused := grid.without_effect():
            yield f"Nothing here reacts to {', '.join(unused)}: half of it shortens no training by 0.1 %."
        yield from (f"Not predicted: {refusal}." for refusal in grid.refusals)

    def rows(self, price: float | None) -> list[dict[str, object]]:
        """Return a row with all columns for each point."""
        return [
            _row(self.predictor, point, price, self.to_target.get(n))
            for n, point in enumerate(self.grid.points)
        ]


def predicted(
    model: str | None,
    workers: Sequence[int] | None,
    strategies: Sequence[str],
    epochs_to_target: str | None,
    flags: Mapping[str, Any],
    note: Callable[[str], None] = lambda _: None,
) -> Predicted:
    """Predict what the options of `scalebench predict` ask for.

    Raises:
        UsageError: none of it can be predicted.
    """
    asked = training_asked_for(model, strategies, flags, note)
    predictor = asked.predictor
    counts = workers or asked.workers or parse_workers(_WORKERS)
    grid = predict(predictor, asked.strategies, counts)
    if not grid.points:
        raise UsageError(f"not predicted: {'; '.join(grid.refusals)}")
    to_target = (
        {} if epochs_to_target is None else targets_of(grid, *laws_of(epochs_to_target))
    )
    of_study = not workers and bool(asked.workers)
    return Predicted(predictor, grid, to_target, of_study)


def engine_asked_for(predictor: Predictor, strategy: Component) -> list[str]:
    """Return the engine that carries all strategies, where one was asked for, and where its costs are from."""
    engine = predictor.platform.engine
    return (
        []
        if engine == "auto"
        else [f"  Engine: {engine} ({predictor.engine_source(strategy)})."]
    )


def _of_epoch(value: Callable[[Point], float]) -> Callable[[_Row], Measured]:
    """Return a cell with the part of an epoch in `value` of the whole training."""
    return lambda each: Measured(value(each[0]) / each[0].epochs)


def _mark_outside(each: _Row) -> str:
    point, aim = each
    return "*" * bool(point.outside or (aim and aim.beyond))


def _mark_too_large(each: _Row) -> str:
    return "!" * bool(each[0].lacking)


def _to_the_target(each: _Row) -> Measured:
    point, aim = each
    return Measured(aim.epochs.value * point.epoch_s if aim else math.nan)


def _bubble(point: Point) -> float:
    # Without stages there is no bubble, which is not one of zero.
    return point.bubble_s if point.mesh.pipeline > 1 else math.nan


def _shares(point: Point) -> str:
    """Return `the time follows compute to 61 % and memory bandwidth to 35 %; the rest, 4 %, several at once`."""
    found = sorted(point.shares.items(), key=lambda each: -each[1])
    own = [each for each in found if each[0] != "jitter"]  # a part of compute
    said = f"the time follows {', '.join(f'{name} to {share(part)}' for name, part in own)}"
    if jitter := point.shares.get("jitter"):
        said += f" (of compute, jitter is {share(jitter)})"
    rest = 1 - sum(part for _, part in own)
    if rest <= -_NAMED_REST:
        return f"{said}; more than all together, as one waits for another"
    return (
        f"{said}; the rest, {share(rest)}, to several at once or to none"
        if rest >= _NAMED_REST
        else said
    )


def _best(
    grid: Grid, budget: float, unit: tuple[str, float], to_target: Mapping[int, Target]
) -> Iterator[str]:
    """Say what the `budget` buys: the training, or, where epochs to a target are known, the way to it."""
    hour, each = unit
    epochs = {grid.points[place]: aim.epochs.value for place, aim in to_target.items()}
    points = (
        [grid.points[place] for place in aimed(grid, to_target)]
        if to_target
        else grid.advised()
    )

    def seconds_of(point: Point) -> float:
        return float(epochs.get(point, point.epochs) * point.epoch_s)

    if not points:
        return
    # The budget is in GPU-hours or core-hours, of which a worker-hour takes `each`.
    best, aim = (
        advice.best_within(points, budget / each, seconds_of),
        " to the target" if epochs else "",
    )
    if best is not None:
        cost = advice.hours_of(best, seconds_of) * each
        where = f"{best.strategy} at {counted(best.workers, 'worker')}, {seconds(seconds_of(best))}{aim}"
        yield f"Best for {budget:g} {hour}: {where} for {digits(cost)}."
        return
    least = min(advice.hours_of(point, seconds_of) * each for point in points)
    yield f"No point{aim} costs at most {budget:g} {hour}; the cheapest takes {digits(least)}."


def _needs(predictor: Predictor, point: Point) -> Iterator[str]:
    if point.nodes > 1:
        own = predictor.link_between_nodes(point.strategy)
        rates = {
            part: factor * own * 8 / 1e9
            for part, factor in advice.bandwidth_for(predictor, point).items()
        }
        needed = [
            f"{100 * part:.0f} % {digits(rate)} Gbit/s"
            for part, rate in rates.items()
            if math.isfinite(rate)
        ]
        if unreached := [part for part, rate in rates.items() if math.isinf(rate)]:
            needed.append(f"{100 * min(unreached):.0f} % or more with no link")
        now = digits(own * 8 / 1e9)
        yield f"  computing a share of the time needs, of a link between nodes: {', '.join(needed)} (it has {now})."
    # It has the efficiency that the next sentence asks for.
    if point.efficiency >= 0.8:
        return
    ways = []
    if (batch := advice.batch_for(predictor, point)) is not None:
        beyond = outside(predictor, point.strategy, point.workers, batch)
        whose = "of all workers" if predictor.workload.in_all else "a worker"
        ways.append(
            f"a batch of {batch:,} {whose}{f' ({beyond[0]})' if beyond else ''}"
        )
    if (interval := advice.interval_for(predictor, point)) is not None:
        ways.append(f"{interval[0]}={interval[1]:,}")
    said = " or ".join(ways) or "no batch or interval holds it"
    yield f"  80 % efficiency at {counted(point.workers, 'worker')}: {said}."


def _row(
    predictor: Predictor, point: Point, price: float | None, target: Target | None
) -> dict[str, object]:
    # A value that was not predicted is an empty cell, never zero.
    workload, node = predictor.workload, predictor.platform.cluster.node
    hour, each = predictor.platform.hours
    return {
        "execution": "modelled",
        "cluster": predictor.platform.cluster.name,
        "device": predictor.platform.device.source,
        "model": workload.layers.name,
        "parameters": workload.layers.parameters,
        "dtype": workload.precision,
        "strategy": point.strategy.name,
        "strategy_options": str(point.strategy),
        "engine": predictor.engine(point.strategy),
        "engine_source": predictor.engine_source(point.strategy),
        "workers": point.workers,
        "nodes": point.nodes,
        "batch_policy": "global" if workload.in_all else "per_worker",
        "batch_per_worker": point.batch,
        "batch_global": point.batch_global,
        "data_parallel": point.mesh.data,
        "pipeline_parallel": point.mesh.pipeline,
        "tensor_parallel": point.mesh.tensor,
        "micro_batches": point.micro_batches,
        "epochs": workload.epochs,
        "steps_per_epoch": point.steps,
        **{
            name: getattr(point, name)
            for name in ("step_s", "epoch_s", "train_s", "speedup", "efficiency")
        },
        "train_s_low": point.time.low,
        "train_s_high": point.time.high,
        "interval_by": str(point.known),
        **{name: getattr(point, name) for name in ("compute_s", "data_s", "other_s")},
        "comm_s": point.exposed_s,
        "hidden_comm_s": point.hidden_s,
        "wait_s": point.wait_s,
        "bubble_s": point.bubble_s if point.mesh.pipeline > 1 else "",
        "bound_by": point.binds,
        "gain_of_half": max(point.gains.values()),
        "worker_hours": point.worker_hours,
        # A worker is charged its share of the node's cores, used or not.
        "cost_core_hours": point.worker_hours * node.cores / node.workers_per_node,
        "cost_gpu_hours": point.worker_hours if hour == "GPU-hours" else "",
        "price": point.worker_hours * each * price if price else "",
        "epochs_to_target": target.epochs.value if target else "",
        "epochs_to_target_low": target.epochs.low if target else "",
        "epochs_to_target_high": target.epochs.high if target else "",
        "time_to_target_s": target.epochs.value * point.epoch_s if target else "",
        "memory_bytes": point.memory.total,
        **{f"memory_{part}_bytes": getattr(point.memory, part) for part in _MEMORY},
        "fits": "" if not point.lacking else "no",
        "outside": "; ".join(
            filter(None, [*point.outside, target.beyond if target else ""])
        ),
    }


def laws_of(said: str) -> tuple[dict[str, SeriesLaw], str]:
    """Return the law `E0,B_CRIT`, or those of a study or a file, by the strategy's label, and what was fitted.

    An empty label is any strategy's.
    """
    from scalebench.analysis.target import read_law

    path = Path(said)
    if path.suffix == ".csv":
        return {"": read_law(path)}, said
    return _laws_of_study(study_in(path)) if path.exists() else (_stated(said), "")


def _stated(said: str) -> dict[str, SeriesLaw]:
    from scalebench.analysis.target import ANY_SERIES, EpochsLaw, SeriesLaw

    try:
        at_zero, critical = map(float, said.split(","))
    except ValueError:
        raise UsageError(
            f"--epochs-to-target: expected E0,B_CRIT, a study or a file.csv, got {said!r}"
        ) from None
    # A stated law is of any strategy, and holds at any batch.
    return {"": SeriesLaw(ANY_SERIES, EpochsLaw(at_zero, critical), 0, math.inf)}


def _laws_of_study(folder: Path) -> tuple[dict[str, SeriesLaw], str]:
    from scalebench.analysis import load
    from scalebench.analysis.target import critical_batches

    require_completed_run(folder)
    results = load(folder)
    fitted = critical_batches(results)
    if not fitted:
        raise ResultsError(
            f"{folder}: no strategy reached the target in every run at 3 or more global batches; state "
            "--epochs-to-target E0,B_CRIT"
        )
    run = results.completed.iloc[-1]
    # Of several series of one label the last stays: the one up to the largest batch.
    laws = {
        each.series.label: each for each in sorted(fitted, key=lambda each: each.most)
    }
    return laws, f"{run['model']} on {run['dataset']}"


def targets_of(
    grid: Grid, laws: dict[str, SeriesLaw], source: str
) -> dict[int, Target]:
    """Return the epochs to target of the points whose strategy has a law, by their place; `source`: what was fitted."""
    found = {}
    for place, point in enumerate(grid.points):
        if (own := laws.get(str(point.strategy), laws.get(""))) is None:
            continue
        law, batch, fitted = (
            own.law,
            point.batch_global,
            f"{own.least:,.0f} to {own.most:,.0f}",
        )
        words = f"e0 (1 + B / b-crit), e0 {digits(law.epochs_at_zero)}, b-crit {law.critical_batch:,.0f}"
        if law.resampled:
            least, most = law.critical[1:3]
            words += f" ({least:,.0f} to {most:,.0f}), fitted to {source} at global batches of {fitted}"
        near = own.least * (1 - _NEAR) <= batch <= own.most * (1 + _NEAR)
        beyond = (
            "" if near else f"epochs to target fitted to global batches of {fitted}"
        )
        # The law of any strategy was seen where each step takes the mean gradient of
        # the global batch; strategies that synchronise less often need other epochs.
        if str(point.strategy) not in laws and not advice.averages_gradients(
            point.strategy
        ):
            beyond = "epochs to target of gradients that are averaged in every batch"
        found[place] = Target(law.epochs(batch), words, beyond)
    return found


def aimed(grid: Grid, to_target: Mapping[int, Target]) -> list[int]:
    """Return the places of the points to choose from: of the advised ones those whose epochs are known to hold."""
    # Without a point that is advised, one that is not is better than no answer.
    advised = [
        place for place in to_target if grid.points[place] in grid.advised()
    ] or list(to_target)
    return [place for place in advised if not to_target[place].beyond] or advised


def target_sentences(grid: Grid, to_target: Mapping[int, Target]) -> Iterator[str]:
    """Yield the point that reaches the target first, and the laws."""
    if not to_target:
        return
    places = aimed(grid, to_target)
    place = min(
        places, key=lambda n: to_target[n].epochs.value * grid.points[n].epoch_s
    )
    point, epochs = grid.points[place], to_target[place].epochs.value
    plural = "" if epochs == 1 else "s"
    yield (
        f"To target: {seconds(epochs * point.epoch_s)} in {digits(epochs)} epoch{plural} by {point.strategy} "
        f"at {counted(point.workers, 'worker')} is the least."
    )
    laws = {
        str(grid.points[place].strategy): each.law for place, each in to_target.items()
    }
    yield from (f"  epochs to target of {name}: {said}." for name, said in laws.items())
    if unknown := dict.fromkeys(
        str(point.strategy) for point in grid.points if str(point.strategy) not in laws
    ):
        yield f"  epochs to target of {', '.join(unknown)}: not known from what was run."
