"""Options that several commands share, those among them that are keys of a study."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click
from click.core import ParameterSource

from scalebench.study.choices import (
    BASELINES,
    SERIAL,
    EngineName,
    Execution,
    LauncherName,
)

if TYPE_CHECKING:
    from scalebench.figures.selection import Selection


_F = TypeVar("_F", bound=Callable[..., Any])
# in the context, which groups and commands share: both take the flags
_KEY = "scalebench.verbosity"
STRATEGY = "NAME[:OPTION=VALUE]..."  # metavar
STRATEGIES = "NAME[:OPTION=VALUE]...,..."  # metavar of several


class Number(click.FloatRange):
    """A finite number in a range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        number = super().convert(value, param, ctx)
        # click takes nan, which lies in every range
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value}", param, ctx)
        return number


class NewFile(click.Path):
    """A file to be written, with one of `endings`, if any; its folder is made before anything is computed."""

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._endings = endings

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        path: Any = super().convert(value, param, ctx)
        # matplotlib would refuse it after the computation, or draw another format
        if self._endings and path.suffix not in self._endings:
            self.fail(
                f"{path}: expected a name that ends in {', '.join(self._endings)}",
                param,
                ctx,
            )
        try:
            # now, not after minutes of computing
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.fail(f"cannot write {path}: {error.strerror}", param, ctx)
        return path


PATH = click.Path(path_type=Path)
NEW_FILE = NewFile()
NEW_PICTURE = NewFile(".png", ".pdf", ".svg")
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
DTYPE = click.Choice(["float32", "float64", "bfloat16"])


