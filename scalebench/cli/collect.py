"""`scalebench collect [RESULTS]`: the shards of a submitted study as one record."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import PATH, results_argument, study_folder
from scalebench.cli.run_common import RUNS_LEFT
from scalebench.formatting import counted


@click.command()
@results_argument
@click.argument("copies", nargs=-1, type=PATH)
@click.option(
    "--again",
    is_flag=True,
    help="Submit another collection if jobs of the study run or wait.",
)
def collect(results: Path | None, copies: tuple[Path, ...], again: bool) -> int:
    """Merge what the jobs of a submitted study made into its tables (default: the newest study in results/).

    COPIES are further copies of the study's folder, as from another cluster. Each run
    counts once; shards of another study or version are refused. The exit code is 3 if
    runs are missing, which are named.
    """
    from scalebench.batch.collection import collect as merge

    folder = study_folder(results)
    collected = merge(folder, copies)
    click.echo(
        f"{collected.runs} of {counted(collected.planned, 'run')} in {folder}/, {counted(collected.rows, 'row')} added"
    )
    for line in collected.lines():
        click.echo(line)
    if collected.missing and again and _submitted_again(folder):
        return 0
    if collected.missing:
        click.echo(f"to submit what is left: scalebench submit {folder}")
        return RUNS_LEFT
    return 0


def _submitted_again(folder: Path) -> bool:
    """Submit another collection behind the jobs that run or wait; return False if there are none.

    A job that went back into the queue has ended once already: Slurm may begin what
    waits for its end then.
    """
    from scalebench.batch.schedulers import SCHEDULERS
    from scalebench.batch.site import site_for
    from scalebench.batch.standing import standings, under_way
    from scalebench.batch.submission import Submitter, read_submission, submitting

    with submitting(folder, click.echo):
        submission = read_submission(folder)
        jobs = under_way(submission, standings(folder, submission, poll_s=0.0))
        submitter = Submitter(
            folder, SCHEDULERS[submission.scheduler], site_for(Path())[0], submission
        )
        submitter.submit([], collects=True, say=click.echo, under_way=jobs)
    return bool(jobs)
