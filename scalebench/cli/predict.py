"""`scalebench predict MODEL`: time, cost and bottleneck of trainings on a machine that is not here.

With `--vary` along one axis or two, and what binds it where; `what-if` is the name that
this had in version 0.1.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

from scalebench.cli import options, platform_options
from scalebench.cli.formats import format_option, show_tables, write_rows
from scalebench.errors import UsageError

if TYPE_CHECKING:
    from scalebench.analysis.target import SeriesLaw
    from scalebench.predictions.points import Predicted
    from scalebench.predictions.variation import Variation
    from scalebench.tables import Table

STRATEGIES = ("allreduce", "epoch_average")  # by default
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
    default="1..1024",
    callback=options.parsed_by("parse_workers"),
    metavar="COUNTS",
    help="1..64, 1..64:8 or 1,2,6.  [default: 1..1024; with --vary, one count: 64]",
)
@vary_option
@options.strategies_option(
    "Strategies; repeatable.  [default: allreduce, epoch_average]"
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
@format_option
@click.option(
    "--csv", "table", type=options.NEW_FILE, metavar="FILE", help="Write all columns."
)
@click.option("--figure", type=options.NEW_PICTURE, metavar="FILE.png", help="Draw it.")
@options.verbosity_options
def predict(
    model: str | None,
    workers: list[int],
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

    Schedules of the strategies are recorded and priced on the cluster, with step times
    that are stated or a device's roofline, or as `scalebench calibrate` measured them:
    --calibration FILE says the model too. Every number is modelled. Exit code 1 where
    no point could be predicted, 2 where the model fits at none.

    With --vary another number takes the place of the cluster's or the device's; each of
    up to 24 cells has a row with its interval and what binds it.
    """
    # for a command of seconds: what torch alone makes are 400,000 objects that stay
    gc.disable()

    if varied:
        stated = (
            get_current_context().get_parameter_source("workers")
            # --vary has another default than a curve over worker counts
            is not ParameterSource.DEFAULT
        )
        count = one_count(workers if stated else None, budget, epochs_to_target)
        _show_variation(
            varied_training(model, strategies or STRATEGIES, count, varied, flags),
            figure,
            table,
            price,
            form,
        )
        return 0
    found = predicted(model, workers, strategies, epochs_to_target, flags)
    if table is not None:
        write_rows(table, found.rows(price))
    if figure is not None and found.grid.points:
        _draw(figure, found)
    show_tables(
        form,
        *found.answer(budget, price),
        found.table(),
        *found.sentences(budget, price),
    )
    # a time on devices that cannot hold the model is an answer to nothing
    if found.grid.points and all(point.lacking for point in found.grid.points):
        return 2
    return 0 if found.grid.points else 1


def one_count(
    workers: Sequence[int] | None, budget: float | None, epochs_to_target: str | None
) -> int:
    """Return the worker count of `--vary`; options that go with several counts only are refused."""
    given = {"--budget": budget, "--epochs-to-target": epochs_to_target}
    if unfit := [flag for flag, value in given.items() if value is not None]:
        raise UsageError(
            f"{unfit[0]}: does not go with --vary, which gives times; leave one of them out"
        )
    if workers is None:
        return VARY_WORKERS
    if len(workers) > 1:
        raise UsageError(
            f"--workers: --vary takes one count, got {len(workers)}; vary them with --vary workers=4,64"
        )
    return workers[0]


def predicted(
    model: str | None,
    workers: Sequence[int],
    strategies: Sequence[str],
    epochs_to_target: str | None,
    flags: dict[str, Any],
) -> Predicted:
    """Predict what the options ask for."""
    from scalebench.predictions.points import Predicted
    from scalebench.predictions.targets import targets_of
    from scalebench.pricing.grid import predict as predict_grid

    chosen = platform_options.strategies_on(flags["engine"], strategies or STRATEGIES)
    predictor = platform_options.predictor_of(model, flags)
    grid = predict_grid(predictor, chosen, workers)
    if epochs_to_target is None:
        return Predicted(predictor, grid)
    return Predicted(predictor, grid, targets_of(grid, *_laws(epochs_to_target)))


def _laws(said: str) -> tuple[dict[str, SeriesLaw], str]:
    """Return the law `E0,B_CRIT`, or those of a study or a file, by the strategy's label, and what was fitted."""
    from scalebench.predictions.targets import law_of_file, laws_of_study, stated_law

    path = Path(said)
    if path.suffix == ".csv":
        return law_of_file(path), said
    if path.exists():
        return laws_of_study(options.completed_study(path))
    return stated_law(said), ""


def _draw(path: Path, found: Predicted) -> None:
    from scalebench.figures.predicted import draw_prediction
    from scalebench.pricing.advice import held_at

    predictor, grid = found.predictor, found.grid
    held = [held_at(predictor, point) for point in grid.points]
    what = f"{predictor.training}; {predictor.platform.device.source}"
    draw_prediction(path, grid, held, what, predictor.workload.in_all)


@click.command("what-if", hidden=True)
@platform_options.platform_options
@options.strategies_option("Strategies; repeatable.  [default: allreduce]")
@click.option(
    "--workers", type=click.IntRange(min=1), default=VARY_WORKERS, show_default=True
)
@vary_option
@click.option("--figure", type=options.NEW_PICTURE, metavar="FILE.png", help="Draw it.")
@click.option(
    "--csv", "table", type=options.NEW_FILE, metavar="FILE", help="All cells."
)
@options.verbosity_options
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
    _show_variation(
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

    # three axes have no picture
    if not 1 <= len(varied) <= 2:
        raise UsageError(f"--vary: one axis or two, got {len(varied)}")
    axes = [Axis.parse(text) for text in varied]
    chosen = platform_options.strategies_on(flags["engine"], strategies)
    predictor = platform_options.predictor_of(model, flags)
    planes = [price_cells(predictor, strategy, workers, axes) for strategy in chosen]
    return Variation(predictor, chosen, planes, workers)


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
    show_tables(form, *parts, *found.remarks())
    if table is not None:
        write_rows(table, found.rows())
    if figure is not None:
        _draw_variation(figure, found)


def _draw_variation(path: Path, found: Variation) -> None:
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
