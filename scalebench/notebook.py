"""Run, read, draw, predict and plan from Python as the commands do: `run`, `load`, `plot`, `predict` and `plan`."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pandas as pd

from scalebench import analysis, tables
from scalebench.cli.main import command_of
from scalebench.errors import ResultsError, ScalebenchError, UsageError
from scalebench.figures import base, plotting
from scalebench.figures.selection import Selection
from scalebench.figures.style import Style, choose_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PIXELS_PER_IN = 96  # of a browser
# Options in the words of errors, as --step-time, and commands with theirs, which stay
# as they are.
_OPTION = re.compile(
    r"(?P<command>`?scalebench [a-z][^;,`]*)|(?<![\w-])'?--(?:set )?(?P<name>[a-z][a-z-]*)'?|\bMODEL\b"
)
# others are named as the options are
_KEYWORDS = {
    "strategy": "strategies",
    "panel": "panels",
}


class Results(analysis.Results):
    """The tables of a study; a notebook shows its answer and the table of `scalebench run --full`."""

    def _repr_html_(self) -> str:
        from scalebench.report.answer import spoken

        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in spoken(self))
        notes = "".join(
            f"<li>{escape(note)}</li>"
            for note in analysis.summary_notes(self, brief=True)
        )
        table = replace(analysis.summary(self), notes=[])
        return f"{said}{tables.render(table, 'html')}<ul>{notes}</ul>"


class PanelAxes(list["Axes"]):
    """The axes of a figure's panels, in order; a notebook shows the `figures` that they are in, one for each page."""

    def __init__(
        self, axes: Iterable[Axes], figures: Sequence[Figure], style: Style
    ) -> None:
        super().__init__(axes)
        self.figures = list(figures)
        self._style = style

    def _repr_html_(self) -> str:
        from base64 import b64encode

        pictures = []
        for number, figure in enumerate(self.figures, start=1):
            # the picture has more pixels than that, for screens with dense ones
            width = round(_PIXELS_PER_IN * figure.get_size_inches()[0])
            data = b64encode(self._png(figure)).decode("ascii")
            pictures.append(
                f'<img alt="page {number}" width="{width}" style="max-width: 100%" src="data:image/png;base64,{data}">'
            )
        return "".join(pictures)

    def _png(self, figure: Figure) -> bytes:
        # matplotlib reads fonts and ticks when it draws, long after `plot` has returned
        with plotting.house_style(self._style):
            stream = BytesIO()
            figure.savefig(stream, format="png")
        return stream.getvalue()


@contextmanager
def _named_by_keywords() -> Iterator[None]:
    """Name keywords in errors that name the options of a command."""
    try:
        yield
    except ScalebenchError as error:
        # in place: the class tells a caller what to catch
        error.args = (_OPTION.sub(_keyword, str(error)), *error.args[1:])
        raise


@contextmanager
def _script_left_out() -> Iterator[None]:
    """Keep processes that are started from importing the caller's script, which would call `run` again.

    multiprocessing imports `__main__` by its spec or file; models and strategies of a
    study are files of their own.
    """
    names = sys.modules["__main__"].__dict__
    kept: dict[str, Any] = {
        name: names.pop(name) for name in ("__spec__", "__file__") if name in names
    }
    # multiprocessing looks the attribute up without asking whether it is there
    names["__spec__"] = None
    try:
        yield
    finally:
        names.update(kept)


def _keyword(option: re.Match[str]) -> str:
    if option["command"]:
        return option["command"]
    if option["name"] is None:
        return "model"
    return _KEYWORDS.get(option["name"], option["name"].replace("-", "_"))


@_named_by_keywords()
def load(folder: Path | str) -> Results:
    """Read the study in `folder`, as `scalebench.analysis.load` does."""
    found = analysis.load(folder)
    return Results(
        **{field.name: getattr(found, field.name) for field in fields(found)}
    )


@_named_by_keywords()
def run(
    study: Path | str | Mapping[str, Any] | None = None,
    *,
    output: Path | str = "results",
    jobs: int | None = None,
    **keys: Any,
) -> Results:
    """Run a study in `output`/<name>, or go on with it, and return its results.

    `study` is a file, or its keys, or None for the default study; `keys` are put over
    it, as `run`'s options are: `scalebench.run(workers="1..8", strategies=["allreduce",
    "epoch_average"])`. Progress goes to standard error.

    Raises:
        StudyError: a key is unknown or has a wrong value; nothing was run.
        KeyboardInterrupt: the kernel was interrupted. What was completed is kept, and the same call goes on.
    """
    from scalebench.cli.live_progress import watching
    from scalebench.launch import planning, study_run
    from scalebench.study.load import load_study

    file = None if study is None or isinstance(study, Mapping) else Path(study)
    given = (dict(study) if isinstance(study, Mapping) else {}) | keys
    if isinstance(given.get("strategies"), str):
        # a lone name is the likeliest slip, and a text is a sequence of letters
        given["strategies"] = [given["strategies"]]
    plan = planning.plan_study(load_study(file, given, []))
    with watching() as watcher, _script_left_out():
        tally = study_run.run_study(plan, Path(output), watcher, jobs=jobs)
    # the signal was taken to let runs end; the cell stops all the same
    if tally.interrupted is not None:
        raise KeyboardInterrupt
    return load(tally.folder)


