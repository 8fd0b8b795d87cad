"""Options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

_F = TypeVar("_F", bound=Callable[..., Any])
_KEY = "scalebench.verbosity"


def verbosity_options(command: _F) -> _F:
    """Add `--quiet` and `--verbose`, before or after the command's name; read with `verbosity`."""
    quiet = click.option(
        "--quiet", "-q", is_flag=True, expose_value=False, callback=_set(-1), help="Print errors and results only."
    )
    verbose = click.option(
        "--verbose", "-v", is_flag=True, expose_value=False, callback=_set(1), help="Print what is being done."
    )
    return quiet(verbose(command))


def results_argument(command: _F) -> _F:
    """Add the optional `RESULTS`, a folder of one study or several; read with `study_folder`."""
    return click.argument("results", required=False, type=click.Path(path_type=Path))(command)


def study_folder(results: Path | None) -> Path:
    """The folder of the study in `results`, the newest of several; default: the newest in results/."""
    from scalebench.records.folder import newest_study, study_in

    return newest_study(Path("results")) if results is None else study_in(results)


def completed_study(results: Path | None) -> Path:
    """The folder of a study with a completed run.

    Raises:
        ResultsError: no run was completed, or there are no records.
    """
    from scalebench.errors import ResultsError
    from scalebench.records.attempts import Attempts
    from scalebench.records.folder import RUNS

    folder = study_folder(results)
    attempts = Attempts(folder / RUNS)
    if len(attempts) and "completed" not in attempts.status:
        raise ResultsError(f"{folder}: no run was completed; `scalebench status {folder}` says why")
    return folder


def selection_options(command: _F) -> _F:
    """Add `--strategy`, `--workers`, `--execution` and `--engine`, given to the command as one `selection`."""

    @wraps(command)
    def with_selection(
        *arguments: Any,
        strategies: tuple[str, ...],
        workers: tuple[int, ...],
        executions: tuple[str, ...],
        engines: tuple[str, ...],
        **options: Any,
    ) -> Any:
        from scalebench.figures.selection import Selection

        return command(*arguments, selection=Selection(strategies, workers, executions, engines), **options)

    for flag, name, metavar, what in (
        ("--engine", "engines", "NAME", "this engine"),
        ("--execution", "executions", "NAME", "this execution"),
        ("--workers", "workers", "COUNTS", "these worker counts, such as 1..64 or 2,8"),
        ("--strategy", "strategies", "NAME", "this strategy, with or without its options"),
    ):
        counts: dict[str, Any] = {"callback": _counts} if name == "workers" else {"multiple": True}
        more = "" if name == "workers" else "; repeatable"
        with_selection = click.option(flag, name, metavar=metavar, help=f"Show {what} only{more}.", **counts)(
            with_selection
        )
    return cast(_F, with_selection)


def _counts(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...]:
    from scalebench.study.parsing import parse_workers

    try:
        return () if value is None else tuple(parse_workers(value))
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None


def share_option(context: click.Context, option: click.Parameter, value: str) -> float:
    """Parse `5%` or `0.05`."""
    from scalebench.study.parsing import parse_share

    try:
        share = parse_share(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, option) from None
    if not (math.isfinite(share) and share >= 0):
        raise click.BadParameter(f"expected a share from 0 up, got {value}", context, option)
    return share


def folder_option(flag: str, default: str, what: str) -> Callable[[_F], _F]:
    """Return an option for a folder to write to, or to read from, with its `default`."""
    kind = click.Path(file_okay=False, path_type=Path)
    return click.option(flag, type=kind, default=Path(default), show_default=True, help=what)


def keep_going_option(command: _F) -> _F:
    """Add `--keep-going` and `--fail-fast`, as `fail_fast`."""
    return click.option(
        "--fail-fast/--keep-going",
        default=False,
        help="Begin no other run once one has failed, or go on with the others.  [default: keep going]",
    )(command)


def launcher_option(command: _F) -> _F:
    """`--launcher`, kept as SCALEBENCH_LAUNCHER, by which all that starts ranks goes."""
    return click.option(
        "--launcher",
        type=click.Choice(["auto", "mpirun", "srun"]),
        expose_value=False,
        callback=_keep_launcher,
        help="What starts real ranks; auto: mpirun, or srun in a Slurm job without one.  [env: SCALEBENCH_LAUNCHER]",
    )(command)


def table_options(command: _F) -> _F:
    """Add `--against` and `--full`, which choose the table at the end of a study."""
    against = click.option(
        "--against",
        multiple=True,
        type=click.Choice(["allreduce", "horovod", "ddp", "serial"]),
        help="Baseline of the reductions in the table; repeatable.  [default: the first of these that ran]",
    )
    full = click.option("--full", is_flag=True, help="Print every point with its interval, and all remarks.")
    return against(full(command))


def verbosity() -> int:
    """Verbosity of the running command: -1 quiet, 0 normal, 1 verbose."""
    context = click.get_current_context(silent=True)
    return int(context.meta.get(_KEY, 0)) if context else 0


def _keep_launcher(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        os.environ["SCALEBENCH_LAUNCHER"] = value


def _set(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if not given:
            return
        if context.meta.get(_KEY, level) != level:
            raise click.UsageError("--quiet and --verbose exclude each other", context)
        context.meta[_KEY] = level

    return callback
