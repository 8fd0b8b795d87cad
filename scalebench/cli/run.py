"""`scalebench run`: a whole scaling study with one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from click import get_current_context
from click.core import ParameterSource

from scalebench.cli.options import (
    DTYPE,
    ENGINE,
    PATH,
    batch_option,
    jobs_option,
    keep_going_option,
    launcher_option,
    model_option,
    set_option,
    step_time_option,
    study_argument,
    table_options,
    verbosity_options,
)
from scalebench.cli.run_common import enter_first_folder, run_plan
from scalebench.records.folder import STUDY


@click.command()
@study_argument
@click.option("--workers", metavar="COUNTS", help="1..64 (powers of two), 1..64:8 (1,8,16,...) or 1,2,6.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="NAME",
    help="Strategy, 'NAME: {option: value}', or your own as file.py:Class; repeatable.",
)
@click.option("--dataset", metavar="NAME", help="Data set; `scalebench list datasets` shows them.")
@click.option("--data-dir", type=PATH, help="Where the files of a data set lie.")
@model_option
@click.option("--epochs", type=int, help="Passes over the training data in each run.")
@click.option("--repetitions", type=int, help="Runs of every point, each with its own seed.")
@click.option("--until", metavar="WIDTH", help="Repeat each point until its time is known so well, as 5%.")
@click.option("--scaling", type=click.Choice(["strong", "weak"]), help="Samples fixed in all, or per worker.")
@batch_option
@click.option("--batch-global", type=int, help="Samples in one step of all workers.")
@click.option("--lr", type=float, help="Learning rate.")
@click.option(
    "--lr-policy",
    type=click.Choice(["constant", "linear", "cosine", "step", "optimizer_steps"]),
    help="linear: multiplied by the workers; step and optimizer_steps: decayed every --set lr_decay_every=N.",
)
@click.option(
    "--execution",
    type=click.Choice(["auto", "native", "paced", "virtual", "modelled"]),
    help="native: real processes at their own speed; paced: real processes slowed to --device-step-time; virtual: "
    "real training in simulated time; modelled: simulated time without training; auto: virtual, and native where "
    "the cores allow.",
)
@click.option("--engine", type=ENGINE, help="Native engine of all strategies.")
@click.option("--cluster", metavar="NAME|FILE", help="What virtual runs stand for.")
@step_time_option
@click.option("--dtype", type=DTYPE, help="Of weights and gradients.")
@click.option("--seed", type=int, help="Of the first repetition; each further one adds 1.")
@click.option("--name", metavar="NAME", help="Name of the study, and of its results folder.")
@set_option
@click.option("--save-weights", is_flag=True, default=None, help="Keep each run's initial and final weights as .npz.")
@click.option("--init-weights", type=PATH, metavar="FILE.npz", help="Start from these weights.")
@click.option("--calibration", type=PATH, metavar="FILE", help="Charge virtual runs by this file.")
@click.option(
    "--noisy",
    is_flag=True,
    default=None,
    envvar="SCALEBENCH_NOISY",
    help="Simulate also by what was measured beside busy programs.",
)
@click.option(
    "--calibration-budget-s",
    type=float,
    metavar="SECONDS",
    envvar="SCALEBENCH_CALIBRATION_BUDGET_S",
    help="Time that measuring steps and engines may take.  [default: 30]",
)
@jobs_option
@click.option(
    "--output", type=PATH, default=Path("results"), show_default=True, help="Folder that gets one folder per study."
)
@click.option("--new", is_flag=True, help="A changed study of the same name goes to a folder of its own, NAME-2 ...")
@launcher_option
@keep_going_option
@click.option("--dry-run", is_flag=True, help="Show the runs and an estimate, and run nothing.")
@table_options
@verbosity_options
def run(
    study: Path | None,
    jobs: int | None,
    output: Path,
    new: bool,
    fail_fast: bool,
    against: tuple[str, ...],
    full: bool,
    dry_run: bool,
    sets: tuple[str, ...],
    until: str | None,
    **flags: Any,
) -> int:
    """Run the study in the file STUDY, or the default one, with flags over it.

    Virtual runs at every worker count, native ones (real processes) where the cores allow; every number says which
    it is. Results go to OUTPUT/<study>; the same command goes on where an interrupted one stopped. Ctrl-C finishes the
    runs under way, a second one abandons them.

    A study.yaml in a folder of results goes on there, wherever that is, unless other options than those of how to run
    it make it another study.
    """
    from scalebench.launch.planning import plan_study
    from scalebench.study.load import load_study

    strategies = list(flags.pop("strategies")) or None
    if study is not None and not (new or strategies or sets or until or _chosen("output", *flags)):
        study, output = _where_it_lies(study, output)
    if until is not None:
        sets = (*sets, f"until.ci_width={until}")
    wanted = load_study(study, {**flags, "strategies": strategies}, list(sets))
    if new:
        from scalebench.records.study_file import with_a_folder_of_its_own

        wanted = with_a_folder_of_its_own(output, wanted)
    plan = plan_study(wanted)
    if dry_run:
        from scalebench.cli.dry_run import show_plan
        from scalebench.launch.machine import given_calibration
        from scalebench.launch.model_check import look_at_model

        given_calibration(wanted, plan.cluster)
        plan.prepared.notes += look_at_model(plan)
        show_plan(plan, jobs)
        return 0
    return run_plan(plan, output, jobs=jobs, fail_fast=fail_fast, against=against, full=full)


def _chosen(*names: str) -> bool:
    """Return True if the command line has one of these options."""
    context = get_current_context()
    return any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in names)


def _where_it_lies(study: Path, output: Path) -> tuple[Path, Path]:
    """The file `study` and the folder of its results; of a study.yaml in a results folder, that folder."""
    from scalebench.records.progress import begun_in
    from scalebench.study.load import load_study

    folder = study.parent if study.parent.name not in ("", "..") else study.parent.resolve()
    if study.name != STUDY or begun_in(folder) is None or load_study(study, {}, []).name != folder.name:
        return study, output
    folder = enter_first_folder(folder)
    return folder / study.name, folder.parent
