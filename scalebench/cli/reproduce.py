"""`scalebench reproduce PAPER`: the studies of a paper or of all, and published numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli import options, run_common
from scalebench.errors import UsageError

if TYPE_CHECKING:
    from scalebench.papers.paper_folder import Paper

SMOKE = "smoke"
SCALES = (SMOKE, "laptop", "cluster")
ALL = "all"


@click.command()
@click.argument("name", metavar="PAPER", required=False)
@click.option(
    "--figure", metavar="N", help="Only this figure (4) or table (table2) of one paper."
)
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    default="laptop",
    show_default=True,
    help="How large the studies are.",
)
@click.option(
    "--claims",
    is_flag=True,
    help="Print the claims of the paper (of all without PAPER) and verdicts on them.",
)
@click.option(
    "--redraw",
    is_flag=True,
    help="Run nothing; write the pages from the rows in RESULTS.",
)
@click.option(
    "--data-dir",
    type=options.PATH,
    help="Where the files of a data set lie, at scale cluster.",
)
@click.option(
    "--experiments",
    type=options.FOLDER,
    help="Folder with one folder per paper.  [default: experiments/ if it holds papers, else the installed ones]",
)
@options.folder_option("--results", "results", "Folder that gets one folder per study.")
@options.folder_option("--output", "plots", "Folder that gets one folder per paper.")
@options.jobs_option
@options.verbosity_options
def reproduce(
    name: str | None,
    figure: str | None,
    scale: str,
    claims: bool,
    redraw: bool,
    data_dir: Path | None,
    experiments: Path | None,
    results: Path,
    output: Path,
    jobs: int | None,
) -> int:
    """Run the studies of PAPER, or of `all`, and write published numbers beside ours; without PAPER: list the papers.

    Smoke shows that everything runs, laptop takes minutes, cluster trains on the
    paper's data in real processes. At the end a verdict is printed; the page is
    OUTPUT/PAPER/index.html. The same command goes on where an interrupted one stopped.
    --claims and --redraw run nothing: they take the rows in RESULTS, of which
    results/reference has those of a run at scale laptop. The exit code is that of
    `run`: 1 where a run failed, 3 where runs are left.
    """
    from scalebench.papers import paper_folder

    if figure is not None and name in (None, ALL):
        raise UsageError("--figure is a figure of one paper; name the PAPER, too")
    experiments = experiments or paper_folder.default_experiments()
    papers = (
        paper_folder.find_papers(experiments)
        if name in (None, ALL)
        else [paper_folder.find_paper(experiments, str(name))]
    )
    if claims and scale == SMOKE:
        raise UsageError(
            f"--claims: scale {SMOKE} trains too little to judge a claim; choose laptop or cluster"
        )
    if claims:
        from scalebench.papers.side_by_side import claims_page

        click.echo(claims_page(papers, scale, results), nl=False)
    elif name is None:
        for paper in papers:
            studies = ", ".join(paper.studies) or "published numbers alone"
            click.echo(f"{paper.name}  {paper.title}\n    {studies}")
    elif redraw:
        for paper in papers:
            _write(paper, paper.studies_of(figure), scale, results, output)
    else:
        codes = set()
        for paper in papers:
            code = _reproduce(paper, figure, scale, data_dir, results, output, jobs)
            if code > run_common.RUNS_LEFT:  # interrupted
                return code
            codes.add(code)
        # the gravest of all papers
        return next((code for code in (1, run_common.RUNS_LEFT) if code in codes), 0)
    return 0


def _reproduce(
    paper: Paper,
    figure: str | None,
    scale: str,
    data_dir: Path | None,
    results: Path,
    output: Path,
    jobs: int | None,
) -> int:
    """Run studies of `paper`, write its page, and return the exit code as `run` has it."""
    from scalebench.cli.live_progress import watching
    from scalebench.launch import planning, study_run

    failed = 0
    left = 0
    studies = paper.studies_of(figure)
    with watching() as watcher:
        for number, name in enumerate(studies, start=1):
            study = paper.study_at(name, scale, data_dir)
            watcher.begin(f"{study.name} ({number} of {len(studies)})")
            tally = study_run.run_study(
                planning.plan_study(study), results, watcher, jobs=jobs
            )
            if tally.remaining:
                click.echo(f"{study.name}: {run_common.runs_left(tally)}")
            # no page: half of a paper's studies would look as its result
            if tally.interrupted is not None:
                return 128 + tally.interrupted
            failed += len(tally.failed)
            left += tally.remaining
    # also where runs failed: the page shows the others, and says so
    _write(paper, studies, scale, results, output)
    if failed:
        return 1
    return run_common.RUNS_LEFT if left else 0


def _write(
    paper: Paper, studies: list[str], scale: str, results: Path, output: Path
) -> None:
    """Write the page of `paper` from the rows of those of its `studies` that have any; print the verdict and where."""
    from scalebench.papers.paper_page import write_page

    page = write_page(paper, paper.load(studies, scale, results), scale, output)
    click.echo(f"{paper.name}: {page.verdict}")
    click.echo(page.path)