def all_of(*options: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Return a decorator that adds `options` in this order."""

    def add(command: _F) -> _F:
        # decorators are applied from the last to the first
        for option in reversed(options):
            command = option(command)
        return command

    return add


def parsed_by(name: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that parses the value with a function of `scalebench.study.validation`."""

    def callback(
        context: click.Context, option: click.Parameter, value: str | None
    ) -> Any:
        from scalebench.study import validation

        try:
            return None if value is None else getattr(validation, name)(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, option) from None

    return callback


def _separated(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    # here and below: pydantic and yaml cost more than `--help` may take
    from scalebench.study.load import separated

    return tuple(separated(values))


def _labels(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Return strategies as the records name them."""
    from scalebench.study.load import written_component
    from scalebench.study.spec import Component

    def label_of(value: str) -> str:
        if value.endswith(")"):  # it is a label, as NAME(OPTION=VALUE)
            return value
        return str(Component.model_validate(written_component(value, "--strategy")))

    return tuple(map(label_of, _separated(context, option, values)))


def strategies_option(what: str, among_results: bool = False) -> Callable[[_F], _F]:
    """Return the option for strategies, or with `among_results` for labels of those that ran."""
    return click.option(
        "--strategy",
        "strategies",
        multiple=True,
        metavar=STRATEGIES,
        callback=_labels if among_results else _separated,
        help=what,
    )


def folder_option(flag: str, default: str, what: str) -> Callable[[_F], _F]:
    """Return an option for a folder to write to, or to read from, with its `default`."""
    return click.option(
        flag, type=FOLDER, default=Path(default), show_default=True, help=what
    )


def _keep_verbosity(
    context: click.Context, option: click.Parameter, given: bool
) -> None:
    if not given:
        return
    level = -1 if option.name == "quiet" else 1
    if context.meta.get(_KEY, level) != level:
        raise click.UsageError("--quiet and --verbose exclude each other", context)
    context.meta[_KEY] = level


def verbosity() -> int:
    """Verbosity of the running command: -1 quiet, 0 normal, 1 verbose."""
    context = click.get_current_context(silent=True)
    return int(context.meta.get(_KEY, 0)) if context else 0


def _keep_launcher(
    context: click.Context, option: click.Parameter, value: str | None
) -> None:
    if value is not None:
        # by the environment, which the processes that this command starts inherit
        os.environ["SCALEBENCH_LAUNCHER"] = value


verbosity_options = all_of(
    *(
        click.option(
            *flags,
            is_flag=True,
            expose_value=False,
            callback=_keep_verbosity,
            help=what,
        )
        for flags, what in (
            (("--quiet", "-q"), "Print errors and results only."),
            (("--verbose", "-v"), "Print what is being done."),
        )
    )
)
# read with `study_folder`
results_argument = click.argument("results", required=False, type=PATH)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")
output_option = click.option(
    "--output",
    type=PATH,
    default=Path("results"),
    show_default=True,
    help="Folder that gets one folder per study.",
)
jobs_option = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    help="Virtual runs at the same time.  [default: as many as cores; more beside busy programs]",
)
keep_going_option = click.option(
    "--fail-fast/--keep-going",
    default=False,
    help="Begin no other run once one has failed, or go on with the others.  [default: keep going]",
)
launcher_option = click.option(
    "--launcher",
    type=click.Choice(get_args(LauncherName)),
    expose_value=False,
    callback=_keep_launcher,
    help="What starts real ranks; auto: mpirun, without one srun in a job of Slurm, else processes of this host.  "
    "[env: SCALEBENCH_LAUNCHER]",
)
new_option = click.option(
    "--new",
    is_flag=True,
    help="A changed study of the same name goes to a folder of its own, NAME-2 ...",
)
table_options = all_of(
    click.option(
        "--against",
        multiple=True,
        type=click.Choice([*BASELINES, SERIAL]),
        help="Baseline of the reductions in the table; repeatable.  [default: the first of these that ran]",
    ),
    click.option(
        "--full",
        is_flag=True,
        help="Print every point with its interval, and all remarks.",
    ),
)
selection_options = all_of(
    strategies_option(
        "Show these only, with or without their options.", among_results=True
    ),
    *(
        click.option(
            flag,
            name,
            metavar="NAME",
            multiple=True,
            help=f"Show {what} only; repeatable.",
        )
        for flag, name, what in (
            ("--execution", "executions", "this execution"),
            ("--engine", "engines", "this engine"),
        )
    ),
    click.option(
        "--workers",
        metavar="COUNTS",
        callback=parsed_by("parse_workers"),
        help="Show these worker counts, such as 1..64 or 2,8 only.",
    ),
)


def study_folder(results: Path | None) -> Path:
    """The folder of the study in `results`, the newest of several; default: the newest in results/."""
    from scalebench.records.folder import newest_study, study_in

    return newest_study(Path("results")) if results is None else study_in(results)


def completed_study(results: Path | None) -> Path:
    """The folder of a study with a completed run.

    Raises:
        ResultsError: no run was completed, or there are no records.
    """
    from scalebench.records.attempts import require_completed_run

    folder = study_folder(results)
    require_completed_run(folder)
    return folder


def selection_of(flags: dict[str, Any]) -> Selection:
    """Take the selection that `selection_options` made out of the flags of a command."""
    from scalebench.figures.selection import Selection

    names = ("strategies", "workers", "executions", "engines")
    # popped: what is left are the options of the command itself
    return Selection(*(tuple(flags.pop(name) or ()) for name in names))


_LR_POLICIES = ["constant", "linear", "cosine", "step", "optimizer_steps"]
_EXECUTIONS = (
    "native: real processes at their own speed; paced: real processes slowed to --device-step-time; virtual: real "
    "training in virtual time; modelled: virtual time without training; auto: virtual, and native where the cores "
    "allow."
)
# No defaults here: what is not given stays as the study has it, and None tells the two
# apart.
STUDY_OPTIONS: dict[str, dict[str, Any]] = {
    "workers": {
        "metavar": "COUNTS",
        "help": "1..64 (powers of two), 1..64:8 (1,8,16,...) or 1,2,6.",
    },
    "dataset": {
        "metavar": "NAME|FILE",
        "help": "Data set (`scalebench list datasets`), or your own as FILE.csv or FILE.npz.",
    },
    "data_dir": {"type": PATH, "help": "Where the files of a data set lie."},
    "model": {"metavar": "NAME", "help": "Model, or your own as file.py:factory."},
    "epochs": {"type": int, "help": "Passes over the training data in each run."},
    "repetitions": {
        "type": int,
        "help": "Runs of every point, each with its own seed.",
    },
    "scaling": {
        "type": click.Choice(["strong", "weak"]),
        "help": "Samples fixed in all, or per worker.",
    },
    "batch_per_worker": {"type": int, "help": "Samples in one worker's batch."},
    "batch_global": {"type": int, "help": "Samples in one step of all workers."},
    "lr": {"type": float, "help": "Learning rate."},
    "lr_policy": {
        "type": click.Choice(_LR_POLICIES),
        "help": "linear: multiplied by the workers; step and optimizer_steps: decayed every --set lr_decay_every=N.",
    },
    "execution": {
        "type": click.Choice(["auto", *get_args(Execution)]),
        "help": _EXECUTIONS,
    },
    "engine": {
        "type": click.Choice(get_args(EngineName)),
        "help": "Native engine of all strategies.",
    },
    "cluster": {"metavar": "NAME|FILE", "help": "What virtual runs stand for."},
    "device_step_time": {
        "type": float,
        "metavar": "SECONDS",
        "help": "One local step on the stated device.",
    },
    "dtype": {
        "type": DTYPE,
        "help": "Of weights and gradients.",
    },
    "seed": {"type": int, "help": "Of the first repetition; each further one adds 1."},
    "name": {
        "metavar": "NAME",
        "help": "Name of the study, and of its results folder.",
    },
    "save_weights": {
        "is_flag": True,
        "default": None,
        "help": "Keep each run's initial and final weights as .npz.",
    },
    "init_weights": {
        "type": PATH,
        "metavar": "FILE.npz",
        "help": "Start from these weights.",
    },
    "patience": {
        "type": float,
        "metavar": "SECONDS",
        "help": "Time without a sign of life of any worker, after which a real run is ended.  [default: 60]",
    },
    "calibration": {
        "type": PATH,
        "metavar": "FILE",
        "help": "Charge virtual runs by this file.",
    },
    "require_quiet": {
        "is_flag": True,
        "default": None,
        "help": "Refuse what could only be measured beside busy programs.",
    },
    "native_budget_s": {
        "type": float,
        "metavar": "SECONDS",
        # for every study of a script or of a slow machine at once
        "envvar": "SCALEBENCH_NATIVE_BUDGET_S",
        "help": "Time after which no further real run begins.  [default: 90 beside virtual runs, outside of jobs]",
    },
    "calibration_budget_s": {
        "type": float,
        "metavar": "SECONDS",
        "envvar": "SCALEBENCH_CALIBRATION_BUDGET_S",
        "help": "Time that measuring steps and engines may take.  [default: 30]",
    },
}

study_argument = click.argument("study", type=PATH, required=False)


def study_file(path: Path | None) -> Path | None:
    """Return the study file `path`, or the one in a folder of results."""
    from scalebench.records.folder import STUDY

    return path / STUDY if path is not None and path.is_dir() else path


set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other key of the study; repeatable.",
)


def study_options(*keys: str, hidden: Container[str] = ()) -> Callable[[_F], _F]:
    """Return a decorator that adds the options of `keys`; None where an option is not given.

    `--help` does not show those that are `hidden`.
    """
    return all_of(
        *(
            click.option(flag_of(key), key, hidden=key in hidden, **STUDY_OPTIONS[key])
            for key in keys
        )
    )


def chosen(*names: str) -> bool:
    """Return True if the command line has one of these options."""
    context = click.get_current_context()
    return any(
        context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        for name in names
    )


def flag_of(key: str) -> str:
    return (
        "--native-budget" if key == "native_budget_s" else f"--{key.replace('_', '-')}"
    )
