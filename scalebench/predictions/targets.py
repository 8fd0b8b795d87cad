"""Epochs to target of predicted points: by a law that is given, or fitted to runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from scalebench.errors import ResultsError, UsageError
from scalebench.formatting import digits, seconds
from scalebench.records.attempts import require_completed_run
from scalebench.records.folder import study_in

if TYPE_CHECKING:
    from scalebench.analysis.target import SeriesLaw
    from scalebench.measured import Measured
    from scalebench.pricing.grid import Grid

# the mean batch of an epoch is a little smaller than the one that was asked for
_NEAR = 0.01


class Target(NamedTuple):
    """Epochs to target of a point, the law that says so, and where the law does not cover it."""

    epochs: Measured
    law: str
    beyond: str


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
    from scalebench.pricing.advice import averages_gradients

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
        if str(point.strategy) not in laws and not averages_gradients(point.strategy):
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
    yield (
        f"To target: {seconds(epochs * point.epoch_s)} in {digits(epochs)} epochs by {point.strategy} at "
        f"{point.workers:,} workers is the least."
    )
    laws = {
        str(grid.points[place].strategy): each.law for place, each in to_target.items()
    }
    yield from (f"  epochs to target of {name}: {said}." for name, said in laws.items())
    if unknown := dict.fromkeys(
        str(point.strategy) for point in grid.points if str(point.strategy) not in laws
    ):
        yield f"  epochs to target of {', '.join(unknown)}: not known from what was run."
