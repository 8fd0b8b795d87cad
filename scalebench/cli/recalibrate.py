"""`scalebench recalibrate [RESULTS]`: new times for finished virtual runs, without training them."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import results_argument, study_folder, verbosity_options
from scalebench.formatting import counted
from scalebench.records.folder import STUDY


@click.command()
@results_argument
@click.option(
    "--calibration", type=click.Path(path_type=Path), metavar="FILE", help="Charge by this file instead of measuring."
)
@click.option(
    "--noisy",
    is_flag=True,
    envvar="SCALEBENCH_NOISY",
    help="Take also what can only be measured beside busy programs.",
)
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Virtual runs at the same time.  [default: all cores]")
@verbosity_options
def recalibrate(results: Path | None, calibration: Path | None, noisy: bool, jobs: int | None) -> int:
    """Measure steps and engines again and give the virtual runs in RESULTS (default: the newest in results/) new times.

    Runs whose arithmetic does not depend on time are replayed without training; servers and asynchronous strategies are
    trained again. Losses and metrics stay. The rows are further attempts: the latest attempt of a run counts.
    """
    from scalebench.cli.progress import watching
    from scalebench.cli.run_common import enter_first_folder
    from scalebench.comm.engines import cores
    from scalebench.launch.planning import plan_study
    from scalebench.launch.recalibration import recalibrate as charge_anew
    from scalebench.study.load import load_study

    if calibration is not None:
        calibration = calibration.resolve()
    folder = enter_first_folder(study_folder(results))
    study = load_study(folder / STUDY, {}, [])
    plan = plan_study(study)
    changed = {"noisy": noisy or study.noisy} | ({"calibration": calibration} if calibration else {})
    plan.study = plan.study.model_copy(update=changed)
    with watching() as watcher:
        found = charge_anew(plan, folder, watcher, jobs=jobs or cores())
    again = f", {counted(found.trained, 'run')} trained again" if found.trained else ""
    click.echo(f"{counted(found.replayed, 'virtual run')} charged anew without training{again}; results in {folder}/")
    return 0
