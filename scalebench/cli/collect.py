"""`scalebench collect [RESULTS]`: the shards of a submitted study as one record."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli import options, run_common
from scalebench.formatting import counted


@click.command()
@options.results_argument
@click.argument("copies", nargs=-1, type=options.PATH)
@click.option(
    "--again",
    is_flag=True,
    help="Submit another collection if jobs of the study run or wait.",
)
def collect(results: Path | None, copies: tuple[Path, ...], again: bool) -> int:
    """Merge what the jobs of a submitted study made into its tables (default: the newest study in results/).

    COPIES are further copies of the study's folder, as from another cluster. Each run
    counts once; shards of another study are refused. The exit code is 3 if
    runs are missing, which are named.
    """
    from scalebench.batch.collection import collect as merge
    from scalebench.batch.standing import collect_again

    folder = options.study_folder(results)
    collected = merge(folder, copies)
    click.echo(
        f"{collected.runs} of {counted(collected.planned, 'run')} in {folder}/, {counted(collected.rows, 'row')} added"
    )
    for line in collected.lines():
        click.echo(line)
    # a requeued job is still to come: the collection behind it has the rest
    if collected.missing and again and collect_again(folder, click.echo):
        return 0
    if collected.missing:
        click.echo(f"to submit what is left: scalebench submit {folder}")
        # not a failure: the study is as far as its jobs
        return run_common.RUNS_LEFT
    return 0
