"""`scalebench recalibrate [RESULTS]`: new times for finished virtual runs, mostly without training them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from scalebench.cli import options
from scalebench.formatting import counted
from scalebench.records.folder import STUDY
from scalebench.system.parent_watch import start_forkserver

if TYPE_CHECKING:
    from scalebench.launch.recalibration import Recalibrated
    from scalebench.study.spec import Study


@click.command()
@options.results_argument
@options.study_options("calibration", "cluster", "device_step_time", "require_quiet")
@click.option(
    "--jitter",
    type=click.Choice(["measured", "none", "normal", "lognormal", "exponential"]),
    help="Charge with this jitter of single steps.",
)
@click.option(
    "--jitter-sigma",
    type=float,
    metavar="SHARE",
    help="Its standard deviation, relative to a step's mean.",
)
@options.jobs_option
@options.verbosity_options
def recalibrate(
    results: Path | None,
    calibration: Path | None,
    cluster: str | None,
    device_step_time: float | None,
    jitter: str | None,
    jitter_sigma: float | None,
    require_quiet: bool | None,
    jobs: int | None,
) -> int:
    """Give the virtual runs in RESULTS (default: the newest in results/) new times.

    Without an option, steps and engines are measured again. With another cluster, step
    time or jitter the study in RESULTS becomes that one: native runs stay, the files
    before are kept in RESULTS/earlier.

    Runs whose arithmetic does not depend on time are replayed without training; servers
    and asynchronous strategies are trained again. Losses and metrics stay. By a
    calibration the rows are further attempts: the latest attempt counts.
    """
    start_forkserver()  # imports torch while this process does
    from scalebench.cli import live_progress, run_common
    from scalebench.launch import recalibration
    from scalebench.launch.planning import plan_study
    from scalebench.study.load import load_study
    from scalebench.system.hardware import cores

    # paths of this command line, before the folder changes to where the study was begun
    calibration = calibration.resolve() if calibration is not None else None
    if cluster is not None and Path(cluster).is_file():
        cluster = str(Path(cluster).resolve())
    folder = run_common.enter_first_folder(options.study_folder(results))
    here = Path.cwd()
    if calibration is not None and calibration.is_relative_to(here):
        calibration = calibration.relative_to(here)  # as `run --calibration` names it
    before = load_study(folder / STUDY, {}, [])
    sets = _jitter_sets(before, jitter, jitter_sigma)
    asked = load_study(
        folder / STUDY, {"cluster": cluster, "device_step_time": device_step_time}, sets
    )
    # another study of the folder; other costs of this machine make further attempts
    other = asked != before
    # the study names a file of its own, whose place this one takes
    if calibration is not None and before.calibration is not None:
        asked = asked.model_copy(update={"calibration": calibration})
    plan = recalibration.plan_charged_by(asked, calibration)
    with live_progress.watching() as watcher:
        found = recalibration.recalibrate(
            plan,
            folder,
            watcher,
            jobs=jobs or cores(),
            # its batches tell whether rows can be replayed; its step times are in them
            before=plan_study(before, timed=False) if other else None,
            calibration=calibration,
            require_quiet=bool(require_quiet),
        )
    click.echo(_outcome(found, folder))
    return 0


def _outcome(found: Recalibrated, folder: Path) -> str:
    again = f", {counted(found.trained, 'run')} trained again" if found.trained else ""
    earlier = f"; what was there before is in {found.earlier}/" if found.earlier else ""
    replayed = f"{counted(found.replayed, 'virtual run')} charged anew without training"
    return f"{replayed}{again}; results in {folder}/{earlier}"


def _jitter_sets(before: Study, jitter: str | None, sigma: float | None) -> list[str]:
    """Return the keys of a study that state this jitter in place of that of `before`."""
    from scalebench.study.spec import Study

    # as --set writes them, so that both are checked alike
    sets = [f"virtual.jitter={jitter}"] if jitter else []
    if sigma is not None:
        sets.append(f"virtual.jitter_sigma={sigma:g}")
    elif (
        jitter in ("measured", "none")
        and "jitter_sigma" in before.virtual.model_fields_set
    ):
        # a stated one would have no effect
        sets.append(f"virtual.jitter_sigma={Study().virtual.jitter_sigma:g}")
    return sets
