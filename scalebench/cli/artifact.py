"""`scalebench artifact [RESULTS]`: pack a study for a reviewer, or verify the pack."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli import options
from scalebench.formatting import counted


@click.command()
@options.results_argument
@click.option(
    "--paper",
    type=options.FILE,
    metavar="FILE",
    help="YAML with title, authors, license, doi, contributions, and where in the paper the figures stand.",
)
@options.folder_option(
    "--output", "artifacts", "Folder that gets STUDY-artifact/ and STUDY-artifact.zip."
)
@click.option(
    "--verify",
    type=options.FOLDER,
    metavar="FOLDER",
    help="Check an unpacked artifact instead: checksums, and its figures drawn again.",
)
def artifact(
    results: Path | None, paper: Path | None, output: Path, verify: Path | None
) -> int:
    """Pack the study in RESULTS (of several the newest; default: results/) for a reviewer.

    The zip holds the records, the figures, the artifact description (LaTeX and
    Markdown), RO-Crate metadata, checksums, scalebench itself, and reproduce.sh, which
    checks it all. The same records give the same zip.
    """
    from scalebench.figures.plotting import drawing_jobs

    # a pack draws every figure, and so does its check
    jobs = drawing_jobs()
    if verify is not None:
        # an artifact brings its records and its paper along
        if results is not None or paper is not None:
            raise click.UsageError("--verify FOLDER takes neither RESULTS nor --paper")
        return _verify(verify, jobs)
    from scalebench.artifact import write_artifact
    from scalebench.artifact.artifact_description import load_paper

    written = load_paper(paper)
    made = write_artifact(options.completed_study(results), output, written, jobs=jobs)
    for remark in made.remarks:
        click.echo(f"note: {remark}", err=True)
    minutes = made.description.minutes
    click.echo(f"{made.folder}/")
    click.echo(made.archive)
    click.echo(
        f"minutes that a reviewer needs: set-up {minutes.setup}, to check the figures "
        f"{minutes.analysis}; to run the study again: set-up {minutes.setup_rerun}, "
        f"execution {minutes.execution}"
    )
    return 0


def _verify(folder: Path, jobs: int) -> int:
    from scalebench.artifact.verification import verify_artifact

    verdicts = verify_artifact(folder, jobs=jobs)
    for verdict in verdicts:
        same = f"the same {counted(verdict.cells, 'cell')}"
        what = f"DIFFERS: {verdict.fault}" if verdict.fault else same
        click.echo(f"{verdict.figure}: {what}")
    failed = sum(bool(verdict.fault) for verdict in verdicts)
    differ = "differs" if failed == 1 else "differ"
    click.echo(
        f"{failed} of {counted(len(verdicts), 'figure')} {differ} from those in the artifact"
        if failed
        else "every figure shows the numbers of the artifact"
    )
    return 1 if failed else 0
