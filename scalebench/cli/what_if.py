"""`scalebench what-if MODEL`: the time of a training along one axis or two, and what binds it where."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli.options import verbosity_options
from scalebench.cli.platform_options import parse_strategy, platform_options, predictor_of

if TYPE_CHECKING:
    from scalebench.pricing.what_if import Axis, Plane

_POINTS = 50
_FORM = "expected AXIS=LOW..HIGH, AXIS=LOW..HIGH:POINTS or AXIS=VALUE,VALUE,..."


@click.command("what-if")
@platform_options
@click.option("--strategy", default="allreduce", show_default=True, metavar="NAME[:OPTION=VALUE]...")
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
@click.option("--figure", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw it.")
@click.option("--csv", "table", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="All cells.")
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
    from scalebench.errors import UsageError
    from scalebench.pricing.what_if import what_if as price_cells

    if len(varied) > 2:
        raise UsageError(f"--vary: one axis or two, got {len(varied)}")
    axes = [_axis(text) for text in varied]
    chosen = parse_strategy(strategy)
    predictor = predictor_of(model, flags)
    plane = price_cells(predictor, chosen, workers, axes)
    _say(plane)
    if table is not None:
        _write(table, plane)
    if figure is not None:
        from scalebench.figures.what_if import draw_what_if

        place = "" if any(axis.name == "workers" for axis in axes) else f" at {workers:,} workers"
        caption = f"{predictor.workload.layers.name} by {chosen}{place} on {predictor.platform.cluster.name}"
        titles, values = [axis.title for axis in axes], [axis.values for axis in axes]
        caption += f"; {predictor.platform.device.source}"
        draw_what_if(figure, titles, values, plane.train_s, plane.bound, plane.components, caption)
    return 0


def _axis(text: str) -> Axis:
    import numpy as np

    from scalebench.errors import UsageError
    from scalebench.pricing.what_if import COUNTS, Axis

    name, equals, said = text.partition("=")
    span, _, points = said.partition(":")
    low, dots, high = span.partition("..")
    try:
        if not equals:
            raise ValueError
        if not dots:
            values = sorted({float(value) for value in said.split(",")})
        else:
            ends, count = (float(low), float(high)), int(points or _POINTS)
            if ends[0] >= ends[1] or count < 2 or (ends[0] <= 0 and name != "jitter"):
                raise ValueError
            values = (np.linspace if name == "jitter" else np.geomspace)(*ends, count).tolist()
        if name in COUNTS:
            values = sorted({float(round(value)) for value in values})
    except (ValueError, OverflowError):
        raise UsageError(f"--vary {text!r}: {_FORM}") from None
    return Axis(name, tuple(values))


def _say(plane: Plane) -> None:
    from scalebench.formatting import digits, seconds, share

    cells = plane.train_s.size
    best = divmod(int(plane.train_s.argmin()), plane.train_s.shape[1])
    where = ", ".join(
        f"{axis.name} {digits(axis.values[place])}" for axis, place in zip(plane.axes, best, strict=False)
    )
    click.echo(
        f"{cells:,} cells, modelled: {seconds(float(plane.train_s.min()))} to {seconds(float(plane.train_s.max()))} of "
        f"training; the least at {where}"
    )
    for place, name in enumerate(plane.components):
        if part := float((plane.bound == place).mean()):
            click.echo(f"bound by {name}: {share(part)} of the cells{_borders(plane, place)}")
    for name in plane.without_effect():
        click.echo(f"the time does not react to {name}")


def _borders(plane: Plane, component: int) -> str:
    """Return between which values of the first axis a component binds; with a second one its first and last value."""
    from scalebench.formatting import digits

    axis = plane.axes[0]
    found = []
    for column in range(plane.bound.shape[1]) if len(plane.axes) == 1 else (0, plane.bound.shape[1] - 1):
        here = [axis.values[row] for row in range(len(axis.values)) if plane.bound[row, column] == component]
        if here:
            text = f"{axis.name} {digits(min(here))} to {digits(max(here))}"
            at = f" at {plane.axes[1].name} {digits(plane.axes[1].values[column])}" if len(plane.axes) > 1 else ""
            found.append(text + at)
    return f", {'; '.join(found)}" if found else ""


def _write(path: Path, plane: Plane) -> None:
    from itertools import product

    from scalebench.errors import ResultsError

    names = [axis.name.replace("-", "_") for axis in plane.axes]
    header = ["execution", *names, "train_s", "samples_per_s", "efficiency", "bound_by"]
    cells = product(*(axis.values for axis in plane.axes))
    numbers = (each.ravel() for each in (plane.train_s, plane.throughput, plane.efficiency, plane.bound))
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            for cell, seconds, rate, efficiency, bound in zip(cells, *numbers, strict=True):
                writer.writerow(["modelled", *cell, seconds, rate, efficiency, plane.components[bound]])
    except OSError as error:
        raise ResultsError(f"cannot write {path}: {error.strerror}") from None
