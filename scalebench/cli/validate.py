"""`scalebench validate RESULTS`: predictions against measured runs, or against measurements that others published."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli import formats, options
from scalebench.errors import ResultsError, UsageError
from scalebench.formatting import counted, digits, share
from scalebench.measured import Measured
from scalebench.tables import table

if TYPE_CHECKING:
    import pandas as pd

    from scalebench.validation.held_out import Overheads


@click.command()
@click.argument("results", nargs=-1, type=options.PATH)
@click.option(
    "--published",
    type=options.FILE,
    metavar="FILE.csv",
    help="Measurements with a column `split`: calibrated on base, predicted at hold.",
)
@click.option(
    "--calibration",
    type=options.PATH,
    metavar="FILE",
    help="Predict the runs by this file.  [default: the study's own]",
)
@click.option(
    "--output",
    type=options.FOLDER,
    metavar="DIR",
    help="Write each prediction (prediction-error.csv) and the figure there.",
)
@formats.format_option
def validate(
    results: tuple[Path, ...],
    published: Path | None,
    calibration: Path | None,
    output: Path | None,
    form: str,
) -> int:
    """Predict native and paced runs in RESULTS, or published measurements, and say how wrong the predictions are.

    Runs of one or more studies (default: the newest in results/) are priced by the
    study's calibration, as modelled runs are; doublings are those of workers, nodes or
    bytes beyond what the calibration measured. With --published the step time of each
    series is calibrated on its rows of split=base, the smallest worker counts, and on
    rows without a split that have its configuration, and predicted at those of
    split=hold by the network model on the stated links. A file of pipelines (columns
    stages, balance, micro_batches), or of GPTs (columns width, heads, pipeline,
    tensor), is predicted from the fewest devices, one of plans (columns
    profile, stages) is planned again from profiles of layers. A file of placements
    (columns replicas, nodes, step_time_s, sync_time_s) without held rows is predicted
    at its largest node count.

    Errors are signed, predicted / measured - 1, and stand beside those of linear
    scaling from the same base row; skill is 1 - error / error of linear scaling.

    \b
    scalebench validate results/my-study --output plots/validation
    scalebench validate --published experiments/published/scaling.csv --output plots/published
    """
    from scalebench.validation.prediction_errors import with_errors

    if published is not None and (results or calibration is not None):
        raise UsageError(
            "--published is a file of others' measurements: leave RESULTS and --calibration out"
        )
    if published is not None and (plans := _plans(published)) is not None:
        if output is not None:
            raise UsageError("--output: plans have no errors to draw; leave it out")
        formats.show_tables(form, plans)
        return 0
    # before the folder changes to those of the studies
    output = output.resolve() if output is not None else None
    predictions, notes = (
        _published(published) if published is not None else _runs(results, calibration)
    )
    errors = with_errors(predictions)
    formats.show_tables(form, *_tables(errors), _order(errors), *notes)
    if output is not None:
        from scalebench.figures.predicted import write_prediction_error

        for file in write_prediction_error(errors, output):
            click.echo(f"written: {file}", err=True)
    return 0


def _plans(file: Path) -> table.Table | None:
    """Return published plans beside those that their rule finds; None for a file of something else."""
    from scalebench.validation import pipelines

    if not pipelines.is_plans(file):
        return None

    def dashed(stages: list[int]) -> str:
        return "-".join(map(str, stages))

    plans = pipelines.find_plans(pipelines.read_plans(file), file.parent)
    columns: list[table.Column[pipelines.FoundPlan]] = [
        table.Column("model", lambda plan: plan.model, left=True),
        table.Column("workers", lambda plan: Measured(plan.workers), table.COUNT),
        table.Column("published", lambda plan: dashed(plan.published)),
        table.Column("found", lambda plan: dashed(plan.found)),
        table.Column(
            "slowest stage", lambda plan: Measured(plan.found_s), table.TIME_ALONE
        ),
        table.Column(
            "of the published",
            lambda plan: Measured(plan.published_s),
            table.TIME_ALONE,
        ),
        table.Column("last stage begins at", lambda plan: plan.begins[-1], left=True),
    ]
    equal = sum(plan.found == plan.published for plan in plans)
    notes = [f"{equal} of {counted(len(plans), 'published plan')} found"]
    for plan in plans:
        if plan.found != plan.published:
            slower = share(plan.published_s / plan.found_s - 1)
            here = (
                f"{plan.model} on {plan.workers} workers: by the rule {dashed(plan.published)} is {slower} slower than "
                f"{dashed(plan.found)} at the bandwidth of its row"
            )
            there = ", and the fastest at no bandwidth near"
            if plan.elsewhere:
                low, high = (digits(end / 1e9, 2) for end in plan.elsewhere)
                there = f", and the fastest of all plans at {low} to {high} GB/s"
            notes.append(here + there)
    title = (
        "workers of the stages with the fastest slowest one, from profiles of layers"
    )
    return table.Table.of(
        title,
        columns,
        plans,
        notes,
    )


def _published(file: Path) -> tuple[pd.DataFrame, list[str]]:
    from scalebench.validation import held_out, megatron, pipelines, placements
    from scalebench.validation.measurements import read_published

    if placements.is_placements(file):
        rows = placements.read_placements(file)
        most = rows.groupby("held")["nodes"].max()
        note = f"Calibrated on placements on up to {most[False]} nodes; predicted are those on up to {most[True]}."
        return placements.predict_placements(rows), [note]
    if pipelines.is_pipelines(file):
        note = "Calibrated on the fewest devices; linear scaling is that of the bubble, m u / (u + m - 1)."
        rows = pipelines.read_pipelines(file)
        return pipelines.predict_pipelines(rows), [note]
    if megatron.is_megatron(file):
        predictions = megatron.predict_megatron(megatron.read_megatron(file))
        ranks = ", ".join(
            f"{source} {value:.2f}"
            for source, value in megatron.rank_correlations(predictions).items()
        )
        note = "Calibrated on the fewest devices; linear scaling is that of operations a device."
        return predictions, [note, f"Rank correlation of times a sample: {ranks}."]
    # the general form comes last: other files have its columns, too
    rows, left_out = read_published(file)
    predictions, overheads = held_out.predict_published(rows)
    return predictions, [*_assumptions(overheads), *left_out]


def _runs(
    results: tuple[Path, ...], calibration: Path | None
) -> tuple[pd.DataFrame, list[str]]:
    import pandas as pd

    from scalebench.cli.run_common import enter_first_folder
    from scalebench.validation.runs import predict_runs

    calibration = calibration.resolve() if calibration is not None else None
    folders = [options.completed_study(path).resolve() for path in results] or [
        options.completed_study(None).resolve()
    ]
    notes: list[str] = []
    tables, here = [], Path.cwd()
    for folder in folders:
        tables.append(
            predict_runs(enter_first_folder(folder), calibration, notes.append)
        )
        # back, as further RESULTS are named from here
        os.chdir(here)
    found = pd.concat(tables, ignore_index=True)
    # each note says why one study has none
    if found.empty:
        raise ResultsError(
            f"no run of {', '.join(map(str, folders))} can be predicted: {'; '.join(notes)}"
        )
    # studies of one cluster make the same remarks
    return found, list(dict.fromkeys(notes))


def _tables(errors: pd.DataFrame) -> Iterator[table.Table]:
    from scalebench.validation import prediction_errors

    known: dict[str, table.Column[Any]] = {
        "source": table.Column("source", table.text("source"), left=True),
        "doublings": table.Column("doublings", table.text("doublings")),
        "points": table.Column("points", table.fields("points"), table.COUNT),
        "mape": table.Column("mean error", table.fields("mape"), table.SHARE),
        "median": table.Column("median", table.fields("median"), table.SHARE),
        "bias": table.Column("signed", table.fields("bias"), table.CHANGE),
        "linear_mape": table.Column(
            "linear scaling", table.fields("linear_mape"), table.SHARE
        ),
        "skill": table.Column("skill", table.fields("skill"), table.TWO_DIGITS),
        "held": table.Column("intervals held", table.fields("held"), table.SHARE),
    }
    for title, summary in (
        (
            "error of predictions (modelled), by source of the measurements",
            prediction_errors.error_by_source(errors),
        ),
        (
            "by doublings from the calibration",
            prediction_errors.error_by_distance(errors),
        ),
    ):
        yield table.Table.of(
            title, [known[str(key)] for key in summary], summary.to_dict("records")
        )


def _order(errors: pd.DataFrame) -> str:
    from scalebench.validation.prediction_errors import CLEARLY, pairs_in_order

    right, pairs = pairs_in_order(errors)
    differ = f"strategies that differ by more than {share(CLEARLY)}"
    return (
        f"{right} of {counted(pairs, 'pair')} of {differ} are in the right order."
        if pairs
        else f"No pair of {differ}: their order is not tested."
    )


def _assumptions(overheads: Overheads) -> list[str]:
    base = f"{counted(overheads.configurations, 'configuration')} with base rows at one and at several workers"
    origin = (
        f"from {base}"
        if overheads.fitted
        else f"assumed, as {base} are too few to fit them"
    )
    low, high = overheads.jitter_range
    return [
        f"Jitter {share(overheads.jitter)}, range {share(low)} to {share(high)}; {share(overheads.unhidden)} of the "
        f"hidden communication delays a step all the same: {origin}.",
        f"Intervals let links be as slow as {share(overheads.least_share)} of their stated speed.",
    ]
