"""`scalebench plot [RESULTS]`: the figures of a study, each with the numbers it shows."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import rich_click as click

from scalebench.cli.options import completed_study, results_argument
from scalebench.figures import FORMATS, plot_folder
from scalebench.figures.place import place_for
from scalebench.records.durations import timed

_MOST_JOBS = 4  # each holds some 150 MiB


@click.command()
@results_argument
@click.option("--figure", "figures", multiple=True, metavar="NAME", help="Draw this one only; repeatable.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("plots"),
    show_default=True,
    help="Folder that gets one folder per study.",
)
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(FORMATS), help="Repeatable.  [default: all three]"
)
def plot(results: Path | None, figures: tuple[str, ...], output: Path, formats: tuple[str, ...]) -> None:
    """Draw the figures of the study in RESULTS (of several the newest; default: results/).

    Each figure is written as PDF, SVG and PNG with the CSV of the drawn data beside it, to OUTPUT/<study>/; where the
    figures of other records of that name lie there, to OUTPUT/<study>-2/ and so on.
    """
    jobs = min(_MOST_JOBS, len(os.sched_getaffinity(0)))
    folder = completed_study(results)
    with timed(folder, "plot") if not figures else nullcontext():
        drawn = plot_folder(folder, output, figures, formats or FORMATS, jobs=jobs, place=place_for(folder, output))
    for figure in drawn:
        if figure.files:
            click.echo(f"{figure.files[0].with_suffix('')}{{{','.join(file.suffix for file in figure.files)}}}")
    for figure in drawn:
        if figure.absent:
            click.echo(f"{figure.name} not drawn: {figure.absent}", err=True)
    for note in drawn[0].notes:
        click.echo(note, err=True)
