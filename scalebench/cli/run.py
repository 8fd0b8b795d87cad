"""`scalebench run`: a whole scaling study with one command; `retry` was a name of `run --retry`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click import get_current_context

from scalebench.cli import options, run_common
from scalebench.errors import ResultsError, UsageError
from scalebench.records.folder import PLANNED, STUDY, is_submitted
from scalebench.system.parent_watch import start_forkserver

if TYPE_CHECKING:
    from scalebench.launch.planning import StudyPlan
    from scalebench.study.spec import Study


# flags of version 0.1 that are keys for `--set` alone in the next one
_OLD_FLAGS = (
    "lr_policy",
    "dtype",
    "seed",
    "save_weights",
    "init_weights",
    "patience",
    "native_budget_s",
    "calibration_budget_s",
)
_PANELS = {  # of `--help`; the options that are in none stand in the last
    "What runs": (
        "--strategy",
        "--workers",
        "--dataset",
        "--model",
        "--epochs",
        "--lr",
    ),
    "Where": ("--execution", "--cluster"),
    "How long": ("--repetitions", "--dry-run"),
    "Output": ("--name", "--output"),
    "For experts": (
        "--set",
        "--scaling",
        "--batch-per-worker",
        "--batch-global",
        "--data-dir",
        "--engine",
        "--device-step-time",
        "--calibration",
        "--require-quiet",
        "--until",
        "--retry",
        "--shard",
        "--elastic",
        "--max-restarts",
        "--fail-fast",
        "--jobs",
        "--launcher",
        "--new",
        "--against",
        "--full",
        "--quiet",
        "--verbose",
        "--help",
    ),
}


def _refuse_noisy(context: click.Context, option: click.Parameter, given: bool) -> None:
    if given:
        raise UsageError(
            "--noisy: leave it out; busy machines are calibrated, too, unless --require-quiet refuses them"
        )


@click.command()
@options.all_of(
    *(
        click.option_panel(heading, options=list(flags))
        for heading, flags in _PANELS.items()
    )
)
@options.study_argument
@options.strategies_option(
    "Strategies, your own as file.py:Class; options also as 'NAME: {option: value}'; repeatable."
)
@options.study_options(*options.STUDY_OPTIONS, hidden=_OLD_FLAGS)
@click.option(
    "--until",
    metavar="WIDTH",
    help="Repeat each point until its time is known so well, as 5%.",
)
@options.set_option
@options.jobs_option
@options.output_option
@options.new_option
@click.option("--retry", is_flag=True, help="Make the failed runs again, and no other.")
@click.option(
    "--shard",
    type=int,
    metavar="NUMBER",
    help="Make one shard of a study that was submitted as jobs.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Make native runs that go on if a worker dies; kept apart.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="NUMBER",
    help="With --elastic: workers that may die before a run fails.",
)
@options.launcher_option
@options.keep_going_option
@click.option(
    "--dry-run", is_flag=True, help="Show the runs and an estimate, and run nothing."
)
@click.option(
    # of early versions: scripts that have it get the word that helps
    "--noisy",
    is_flag=True,
    hidden=True,
    expose_value=False,
    callback=_refuse_noisy,
)
@options.table_options
@options.verbosity_options
def run(
    study: Path | None,
    jobs: int | None,
    output: Path,
    new: bool,
    retry: bool,
    shard: int | None,
    elastic: bool,
    max_restarts: int,
    fail_fast: bool,
    against: tuple[str, ...],
    full: bool,
    dry_run: bool,
    sets: tuple[str, ...],
    until: str | None,
    **flags: Any,
) -> int:
    """Run the study in the file STUDY, or the default one, with flags over it.

    Virtual runs at every worker count, native ones (real processes) where the cores
    allow; every number says which it is. Results go to OUTPUT/<study>; the same command
    goes on where an interrupted one stopped. Ctrl-C finishes the runs under way, a
    second one abandons them.

    A folder of results, or the study.yaml in it, goes on there, wherever that is,
    unless other options than those of how to run it make it another study. Keys of a
    study without an option here are set by --set; `scalebench schema` has them all.

    The exit code is 0 if every run was made, 1 if one failed, 2 for a request that
    cannot be met, 3 if runs are left (the last line says which, and why), and 128 + its
    number if a signal ended the command.
    """
    # first: a scheduler's warning would end a process that still imports
    run_common.refuse_early_signal()
    _note_old_flags()
    # options of how to run it, such as --jobs, leave the study as it is
    is_another = bool(new or sets or until) or options.chosen("output", *flags)
    continued = None if is_another else study
    make = partial(
        run_common.run_plan,
        jobs=jobs,
        fail_fast=fail_fast,
        only_failed=retry,
        against=against,
        full=full,
    )
    _refuse_others_beside(elastic, retry, shard, continued)
    if shard is not None and continued is not None:
        return make(*_shard(continued, shard))
    if continued is not None:
        study, output, flags["name"] = _where_it_lies(continued, output)
    wanted = _study(study, flags, sets, until, output if new else None)
    if retry and not _has_failures(output / wanted.name):
        return 0
    plan = _plan(wanted, runs=not dry_run)
    if elastic:
        return run_common.run_elastic(plan, output, max_restarts, fail_fast, dry_run)
    if dry_run:
        return run_common.show_plan(plan, output, jobs)
    return make(plan, output)


def _plan(wanted: Study, *, runs: bool) -> StudyPlan:
    """Return the plan of the study, whose virtual runs, if it `runs` them, need torch in another process soon."""
    if runs and wanted.execution not in ("native", "paced"):
        start_forkserver()  # imports torch while this process does
    from scalebench.launch.planning import plan_study

    return plan_study(wanted)


def _refuse_others_beside(
    elastic: bool, retry: bool, shard: int | None, continued: Path | None
) -> None:
    """Refuse options that have no meaning together; `continued` is the study that no other option changes."""
    # elastic runs have a table of their own, which neither of the two reads
    if elastic and (retry or shard is not None):
        raise UsageError(
            "--elastic: expected neither --retry (the same command makes failed runs again) nor --shard"
        )
    if shard is not None and continued is None:
        raise UsageError(
            "--shard: expected the folder of a submitted study, and no option that changes the study"
        )


def _study(
    file: Path | None,
    flags: dict[str, Any],
    sets: tuple[str, ...],
    until: str | None,
    renamed_in: Path | None,
) -> Study:
    """Return the study in `file` with the flags over it, under a name that no folder `renamed_in` this one has."""
    from scalebench.study.load import load_study

    settings = [*sets, f"until.ci_width={until}"] if until else list(sets)
    study = load_study(
        options.study_file(file),
        {**flags, "strategies": list(flags["strategies"]) or None},
        settings,
    )
    if renamed_in is None:
        return study
    from scalebench.records.study_file import with_a_folder_of_its_own

    return with_a_folder_of_its_own(renamed_in, study)


def _note_old_flags() -> None:
    # only flags of the command line: their defaults are in every call
    for key in filter(options.chosen, _OLD_FLAGS):
        if options.verbosity() >= 0:
            click.echo(
                f"note: the next version has --set {key}=... in place of {options.flag_of(key)}",
                err=True,
            )


def _shard(study: Path, number: int) -> tuple[StudyPlan, Path]:
    """Return the plan of a shard of `study`, a folder or the study.yaml in it, and the folder of its results."""
    from scalebench.batch import shards, submission

    folder = run_common.enter_first_folder(
        study.parent if study.name == STUDY else study
    )
    return submission.plan_of_shard(folder, number), shards.folder_of(
        folder, number
    ).parent


def _has_failures(folder: Path) -> bool:
    """Return True if runs of the study in `folder` failed, else say so; a folder without a study is refused."""
    from scalebench.records.progress import progress_of

    if not (folder / STUDY).is_file():
        raise UsageError(
            f"--retry: {folder} holds no study; leave --retry out to run it"
        )
    if progress_of(folder).failures:
        return True
    click.echo(f"no failed runs in {folder}/")
    return False


def _where_it_lies(study: Path, output: Path) -> tuple[Path, Path, str | None]:
    """Return a study file, the folder of its results, and its name there: of a study.yaml in a results folder that one.

    A folder of another name, as of a copy, gives its name to the study: its runs are
    the same.
    """
    study = study / STUDY if study.is_dir() else study
    folder = (
        study.parent if study.parent.name not in ("", "..") else study.parent.resolve()
    )
    # a study.yaml elsewhere is a study to begin
    if study.name != STUDY or not (folder / PLANNED).is_file():
        return study, output, None
    folder = run_common.enter_first_folder(folder)
    # from the folder in which it was begun, where its relative paths are valid
    return folder / study.name, folder.parent, folder.name


@click.command(hidden=True)
@options.results_argument
@options.jobs_option
@options.launcher_option
@options.keep_going_option
@click.option(
    "--submit",
    "submits",
    is_flag=True,
    help="Submit them as jobs, with the runs that never began.",
)
@options.table_options
@options.verbosity_options
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
    from scalebench.study.load import load_study

    folder = options.study_folder(results)
    if folder.name in ("", ".."):  # as `.` and `..` are
        folder = folder.resolve()
    if submits:
        from scalebench.cli.main import command_of

        if not is_submitted(folder):
            raise ResultsError(
                f"{folder} holds no submitted study; submit one with scalebench submit STUDY"
            )
        get_current_context().invoke(command_of("submit"), study=folder)
        return 0
    if not (folder / STUDY).is_file():
        raise ResultsError(
            f"{folder} holds no study.yaml; expected the folder of a study, such as results/<study>"
        )
    if not _has_failures(folder):
        return 0
    folder = run_common.enter_first_folder(folder)
    study = load_study(folder / STUDY, {}, [])
    # a copy under another name would be written beside it
    if study.name != folder.name:
        raise ResultsError(
            f"{folder} holds the study {study.name}; name the folder {study.name} again to go on in it"
        )
    return run_common.run_plan(
        _plan(study, runs=True),
        folder.parent,
        jobs=jobs,
        fail_fast=fail_fast,
        only_failed=True,
        against=against,
        full=full,
    )
