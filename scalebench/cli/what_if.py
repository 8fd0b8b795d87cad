"""`scalebench what-if MODEL`: the time of a training along one axis or two, and what binds it where."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.options import NEW_FILE, NEW_PICTURE, STRATEGY, verbosity_options
from scalebench.cli.platform_options import parse_strategy, platform_options, predictor_of
from scalebench.errors import UsageError, writing

if TYPE_CHECKING:
    from scalebench.pricing.what_if import Plane


@click.command("what-if")
@platform_options
@click.option("--strategy", default="allreduce", show_default=True, metavar=STRATEGY)
@click.option("--workers", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--vary",
    "varied",
    multiple=True,
    required=True,
    metavar="AXIS=LOW..HIGH[:POINTS]",
    help="One axis or two: batch, workers, interval, jitter, or flops, memory-bandwidth, link-bandwidth, latency as "
    "factors on the platform's. A range is logarithmic, of jitter linear.  [default: 50 points]",
)
@click.option("--figure", type=NEW_PICTURE, metavar="FILE.png", help="Draw it.")
@click.option("--csv", "table", type=NEW_FILE, metavar="FILE", help="All cells.")
@verbosity_options
def what_if(
    model: str | None,
    strategy: str,
    workers: int,
    varied: tuple[str, ...],
    figure: Path | None,
    table: Path | None,
    **flags: Any,
) -> int:
    """Say how long a training of MODEL would take with other numbers, and what binds it where.

    Nothing is trained: the recorded schedule is priced in every cell, and again with half the time of each component.
    """
    from scalebench.pricing.what_if import Axis
    from scalebench.pricing.what_if import what_if as price_cells

    if len(varied) > 2:
        raise UsageError(f"--vary: one axis or two, got {len(varied)}")
    axes = [Axis.parse(text) for text in varied]
    chosen = parse_strategy(strategy)
    predictor = predictor_of(model, flags)
    plane = price_cells(predictor, chosen, workers, axes)
    for sentence in plane.sentences():
        click.echo(sentence)
    if table is not None:
        _write(table, plane)
    if figure is not None:
        from scalebench.figures.what_if import draw_what_if

        place = "" if any(axis.name == "workers" for axis in axes) else f" at {workers:,} workers"
        what = f"{predictor.training} by {chosen}{place}, where nothing else is said"
        draw_what_if(figure, plane, f"{what}; {predictor.platform.device.source}")
    return 0


def _write(path: Path, plane: Plane) -> None:
    from itertools import product

    names = [axis.name.replace("-", "_") for axis in plane.axes]
    header = ["execution", *names, "train_s", "samples_per_s", "efficiency", "bound_by", "fits", "outside"]
    cells = product(*(axis.values for axis in plane.axes))
    columns = (plane.train_s, plane.throughput, plane.efficiency, plane.bound, plane.lacking, plane.outside)
    numbers = (each.ravel().tolist() for each in columns)
    with writing(path, ""), path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for cell, *times, bound, lacking, outside in zip(cells, *numbers, strict=True):
            writer.writerow(["modelled", *cell, *times, plane.components[bound], "no" if lacking else "", outside])
