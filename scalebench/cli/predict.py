"""`scalebench predict MODEL|STUDY|RESULTS`: time, cost and bottleneck of trainings on a machine that is not here.

With `--vary` along one axis or two, and what binds it where; `what-if` is the name that
this had in version 0.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli import formats, options, platform_options

if TYPE_CHECKING:
    from scalebench.predictions.points import Predicted
    from scalebench.predictions.variation import Variation
    from scalebench.tables import Table

_PANELS = {  # of `--help`
    "What is trained": (
        "--strategy",
        "--batch",
        "--batch-global",
        "--epochs",
        "--samples",
        "--dtype",
        "--optimizer",
        "--layers",
        "--input",
    ),
    "Where": (
        "--cluster",
        "--device",
        "--step-time",
        "--step-batch",
        "--calibration",
        "--roofline",
        "--measured-on",
        "--jitter",
        "--engine",
        "--backend",
        "--collective",
        "--input-rate",
        "--epoch-overhead",
        "--memory",
    ),
    "What is asked": (
        "--workers",
        "--vary",
        "--budget",
        "--price",
        "--epochs-to-target",
    ),
    "Output": ("--format", "--figure", "--csv", "--quiet", "--verbose", "--help"),
}
vary_option = click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="AXIS=LOW..HIGH[:POINTS]|AXIS=VALUE,...",
    help="Price one axis or two: batch, workers, interval, jitter; pipeline, tensor, micro_batches; network-bandwidth "
    "(between nodes) or node-bandwidth (inside) in Gbit/s, or factors (0.5x,2x) on the platform's; flops, "
    "memory-bandwidth, latency as factors. A range is logarithmic, of jitter linear.  [default: 50 points]",
)


@click.command()
@options.all_of(
    *(
        click.option_panel(heading, options=list(flags))
        for heading, flags in _PANELS.items()
    )
)
@platform_options.platform_options
@click.option(
    "--workers",
    callback=options.parsed_by("parse_workers"),
    metavar="COUNTS",
    help="1..64, 1..64:8 or 1,2,6.  [default: those of a study, else 1..1024; with --vary, one count: the study's "
    "largest, else 64]",
)
@vary_option
@options.strategies_option(
    "Strategies; repeatable.  [default: those of a study, or allreduce, epoch_average]"
)
@click.option(
    "--budget",
    type=platform_options.POSITIVE,
    metavar="HOURS",
    help="GPU-hours (core-hours) that the training may take.",
)
@click.option(
    "--price",
    type=platform_options.POSITIVE,
    metavar="RATE",
    help="Price of one of these hours.",
)
@click.option(
    "--epochs-to-target",
    metavar="E0,B_CRIT|STUDY|FILE.csv",
    help="E0 (1 + B / B_CRIT) at a global batch B; or fitted to the runs of a study, by strategy, or to a file of "
    "batch_global,epochs.",
)
@formats.format_option
@click.option(
    "--csv", "table", type=options.NEW_FILE, metavar="FILE", help="Write all columns."
)
@click.option("--figure", type=options.NEW_PICTURE, metavar="FILE.png", help="Draw it.")
@options.verbosity_options
def predict(
    model: str | None,
    workers: list[int] | None,
    varied: tuple[str, ...],
    strategies: tuple[str, ...],
    budget: float | None,
    price: float | None,
    epochs_to_target: str | None,
    table: Path | None,
    figure: Path | None,
    form: str,
    **flags: Any,
) -> int:
    """Predict trainings of MODEL, a layer table (`resnet50`, ...) or file.py:factory, without training.

    A study's file, before anything ran, or its folder of RESULTS stands for its model,
    data, strategies, workers, epochs, batch and cluster, with the step time that it
    states or that was measured for it. Options change one of these each.

    Schedules of the strategies are recorded and priced on the cluster, with step times
    that are stated or a device's roofline, or as `scalebench calibrate` measured them:
    --calibration FILE says the model too. Every number is modelled. Exit code 2 where
    no point can be predicted, or the model fits at none.

    With --vary another number takes the place of the cluster's or the device's; each of
    up to 24 cells has a row with its interval and what binds it.
    """
    from scalebench.predictions.points import predicted
    from scalebench.predictions.variation import varied_training

    if varied:
        variation = varied_training(
            model,
            strategies,
            workers,
            varied,
            flags,
            formats.note,
            budget=budget,
            epochs_to_target=epochs_to_target,
        )
        _show_variation(variation, figure, table, price, form)
        return 0
    found = predicted(model, workers, strategies, epochs_to_target, flags, formats.note)
    if table is not None:
        formats.write_rows(table, found.rows(price))
    if figure is not None:
        _draw(figure, found)
    formats.show_tables(
        form,
        *found.answer(budget, price),
        found.table(),
        *found.sentences(budget, price),
    )
    # a time on devices that cannot hold the model is an answer to nothing
    return 2 if all(point.lacking for point in found.grid.points) else 0


def _draw(path: Path, found: Predicted) -> None:
    from scalebench.figures.predicted import draw_prediction
    from scalebench.pricing.advice import held_at

    predictor, grid = found.predictor, found.grid
    held = [held_at(predictor, point) for point in grid.points]
    what = f"{predictor.training}; {predictor.platform.device.source}"
    draw_prediction(path, grid, held, what, predictor.workload.in_all)


@click.command("what-if", hidden=True)
@platform_options.platform_options
@options.strategies_option("Strategies; repeatable.  [default: as `predict`]")
@click.option("--workers", type=click.IntRange(min=1), help="[default: 64]")
@vary_option
@click.option("--figure", type=options.NEW_PICTURE, metavar="FILE.png", help="Draw it.")
@click.option(
    "--csv", "table", type=options.NEW_FILE, metavar="FILE", help="All cells."
)
@options.verbosity_options
def what_if(
    model: str | None,
    strategies: tuple[str, ...],
    workers: int | None,
    varied: tuple[str, ...],
    figure: Path | None,
    table: Path | None,
    **flags: Any,
) -> int:
    """Say how long a training of MODEL would take with other numbers, as `predict --vary`."""
    from scalebench.predictions.variation import varied_training

    counts = None if workers is None else [workers]
    found = varied_training(model, strategies, counts, varied, flags, formats.note)
    _show_variation(found, figure, table)
    return 0


def _show_variation(
    found: Variation,
    figure: Path | None,
    table: Path | None,
    price: float | None = None,
    form: str = "terminal",
) -> None:
    """Print the answer, a row for each of few cells, and sentences; write and draw all cells."""
    parts: list[Table | str] = (
        # fifty rows belong into the file and the picture
        [*found.answer(price), found.table()] if found.is_priced_in_few_cells else []
    )
    formats.show_tables(form, *parts, *found.remarks())
    if table is not None:
        formats.write_rows(table, found.rows())
    if figure is not None:
        _draw_variation(figure, found)


def _draw_variation(path: Path, found: Variation) -> None:
    from scalebench.figures.predicted import draw_what_if
    from scalebench.formatting import counted

    planes = {
        str(name): plane
        for name, plane in zip(found.strategies, found.planes, strict=True)
    }
    (one, *others), names = planes.values(), list(planes)
    by = "" if others else f" by {names[0]}"
    place = "" if one.varies_workers else f" at {counted(found.workers, 'worker')}"
    what = f"{found.predictor.training}{by}{place}, where nothing else is said"
    draw_what_if(path, planes, f"{what}; {found.predictor.platform.device.source}")
