"""`scalebench validate --published FILE.csv`: predictions against measurements that others published."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from scalebench.analysis.published_prediction import Overheads


@click.command()
@click.option(
    "--published",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.csv",
    help="Measurements with a column `split`: calibrated on base, predicted at hold.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write each prediction (prediction-error.csv) and the figure there.",
)
def validate(published: Path, output: Path | None) -> int:
    """Predict published measurements that the calibration has not seen, and say how wrong the predictions are.

    The step time of each series is calibrated on its rows of split=base, the smallest worker counts, and predicted at
    those of split=hold by the network model on the stated links. A file of placements (columns replicas, nodes,
    step_time_s, sync_time_s) without held rows is predicted at its largest node count. Errors are signed, predicted /
    measured - 1, and stand beside those of linear scaling from the same base row; skill is 1 - error / error of linear
    scaling.

    \b
    scalebench validate --published experiments/published/scaling.csv --output plots/published
    """
    from scalebench.analysis.placements import is_placements, predict_placements, read_placements
    from scalebench.analysis.prediction_error import with_errors
    from scalebench.analysis.published import read_published
    from scalebench.analysis.published_prediction import predict_published
    from scalebench.cli.terminal_table import print_results

    if is_placements(published):
        placements = read_placements(published)
        errors = with_errors(predict_placements(placements))
        most = placements.groupby("held")["nodes"].max()
        notes = [f"Calibrated on placements on up to {most[False]} nodes; predicted are those on up to {most[True]}."]
    else:
        rows, left_out = read_published(published)
        predictions, overheads = predict_published(rows)
        errors = with_errors(predictions)
        notes = [*_sentences(errors, overheads), *left_out]
    print_results(_tables(errors), notes)
    if output is not None:
        from scalebench.figures.prediction_error import write_prediction_error

        for file in write_prediction_error(errors, output):
            click.echo(f"written: {file}", err=True)
    return 0


def _tables(errors: pd.DataFrame) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    from scalebench.analysis.prediction_error import error_by_distance, error_by_source
    from scalebench.formatting import percent, share

    by_source = Table(title="error of predictions, by source", title_justify="left")
    names = ("source", "points", "mean error", "median", "signed", "linear scaling", "skill", "intervals held")
    for name in names:
        by_source.add_column(name, justify="left" if name == "source" else "right")
    for row in error_by_source(errors).to_dict("records"):
        by_source.add_row(
            str(row["source"]),
            str(row["points"]),
            *(share(row["mape"]), share(row["median"]), percent(row["bias"]), share(row["linear_mape"])),
            *(f"{row['skill']:.2f}", share(row["held"])),
        )
    by_distance = Table(title="by doublings of workers from the calibration", title_justify="left")
    for name in ("doublings", "points", "mean error", "linear scaling", "intervals held"):
        by_distance.add_column(name, justify="right")
    for row in error_by_distance(errors).to_dict("records"):
        by_distance.add_row(
            str(row["doublings"]),
            str(row["points"]),
            *(share(row["mape"]), share(row["linear_mape"]), share(row["held"])),
        )
    return Group(by_source, by_distance)


def _sentences(errors: pd.DataFrame, overheads: Overheads) -> list[str]:
    from scalebench.analysis.prediction_error import CLEARLY, pairs_in_order
    from scalebench.formatting import counted, share

    right, pairs = pairs_in_order(errors)
    order = (
        f"{right} of {counted(pairs, 'pair')} of strategies that differ by more than {share(CLEARLY)} are in the right "
        "order."
        if pairs
        else f"No two strategies of one configuration differ by more than {share(CLEARLY)}: their order is not tested."
    )
    if overheads.fitted:
        origin = (
            f"from {counted(overheads.configurations, 'configuration')} with base rows at one and at several workers"
        )
    else:
        origin = (
            f"assumed, as {counted(overheads.configurations, 'configuration')} with base rows at one and at several "
            "workers are too few to fit them"
        )
    low, high = overheads.jitter_range
    return [
        order,
        f"Jitter {share(overheads.jitter)}, range {share(low)} to {share(high)}; {share(overheads.unhidden)} of the "
        f"hidden communication delays a step all the same: {origin}.",
        f"Intervals let links be as slow as {share(overheads.least_share)} of their stated speed.",
    ]
