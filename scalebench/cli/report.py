"""`scalebench report [RESULTS]`: write a study as one HTML page."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import FILE, completed_study, results_argument


@click.command()
@results_argument
@click.option(
    "--output",
    "-o",
    type=FILE,
    metavar="FILE.html",
    help="Where the page goes.  [default: plots/<study>/report.html]",
)
@click.option("--open", "show", is_flag=True, help="Show it in the web browser.")
def report(results: Path | None, output: Path | None, show: bool) -> None:
    """Write the study in RESULTS (of several the newest; default: results/) as one self-contained HTML file.

    The answer in one sentence with its interval, figures, tables, findings on the
    method, where the numbers come from and how to make them again.
    """
    import webbrowser

    from scalebench.figures.plotting import drawing_jobs, place_for
    from scalebench.records.folder import timed
    from scalebench.report.page import write_report

    # before minutes of drawing
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise click.UsageError(f"--output {output}: expected a name that ends in .html")
    folder = completed_study(results)
    with timed(folder, "report"):
        page = write_report(
            folder,
            output or place_for(folder, Path("plots")) / "report.html",
            drawing_jobs(),
        )
    click.echo(page)
    # on a login node there is none, and the page is written all the same
    if show and not webbrowser.open(page.resolve().as_uri()):
        click.echo("no web browser found here; open the file in one", err=True)
