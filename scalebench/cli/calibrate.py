"""`scalebench calibrate [STUDY]`: measure this machine and a model once, for many studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli import options
from scalebench.errors import UsageError
from scalebench.formatting import counted

if TYPE_CHECKING:
    from scalebench.calibration.calibration_file import Calibration

_OF_A_STUDY = ("model", "dataset", "dtype")
# of measuring; processes start and operations are timed in the rest of a minute
_QUICK_S = 20.0


@click.command()
@options.study_argument
@options.study_options("model", "dataset", "dtype", "require_quiet")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    help="Samples of a step; repeatable.  [default: the study's]",
)
@options.set_option
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where steps are measured; on cuda, with one process for each GPU.",
)
@click.option(
    "--kernels",
    type=options.NEW_FILE,
    metavar="FILE.json",
    help="Measure kernels of random sizes instead, from which `predict --device FILE.json` learns any model's steps.",
)
@click.option("--quick", is_flag=True, help="Within a minute, with wider intervals.")
@click.option(
    "--calibration-budget-s",
    type=float,
    metavar="SECONDS",
    help="Time that measuring may take.  [default: 120]",
)
@click.option(
    "--output",
    "-o",
    type=options.NEW_FILE,
    # a file of its own name, not of a study: many studies are charged by it
    default=Path("calibration.json"),
    show_default=True,
    help="File that is written, or completed.",
)
@options.verbosity_options
def calibrate(
    study: Path | None,
    batches: tuple[int, ...],
    sets: tuple[str, ...],
    device: str,
    kernels: Path | None,
    quick: bool,
    calibration_budget_s: float | None,
    output: Path,
    **flags: Any,
) -> int:
    """Measure steps of the model of STUDY (default: the default study), and the engines, into one file.

    `run`, `recalibrate` and `predict` take it with --calibration FILE. It holds step
    times by batch and by busy workers of a node, and costs of engines by bytes, ranks
    and, in an allocation, nodes. Interrupted, the same command goes on with what is
    missing; further sizes (--batch) are added to the file.
    """
    from scalebench.calibration.charging import calibrate as measure
    from scalebench.cli.live_progress import watching
    from scalebench.comm import engines
    from scalebench.launch import calibrating, planning
    from scalebench.study.load import load_study

    # of the command alone: a study's budget is for a measurement in passing
    budget = calibration_budget_s or (_QUICK_S if quick else 120.0)
    if kernels is not None:
        of_a_study = (study, batches, sets, *(flags[name] for name in _OF_A_STUDY))
        if any(of_a_study) or device != "cpu":
            raise UsageError(
                "--kernels: measures no study; give the time only, --quick or --calibration-budget-s"
            )
        click.echo(_measure_kernels(kernels, budget))
        return 0
    # before anything is measured, and in the engine's own words
    if device == "cuda" and (reason := engines.available(engines.on_gpus())):
        raise UsageError(f"--device cuda: {reason}")
    # virtual runs are what a calibration charges
    asked = {**flags, "execution": "virtual", "calibration_budget_s": budget}
    wanted = load_study(
        options.study_file(study),
        asked | ({"engine": engines.on_gpus()} if device == "cuda" else {}),
        list(sets),
    )
    plan = planning.plan_study(wanted)
    # small shards make small batches at many workers, and each size has its own step
    # time
    simulated = plan.sweep.simulated
    sizes = set(batches) or plan.batch_sizes({run.workers for run in simulated})
    with watching() as watcher:
        watcher.phase("calibration", 0)
        found = measure(
            calibrating.request_of(plan, simulated),
            output,
            sizes,
            note=watcher.note,
            began=lambda what: watcher.phase(what, 0),
        )
    _show_measured(found, output)
    return 0


def _show_measured(found: Calibration, output: Path) -> None:
    """Print what `output` holds now: batch sizes, loads and engines, and the fits of links between nodes."""
    from scalebench.cluster.link_fit import fit_engine

    # the file may have held others before
    known = sorted({batch.samples for table in found.tables for batch in table.batches})
    loads = ", ".join(str(table.busy_workers) for table in found.tables)
    measured = sorted(
        # variants of an engine, as that of stages, have names behind a dash
        {entry.engine.partition("-")[0] for entry in found.engines.entries}
    )
    sizes = f"{counted(len(known), 'batch size')} ({', '.join(map(str, known))}) beside {loads} busy workers"
    steps = sizes if known else "no steps, which the study states"
    click.echo(
        f"{output}: {found.measured}; {steps}; {', '.join(measured) or 'no engine'}"
    )
    for engine in measured:
        # in allocations of several nodes only
        if (fit := fit_engine(found.engines, engine)) is not None:
            click.echo(f"{engine} between nodes: {fit}")


def _measure_kernels(path: Path, seconds: float) -> str:
    """Write a kernel model of one thread of this machine; return the sentence on it."""
    import torch

    from scalebench.calibration.kernel_timing import measure_kernel_model

    torch.set_num_threads(1)  # as a worker
    model = measure_kernel_model(seconds)
    model.save(path)
    errors = sorted(net.error for net in model.nets.values())
    return (
        f"{path}: kernels of {model.machine}; {counted(len(errors), 'network')}, off by {100 * errors[0]:.0f} to "
        f"{100 * errors[-1]:.0f} % (median of kernels held out)"
    )
