"""`scalebench submit STUDY`: the study as jobs of a batch scheduler."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import rich_click as click
from click import get_current_context

from scalebench.cli import options, run_common
from scalebench.errors import UsageError
from scalebench.formatting import Detail
from scalebench.records.folder import is_submitted
from scalebench.study.choices import SchedulerName

if TYPE_CHECKING:
    from scalebench.batch.job import Scheduler
    from scalebench.batch.site import Site
    from scalebench.batch.submission import Submission
    from scalebench.launch.planning import StudyPlan
    from scalebench.study.spec import Study

# options that a submitted study has too: its runs are divided already
_OF_JOBS = {
    "study",
    "limit_s",
    "site_file",
    "scheduler",
    "collect",
    "numbers",
    "launcher",
    "dry_run",
}
# keys that change which jobs there are; others are set by --set
_KEYS = [
    "workers",
    "dataset",
    "data_dir",
    "model",
    "epochs",
    "repetitions",
    "scaling",
    "batch_per_worker",
    "batch_global",
    "lr",
    "execution",
    "engine",
    "cluster",
    "device_step_time",
    "name",
]


@click.command()
@options.study_argument
@options.strategies_option("Strategies; repeatable.")
@options.study_options(*(key for key in options.STUDY_OPTIONS if key in _KEYS))
@options.set_option
@options.output_option
@options.new_option
@click.option(
    "--group",
    "grouping",
    type=click.Choice(["nodes", "count", "all"]),
    # worker counts that fit equally many nodes wait once in one job
    default="nodes",
    help="One job for all worker counts of equally many nodes, one for each count, or one in all.  [default: nodes]",
)
@click.option(
    "--array",
    is_flag=True,
    help="Make an array of the repetitions of each group.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="Tasks of an array that run at the same time, as %N.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Most nodes of a job.  [default: site.yaml, or the scheduler]",
)
@click.option(
    "--tasks-per-node",
    type=click.IntRange(min=1),
    help="Workers on a node.  [default: its GPUs, or cores]",
)
@click.option(
    "--time",
    "limit_s",
    callback=options.parsed_by("parse_duration"),
    metavar="HH:MM:SS",
    help="Time limit of each job.",
)
@click.option(
    "--site",
    "site_file",
    type=options.FILE,
    help="Facts of the site.  [default: the first site.yaml found]",
)
@click.option(
    "--scheduler",
    type=click.Choice(get_args(SchedulerName)),
    help="Scheduler.  [default: the one here]",
)
@click.option(
    "--collect/--no-collect",
    default=True,
    help="Submit a job that collects the others.  [default: collect]",
)
@click.option(
    "--shard",
    "numbers",
    type=int,
    multiple=True,
    help="Submit what is left of this shard again; repeatable.",
)
@options.launcher_option
@click.option("--dry-run", is_flag=True, help="Print the scripts, and submit nothing.")
@options.verbosity_options
def submit(
    study: Path | None,
    strategies: tuple[str, ...],
    sets: tuple[str, ...],
    output: Path,
    new: bool,
    numbers: tuple[int, ...],
    site_file: Path | None,
    scheduler: str | None,
    **flags: Any,
) -> None:
    """Submit STUDY, or the default study, as batch jobs: one for each group of worker counts, largest first.

    Each job runs its part of the study (a shard) with the engines that `scalebench run`
    has; a last one collects them. The scripts stay in RESULTS/jobs, where they can be
    edited and submitted by hand.

    STUDY may be the folder of a submitted study: of shards without a job, the runs that
    failed or never began are submitted again, as by `scalebench retry STUDY --submit`.
    Their scripts stay as they are there, unless --time, --site or --launcher is given.

    Account, partition, modules and the like are read from site.yaml; `scalebench init
    --site` writes one.
    """
    # here and below: reading and planning a study cost more than `--help` may take
    from scalebench.study.load import load_study

    asked = {
        name: flags.pop(name)
        for name in ("grouping", "array", "limit", "nodes", "tasks_per_node", "limit_s")
    }
    if asked["limit"] and not asked["array"]:
        raise UsageError(
            "--limit bounds the tasks of an array that run at the same time; add --array"
        )
    dry_run, collects = flags.pop("dry_run"), flags.pop("collect")
    # before the folder changes
    site_file = site_file and site_file.resolve()
    known = _from_first_folder(study) if _is_submitted(study, numbers) else None
    place = study.parent if study is not None and known is None else Path()
    chosen, site = _scheduler_and_site(
        scheduler, site_file, place, known, submits=not dry_run
    )
    if known is not None:
        anew = options.chosen("site_file", "launcher")
        again = {"numbers": numbers, "limit_s": asked["limit_s"], "anew": anew}
        _submit_left(known, chosen, site, again, dry_run=dry_run, collects=collects)
        return
    wanted = load_study(
        study, {**flags, "strategies": list(strategies) or None}, list(sets)
    )
    if new:
        from scalebench.records.study_file import with_a_folder_of_its_own

        wanted = with_a_folder_of_its_own(output, wanted)
    _submit_study(
        wanted, output, chosen, site, asked, dry_run=dry_run, collects=collects
    )


def _from_first_folder(folder: Path | None) -> Path:
    """Change to where the study was submitted, and return its `folder` from there, as its scripts name it."""
    assert folder is not None
    return Path(os.path.relpath(run_common.enter_first_folder(folder)))


def _scheduler_and_site(
    named: str | None,
    site_file: Path | None,
    place: Path,
    known: Path | None,
    *,
    submits: bool,
) -> tuple[Scheduler, Site]:
    """Return the scheduler `named`, by default that of the site or of the study in the folder `known`, and the site."""
    from scalebench.batch.schedulers import scheduler_for
    from scalebench.batch.site import site_for
    from scalebench.batch.submission import read_submission
    from scalebench.comm import launchers

    site, found = site_for(place, site_file)
    named = named or site.scheduler
    # a study that was submitted stays with its scheduler, unless another is named
    if named is None and known is not None:
        named = read_submission(known).scheduler
    scheduler = scheduler_for(named, submits=submits)
    if stated := os.environ.get(launchers.VARIABLE):
        # a job has it by its script, as not every scheduler passes the environment on
        site = site.model_copy(update={"launcher": stated})
    if found is not None and options.verbosity() > 0:
        click.echo(f"note: facts of the site are those of {found}", err=True)
    return scheduler, site


def _is_submitted(study: Path | None, numbers: tuple[int, ...]) -> bool:
    """Return True if `study` is the folder of a submitted study, False if it is a study file or the default one.

    Raises:
        UsageError: it is another folder, has no shards of which to submit some, or has options that would divide it
            anew.
    """
    is_folder = study is not None and study.is_dir()
    is_known = study is not None and is_folder and is_submitted(study)
    if is_known:
        _refuse_division()
    if numbers and not is_known:
        raise UsageError(
            "--shard: expected the folder of a submitted study, as scalebench submit results/NAME --shard 1"
        )
    if is_folder and not is_known:
        raise UsageError(
            f"{study} holds no submitted study; expected a study file, or the folder of one"
        )
    return is_known


def _refuse_division() -> None:
    """Refuse options that have no meaning for shards that are there.

    Raises:
        UsageError: names the first one.
    """
    context = get_current_context()
    for option in context.command.params:
        name = str(option.name)
        if option.expose_value and name not in _OF_JOBS and options.chosen(name):
            raise UsageError(
                f"{option.opts[0]}: the jobs of a submitted study keep their runs, nodes and tasks; leave it out, or "
                "submit the study file, under another --name"
            )


def _submit_left(
    folder: Path,
    scheduler: Scheduler,
    site: Site,
    again: dict[str, Any],
    *,
    dry_run: bool,
    collects: bool,
) -> None:
    """Submit shards of the study in `folder` again, or show their scripts."""
    from scalebench.batch import standing

    say = click.echo
    if dry_run:
        submitter, jobs, _ = standing.jobs_left(folder, scheduler, site, say, **again)
        if jobs:
            _show(submitter, jobs, collects)
    else:
        standing.submit_again(folder, scheduler, site, say, collects=collects, **again)


def _submit_study(
    wanted: Study,
    output: Path,
    scheduler: Scheduler,
    site: Site,
    asked: dict[str, Any],
    *,
    dry_run: bool,
    collects: bool,
) -> None:
    from scalebench.batch import submission

    plan, made = _planned(wanted, scheduler, site, asked)
    folder = output / plan.study.name
    divides = options.chosen("grouping", "array", "nodes", "tasks_per_node")
    with nullcontext() if dry_run else submission.submitting(folder, click.echo):
        made, numbers = submission.joined(folder, plan, made, divides=divides)
        submitter = submission.Submitter(folder, scheduler, site, made)
        jobs = submitter.jobs(
            numbers, array=asked["array"], at_once=asked["limit"] or 0
        )
        if jobs and dry_run:
            _show(submitter, jobs, collects)
        elif jobs:
            submission.begin(folder, plan, made)
            submitter.submit(jobs, collects=collects, say=click.echo)
            click.echo(
                f"scripts and output in {folder}/jobs/; next: scalebench status {folder}"
            )
    # the study is there already, its jobs refused half-way perhaps
    if not jobs:
        again = {"limit_s": asked["limit_s"]}
        _submit_left(folder, scheduler, site, again, dry_run=dry_run, collects=collects)


def _planned(
    wanted: Study, scheduler: Scheduler, site: Site, asked: dict[str, Any]
) -> tuple[StudyPlan, Submission]:
    """Return the plan of the study and its division into jobs, after their notes are printed."""
    from scalebench.batch import shards
    from scalebench.batch.submission import Submission
    from scalebench.launch import planning

    # before planning: how many nodes a run takes depends on what starts its ranks
    shards.choose_launcher(site, wanted)
    allocation = shards.allocation_for(
        wanted, site, scheduler, asked["nodes"], asked["tasks_per_node"]
    )
    known = shards.partition_of(site, scheduler)
    plan = planning.plan_study(wanted, allocation)
    # torch takes seconds of a login node
    if not planning.fits_unseen(plan):
        from scalebench.launch.model_check import look_at_model

        plan = replace(plan, remarks=tuple(look_at_model(plan)))
    divided = shards.divide(
        plan,
        allocation,
        asked["grouping"],
        by_repetition=asked["array"],
        limit_s=shards.limits_of(
            plan,
            allocation,
            site,
            asked["limit_s"],
            known.max_time_s if known is not None else None,
        ),
    )
    _print_notes([*shards.only_virtual(plan.study, allocation), *plan.notes])
    return plan, Submission.of(divided, scheduler.name, allocation)


def _print_notes(notes: Iterable[str]) -> None:
    """Print notes, details among them only under -v."""
    for note in notes:
        if not isinstance(note, Detail) or options.verbosity() > 0:
            click.echo(f"note: {note}", err=True)


def _show(submitter: Any, jobs: Any, collects: bool) -> None:
    """Print the scripts of `jobs`, each under its name."""
    shown = [("; ".join(map(str, shards)), job) for shards, job in jobs]
    if collects:
        shown.append(("collects them when they have ended", submitter.collection()))
    seconds = 0
    for what, job in shown:
        path, text = submitter.script(job)
        click.echo(f"# {path}: {what}\n{text}")
        seconds += job.nodes * job.limit_s * max(1, len(job.tasks))
    if options.verbosity() >= 0:
        click.echo(
            f"note: time limits of {seconds / 3600:.3g} node-hours in all", err=True
        )
