"""`scalebench reproduce PAPER`: the studies of a paper, and its published numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli.options import verbosity_options

if TYPE_CHECKING:
    from scalebench.papers.catalog import Paper

SCALES = ("smoke", "laptop", "cluster")


@click.command()
@click.argument("name", metavar="PAPER", required=False)
@click.option("--figure", metavar="N", help="Only this figure (4) or table (table2).")
@click.option(
    "--scale", type=click.Choice(SCALES), default="laptop", show_default=True, help="How large the studies are."
)
@click.option(
    "--claims", is_flag=True, help="Print the claims of the paper (of all without PAPER) and verdicts on them."
)
@click.option(
    "--data-dir", type=click.Path(path_type=Path), help="Where the files of a data set lie, at scale cluster."
)
@click.option(
    "--experiments",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("experiments"),
    show_default=True,
    help="Folder with one folder per paper.",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("results"),
    show_default=True,
    help="Folder that gets one folder per study.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("plots"),
    show_default=True,
    help="Folder that gets one folder per paper.",
)
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Virtual runs at the same time.  [default: all cores]")
@verbosity_options
def reproduce(
    name: str | None,
    figure: str | None,
    scale: str,
    claims: bool,
    data_dir: Path | None,
    experiments: Path,
    results: Path,
    output: Path,
    jobs: int | None,
) -> int:
    """Run the studies of PAPER and write its published numbers beside ours; without PAPER: list the papers.

    Smoke shows that everything runs, laptop takes minutes, cluster trains on the paper's data in real processes. The
    page is OUTPUT/PAPER/index.md. The same command goes on where an interrupted one stopped. --claims runs nothing: it
    judges by the rows in RESULTS.
    """
    from scalebench.papers.catalog import find_paper, find_papers

    if claims:
        from scalebench.papers.claims import claims_page

        papers = find_papers(experiments) if name is None else [find_paper(experiments, name)]
        click.echo(claims_page(papers, scale, results), nl=False)
        return 0
    if name is None:
        for paper in find_papers(experiments):
            studies = ", ".join(paper.studies) or "published numbers alone"
            click.echo(f"{paper.name}  {paper.title}\n    {studies}")
        return 0
    return _reproduce(find_paper(experiments, name), figure, scale, data_dir, results, output, jobs)


def _reproduce(
    paper: Paper, figure: str | None, scale: str, data_dir: Path | None, results: Path, output: Path, jobs: int | None
) -> int:
    from scalebench.analysis import load
    from scalebench.cli.progress import watching
    from scalebench.launch.planning import plan_study
    from scalebench.launch.study_run import run_study
    from scalebench.papers.page import write_page

    found, failed = {}, 0
    for study in paper.studies_of(figure):
        plan = plan_study(paper.study_at(study, scale, data_dir))
        with watching() as watcher:
            tally = run_study(plan, results, watcher, jobs=jobs)
        if tally.interrupted is not None:
            return 128 + tally.interrupted
        failed += len(tally.failed)
        if tally.completed or tally.done_before:
            found[study] = load(tally.folder)
    click.echo(write_page(paper, found, scale, output))
    return 1 if failed else 0