@_named_by_keywords()
def plot(
    results: analysis.Results | Path | str,
    figure: str = "strong-scaling",
    *,
    panels: str | Sequence[str] = (),
    strategies: str | Sequence[str] = (),
    workers: int | Sequence[int] = (),
    style: str = "report",
    columns: int | None = None,
) -> PanelAxes:
    """Draw one figure of a study, or of those of its `panels`, and return the matplotlib axes of its panels.

    `strategies` and `workers` choose what is shown, `style` and `columns` for where, as
    the options of `plot` do. `scalebench.figures.plot` writes all figures to files,
    with their captions and numbers.

    Raises:
        UsageError: an unknown figure, panel or style, or a strategy or worker count that did not run.
        ResultsError: the study has nothing for this figure.
    """
    from scalebench.figures.drawing.canvas import Canvas

    study = results if isinstance(results, analysis.Results) else load(results)
    selection = Selection(
        _several(strategies), (workers,) if isinstance(workers, int) else tuple(workers)
    )
    chosen = choose_style(style, columns=columns)
    request = plotting.PlotRequest(
        (figure,), style=chosen, selection=selection, panels=_several(panels)
    )
    (name,) = request.figures()
    kind = base.FIGURES.create(name, {})
    if absent := kind.absent(study):
        raise ResultsError(f"{study.folder}: {name} cannot be drawn: {absent}")
    selection.require(study)
    with plotting.house_style(request.style):
        canvas = Canvas(name, request.style, selection, request.panels_of(kind))
        kind.draw(study, canvas)
        # the axes are given away: with other limits they need ticks of their own
        pages = canvas.finish(fixed=False)
    return PanelAxes((panel.ax for panel in canvas.shown), pages, request.style)


@_named_by_keywords()
def predict(
    model: str | None = None,
    *,
    strategies: str | Sequence[str] = (),
    workers: str | int | Sequence[int] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Predict trainings of `model` without training; return a row for each strategy and worker count, or varied cell.

    `options` are those of `scalebench predict`, as `cluster="juwels-booster",
    step_time=0.025`. The columns are those of its `--csv`, and `attrs["answer"]` is the
    answer in sentences. What cannot be predicted is a warning.

    Raises:
        UsageError: an unknown option, a value that is out of its range, or nothing that can be predicted.
    """
    from scalebench.predictions.points import predicted
    from scalebench.predictions.variation import varied_training

    flags = _flags_of_predict(model, strategies, workers, options)
    model, counts, chosen, varied = (
        flags.pop(name) for name in ("model", "workers", "strategies", "varied")
    )
    budget, price, law = (
        flags.pop(name) for name in ("budget", "price", "epochs_to_target")
    )
    if varied:
        unfit = {"budget": budget, "epochs_to_target": law}
        variation = varied_training(model, chosen, counts, varied, flags, **unfit)
        cells = pd.DataFrame(variation.rows())
        cells.attrs["answer"] = variation.answer(price)
        return cells
    found = predicted(model, counts, chosen, law, flags)
    for refusal in found.grid.refusals:
        # a prediction of other points is still an answer
        warnings.warn(f"not predicted: {refusal}", stacklevel=2)
    table = pd.DataFrame(found.rows(price))
    table.attrs["answer"] = found.answer(budget, price)
    return table


@_named_by_keywords()
def plan(
    model: str | None = None, *, devices: int, batch: int, **options: Any
) -> pd.DataFrame:
    """Plan how to divide a training of `model` among devices; return a row for the best layout of each kind.

    `batch` are the samples of a step of all devices, and `options` those of `scalebench
    plan`. The columns are those of its `--format json`; `attrs["answer"]` is the answer
    in sentences, `attrs["study"]` a study of these layouts that `scalebench.run` takes.

    Raises:
        UsageError: an unknown option, or a value that is out of its range.
    """
    from scalebench.predictions.planned import planned

    if not {"format", "write"}.isdisjoint(options):
        raise UsageError(
            "plan: format and write are options of the command alone; the table has to_csv, and attrs the study"
        )
    words = [] if model is None else [model]
    words += ["--devices", str(devices), "--batch", str(batch), *_words_of(options)]
    flags = _parsed("plan", words)
    found = planned(model, flags["devices"], flags["batch"], flags)
    table = pd.DataFrame(tables.records(next(found.tables())))
    table.attrs["answer"] = list(found.answer())
    table.attrs["study"] = found.study(model)
    return table


def _flags_of_predict(
    model: str | None,
    strategies: str | Sequence[str],
    workers: str | int | Sequence[int] | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the parameters of `scalebench predict` that stand for these keywords, checked as the command does."""
    if not {"csv", "figure"}.isdisjoint(options):
        raise UsageError(
            "predict: csv and figure are options of the command alone; the table has to_csv and plot"
        )
    words = [] if model is None else [model]
    if isinstance(workers, (str, int)):
        words += ["--workers", str(workers)]
    elif workers is not None:
        words += ["--workers", ",".join(map(str, workers))]
    words += _words_of(options)
    for strategy in _several(strategies):
        words += ["--strategy", strategy]
    return _parsed("predict", words)


def _words_of(options: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that give these options."""
    words: list[str] = []
    for name, given in options.items():
        option = f"--{name.replace('_', '-')}"
        # two axes are a list
        for value in given if isinstance(given, (list, tuple)) else [given]:
            if value is True:
                words += [option]
            elif value is not None and value is not False:
                words += [option, str(value)]
    return words


def _parsed(command: str, words: list[str]) -> dict[str, Any]:
    """Return the parameters of `scalebench` `command` that these words give."""
    try:
        # through the command's own parser: one set of checks and defaults
        return command_of(command).make_context(command, words).params
    except click.UsageError as error:
        message = (
            error.format_message()
            .removeprefix("Invalid value for ")
            .replace("No such option", "no such keyword")
        )
        raise UsageError(f"{command}: {message}") from None


def _several(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
