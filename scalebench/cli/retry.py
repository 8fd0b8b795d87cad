"""`scalebench retry [RESULTS]`: the name that `scalebench run RESULTS --retry` had in version 0.1."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import (
    jobs_option,
    keep_going_option,
    launcher_option,
    results_argument,
    study_folder,
    table_options,
    verbosity_options,
)
from scalebench.errors import ResultsError
from scalebench.records.folder import STUDY


@click.command(hidden=True)
@results_argument
@jobs_option
@launcher_option
@keep_going_option
@click.option(
    "--submit",
    "submits",
    is_flag=True,
    help="Submit them as jobs, with the runs that never began.",
)
@table_options
@verbosity_options
def retry(
    results: Path | None,
    jobs: int | None,
    fail_fast: bool,
    submits: bool,
    against: tuple[str, ...],
    full: bool,
) -> int:
    """Run again what failed, diverged or timed out in RESULTS, as `run RESULTS --retry` (default: the newest study).

    The rows of the failed attempts stay; the latest attempt counts. Runs that were
    never tried are left to `run`. Relative paths in the study are seen from where it
    was begun, wherever RESULTS is named from.
    """
    from scalebench.cli.run_common import enter_first_folder, run_plan
    from scalebench.launch.planning import plan_study
    from scalebench.records.progress import progress_of
    from scalebench.study.load import load_study

    folder = study_folder(results)
    if folder.name in ("", ".."):  # as `.` and `..` are
        folder = folder.resolve()
    if submits:
        from scalebench.batch.schedulers import scheduler_for
        from scalebench.batch.site import site_for
        from scalebench.batch.submission import read_submission
        from scalebench.cli.submit import again

        site, _ = site_for(Path())
        named = site.scheduler or read_submission(folder).scheduler
        again(folder, scheduler_for(named), site)
        return 0
    if not (folder / STUDY).is_file():
        raise ResultsError(
            f"{folder} holds no study.yaml; expected the folder of a study, such as results/<study>"
        )
    if not progress_of(folder).failures:
        click.echo(f"no failed runs in {folder}/")
        return 0
    folder = enter_first_folder(folder)
    study = load_study(folder / STUDY, {}, [])
    if study.name != folder.name:
        raise ResultsError(
            f"{folder} holds the study {study.name}; name the folder {study.name} again to go on in it"
        )
    plan = plan_study(study)
    return run_plan(
        plan,
        folder.parent,
        jobs=jobs,
        fail_fast=fail_fast,
        only_failed=True,
        against=against,
        full=full,
    )
