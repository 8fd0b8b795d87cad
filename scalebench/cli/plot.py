"""`scalebench plot [RESULTS]`: the figures of a study, each with the numbers it shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli import options
from scalebench.records.folder import timed
from scalebench.study.choices import CAPTIONS, FIGURE_FORMATS, FIGURE_STYLES

if TYPE_CHECKING:
    from scalebench.figures import Drawn, PlotRequest


def _width(
    context: click.Context, option: click.Parameter, value: str | None
) -> float | None:
    # here and below: figures cost more than `--help` may take
    from scalebench.figures.style import parse_width

    try:
        return None if value is None else parse_width(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


@click.command()
@options.results_argument
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="NAME",
    help="Draw this one only; repeatable.",
)
@click.option(
    "--panel",
    "panels",
    multiple=True,
    metavar="NAME",
    help="Draw this panel only (a, or time); repeatable.",
)
@options.selection_options
@click.option(
    "--style",
    type=click.Choice(FIGURE_STYLES),
    default="report",
    show_default=True,
    help="Where it is to appear.",
)
@click.option(
    "--columns",
    type=click.IntRange(1, 2),
    help="Of a page: as wide as one or two.  [default: 1 in print]",
)
@click.option(
    "--width",
    "width_in",
    callback=_width,
    metavar="WIDTH",
    help="Another width: 3.5in, 84mm or 252pt.",
)
@click.option("--font", metavar="NAME", help="Another TrueType font of this machine.")
@click.option(
    "--caption",
    type=click.Choice(CAPTIONS),
    help="In the picture, in .txt and .tex beside it only, or not at all.",
)
@click.option(
    "--title",
    type=click.Choice(["panels", "none"]),
    default="panels",
    help="Titles of panels, or letters only.",
)
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar="PATH:LABEL",
    help="Draw the curve in a CSV (workers, time_s ...), or the study in a folder, as well; repeatable.",
)
@options.folder_option("--output", "plots", "Folder that gets one folder per study.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(FIGURE_FORMATS),
    help="Repeatable.  [default: pdf in print, else png]",
)
def plot(
    results: Path | None,
    figures: tuple[str, ...],
    panels: tuple[str, ...],
    output: Path,
    formats: tuple[str, ...],
    style: str,
    title: str,
    added: tuple[str, ...],
    **flags: Any,
) -> int:
    """Draw the figures of the study in RESULTS (of several the newest; default: results/).

    Each figure is written as PNG, or PDF in styles for print, with its caption (.txt,
    .tex) and the CSV of the drawn data, to OUTPUT/<study>/; where the figures of other
    records of that name lie there, to OUTPUT/<study>-2/ and so on.

    \b
    scalebench plot --style ieee --figure time-reduction --panel allreduce
    scalebench plot results/mine --style slides --strategy epoch_average --workers 8..64 --title none
    scalebench plot results/mine --figure strong-scaling --add results/other:'other lr' --add published.csv:'Lee 2020'
    """
    from scalebench.figures import PlotRequest, plot_folder
    from scalebench.figures.plotting import drawing_jobs, place_for
    from scalebench.figures.selection import parse_added
    from scalebench.figures.style import choose_style

    selection = options.selection_of(flags)
    request = PlotRequest(
        figures,
        formats,
        choose_style(style, titles=title == "panels", **flags),
        selection,
        panels,
        tuple(parse_added(text) for text in added),
    )
    folder = options.completed_study(results)
    # minutes for a reviewer are those of all figures, not of one
    with timed(folder, "plot") if request == PlotRequest() else nullcontext():
        drawn = plot_folder(
            folder,
            output,
            request,
            jobs=drawing_jobs(),
            place=place_for(folder, output),
        )
    _say(drawn, request)
    # a figure that was asked for by name is missing; of all figures some always lack
    # data
    return 2 if figures and any(figure.absent for figure in drawn) else 0


def _say(drawn: Sequence[Drawn], request: PlotRequest) -> None:
    """Print the files, and on standard error what was not drawn and what is to be known of the others."""
    for figure in drawn:
        if figure.files:
            endings = ",".join(dict.fromkeys(file.suffix for file in figure.files))
            click.echo(f"{figure.files[0].with_suffix('')}{{{endings}}}")
    for figure in drawn:
        if figure.pages > 1:
            wider = "" if request.style.full_width else "; --columns 2 takes fewer"
            further = ", ".join(
                f"{figure.name}-{page}" for page in range(2, figure.pages + 1)
            )
            click.echo(
                f"{figure.name} is taller than a page: its further panels are in {further}{wider}",
                err=True,
            )
        if figure.absent:
            click.echo(f"{figure.name} not drawn: {figure.absent}", err=True)
    # many figures make the same remark
    for note in dict.fromkeys(note for figure in drawn for note in figure.notes):
        click.echo(note, err=True)
