"""`scalebench trace`: the timeline of one run, as a figure and as a file for Chrome's or Perfetto's viewer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from scalebench.cli import options
from scalebench.errors import UsageError
from scalebench.study.choices import FIGURE_FORMATS

if TYPE_CHECKING:
    from scalebench.study.spec import Study
    from scalebench.training.outcome import Timeline

# defaults without a study file
_SHORT = {
    "dataset": "wine",
    "epochs": 2,
    "workers": "4",
    "execution": "virtual",
}


@click.command()
@options.study_argument
@click.option(
    "--strategy",
    metavar=options.STRATEGY,
    help="The strategy to trace; needed unless STUDY has only one.",
)
@click.option(
    "--workers",
    metavar="COUNT",
    help="The number of workers.  [default: 4, or the study's]",
)
@click.option("--dataset", metavar="NAME", help="[default: wine, or the study's]")
@click.option("--epochs", type=int, help="[default: 2, or the study's]")
@click.option(
    "--execution",
    type=click.Choice(["virtual", "native", "paced"]),
    help="[default: virtual]",
)
@options.study_options(
    "model", "batch_per_worker", "engine", "cluster", "device_step_time", "seed", "name"
)
@options.set_option
@click.option(
    "--horovod-timeline",
    type=options.PATH,
    metavar="FILE",
    help="Run nothing, show this file.",
)
@click.option(
    "--graph",
    is_flag=True,
    help="Run nothing, draw the tasks of a strategy of whole epochs.",
)
@click.option(
    "--window",
    metavar="BEGIN:END",
    help="Seconds that the figure shows; the trace file has all.",
)
@click.option("--output", type=options.FOLDER, default=Path("plots"), show_default=True)
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(FIGURE_FORMATS),
    help="Repeatable.  [default: png]",
)
@options.verbosity_options
def trace(
    study: Path | None,
    sets: tuple[str, ...],
    horovod_timeline: Path | None,
    graph: bool,
    window: str | None,
    output: Path,
    formats: tuple[str, ...],
    **flags: Any,
) -> None:
    """Trace one short run: the study in STUDY, or the default one, with flags over it.

    Writes OUTPUT/STUDY/timeline-RUN as a figure (PNG, and the CSV of the drawn laps)
    and as .trace.json, which ui.perfetto.dev and chrome://tracing open. A real run on
    Horovod brings Horovod's own timeline along.
    """
    # here and below: a study and its figures cost more than `--help` may take
    from scalebench.export import write_chrome
    from scalebench.figures import style, traced_run
    from scalebench.study.spec import slug
    from scalebench.training.outcome import Lane, Timeline, read_horovod

    # tasks are recorded on meta tensors: nothing is run, and no window is shown
    if graph:
        for file in _draw_graph(study, flags, sets, output, formats):
            click.echo(file)
        return
    # before the run, which would be in vain
    shown = _window(window)
    if horovod_timeline is not None:
        lanes: list[Lane] = read_horovod(horovod_timeline)
        timeline = Timeline(
            horovod_timeline.name,
            "native",
            f"Horovod's timeline {horovod_timeline.name}, rank 0",
            lanes,
        )
        stem = output / f"timeline-{slug(horovod_timeline.stem)}"
    else:
        timeline, folder = _traced(study, flags, sets)
        stem = output / folder / f"timeline-{slug(timeline.title)}-{timeline.execution}"
    files = traced_run.draw_timeline(
        timeline, stem, formats or style.REPORT.formats, shown
    )
    path = stem.with_suffix(".trace.json")
    # all laps, whatever part the figure shows
    write_chrome(timeline, path)
    for file in (*files, path):
        click.echo(file)


def _traced(
    study: Path | None, flags: dict[str, Any], sets: tuple[str, ...]
) -> tuple[Timeline, str]:
    """Trace the run; return its timeline and the name of the study."""
    from scalebench.launch import planning, tracing

    wanted, own = _wanted(study, flags, sets)
    # a traced run is no measurement, and no study keeps its row
    with tempfile.TemporaryDirectory(prefix="scalebench-trace-") as folder:
        return tracing.trace(planning.plan_study(wanted), Path(folder)), own


def _draw_graph(
    study: Path | None,
    flags: dict[str, Any],
    sets: tuple[str, ...],
    output: Path,
    formats: tuple[str, ...],
) -> list[Path]:
    """Draw the tasks of the run, whose schedules are recorded without data and arithmetic."""
    from scalebench.figures import style, traced_run
    from scalebench.launch import planning, traffic
    from scalebench.study.spec import slug

    wanted, own = _wanted(study, flags, sets)
    plan = planning.plan_study(wanted, timed=False)
    run, nodes = traffic.tasks_of(plan)
    title = f"{run.strategy} at {run.workers} worker{'s' * (run.workers > 1)}"
    return traced_run.draw_task_graph(
        nodes,
        title,
        output / own / f"tasks-{slug(title)}",
        formats or style.REPORT.formats,
    )


def _wanted(
    study: Path | None, flags: dict[str, Any], sets: tuple[str, ...]
) -> tuple[Study, str]:
    """Return the study of one run, and the name of its folder."""
    from scalebench.strategies import registry
    from scalebench.study.load import load_study
    from scalebench.study.spec import slug

    named = {item.partition("=")[0].partition(".")[0].strip() for item in sets}
    defaults = _SHORT if study is None else {"execution": "virtual"}
    chosen = {
        **flags,
        "repetitions": 1,
        "strategies": [flags["strategy"]] if flags["strategy"] else None,
    }
    del chosen["strategy"]
    for key, value in defaults.items():
        if chosen[key] is None and key not in named:
            chosen[key] = value
    wanted = load_study(options.study_file(study), chosen, list(sets))
    if len(wanted.strategies) > 1:
        names = ", ".join(str(strategy) for strategy in wanted.strategies)
        raise UsageError(
            f"a timeline is of one strategy; choose one of {names} with --strategy"
        )
    asked = flags["workers"] is not None or "workers" in named
    (strategy,) = wanted.strategies
    if asked and wanted.workers != [1] and not registry.find(strategy.name).requires:
        raise UsageError(
            f"strategy {strategy} trains on one worker; leave the number of workers out"
        )
    own = (
        wanted.name if study or chosen["name"] else f"trace-{wanted.strategies[0].name}"
    )
    return wanted, slug(own)


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    begin, _, end = text.partition(":")
    try:
        window = float(begin or 0), float(end or "inf")
    except ValueError:
        # refused below, with the numbers that are in the wrong order
        window = 1.0, 0.0
    if not 0 <= window[0] < window[1]:
        raise UsageError(
            f"--window {text}: expected BEGIN:END in seconds, such as 0.5:1.5"
        )
    return window
