"""`scalebench predict MODEL --vary AXIS=...`: the time of a training along one axis or two, and what binds it where.

`scalebench what-if` is the name that it had in version 0.1.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.formats import show_tables, write_rows
from scalebench.cli.options import (
    NEW_FILE,
    NEW_PICTURE,
    strategies_option,
    verbosity_options,
)
from scalebench.cli.platform_options import (
    platform_options,
    predictor_of,
    strategies_on,
)
from scalebench.errors import UsageError

if TYPE_CHECKING:
    from scalebench.predictions.variation import Variation
    from scalebench.tables import Table

VARY_WORKERS = 64  # by default
vary_option = click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="AXIS=LOW..HIGH[:POINTS]|AXIS=VALUE,...",
    help="Price one axis or two: batch, workers, interval, jitter; pipeline, tensor, micro_batches; network-bandwidth "
    "(between nodes) or node-bandwidth (inside) in Gbit/s, or factors (0.5x,2x) on the platform's; flops, "
    "memory-bandwidth, latency as factors. A range is logarithmic, of jitter linear.  [default: 50 points]",
)


@click.command("what-if", hidden=True)
@platform_options
@strategies_option("Strategies; repeatable.  [default: allreduce]")
@click.option(
    "--workers", type=click.IntRange(min=1), default=VARY_WORKERS, show_default=True
)
@vary_option
@click.option("--figure", type=NEW_PICTURE, metavar="FILE.png", help="Draw it.")
@click.option("--csv", "table", type=NEW_FILE, metavar="FILE", help="All cells.")
@verbosity_options
def what_if(
    model: str | None,
    strategies: tuple[str, ...],
    workers: int,
    varied: tuple[str, ...],
    figure: Path | None,
    table: Path | None,
    **flags: Any,
) -> int:
    """Say how long a training of MODEL would take with other numbers, as `predict --vary`."""
    # for a command of seconds: what torch alone makes are 400,000 objects that stay
    gc.disable()
    show(
        varied_training(model, strategies or ("allreduce",), workers, varied, flags),
        figure,
        table,
    )
    return 0


def varied_training(
    model: str | None,
    strategies: Sequence[str],
    workers: int,
    varied: Sequence[str],
    flags: dict[str, Any],
) -> Variation:
    """Price the training along the axes `varied`.

    Nothing is trained: the recorded schedule is priced in every cell, and again with
    half the time of each component.
    """
    from scalebench.predictions.variation import Variation
    from scalebench.pricing.what_if import Axis
    from scalebench.pricing.what_if import what_if as price_cells

    if not 1 <= len(varied) <= 2:
        raise UsageError(f"--vary: one axis or two, got {len(varied)}")
    axes = [Axis.parse(text) for text in varied]
    chosen = strategies_on(flags["engine"], strategies)
    predictor = predictor_of(model, flags)
    planes = [price_cells(predictor, strategy, workers, axes) for strategy in chosen]
    return Variation(predictor, chosen, planes, workers)


def show(
    found: Variation,
    figure: Path | None,
    table: Path | None,
    price: float | None = None,
    form: str = "terminal",
) -> None:
    """Print the answer, a row for each of few cells, and sentences; write and draw all cells."""
    parts: list[Table | str] = (
        [*found.answer(price), found.table()] if found.is_priced_in_few_cells else []
    )
    show_tables(form, *parts, *found.remarks())
    if table is not None:
        write_rows(table, found.rows())
    if figure is not None:
        _draw(figure, found)


def _draw(path: Path, found: Variation) -> None:
    from scalebench.figures.predicted import draw_what_if

    planes = {
        str(name): plane
        for name, plane in zip(found.strategies, found.planes, strict=True)
    }
    (one, *others), names = planes.values(), list(planes)
    by = "" if others else f" by {names[0]}"
    place = (
        ""
        if any(axis.name == "workers" for axis in one.axes)
        else f" at {found.workers:,} workers"
    )
    what = f"{found.predictor.training}{by}{place}, where nothing else is said"
    draw_what_if(path, planes, f"{what}; {found.predictor.platform.device.source}")
