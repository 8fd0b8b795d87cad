"""`scalebench install horovod`: build Horovod, which no registry offers for today's PyTorch."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import rich_click as click

from scalebench.cli.options import verbosity, verbosity_options


@click.group()
def install() -> None:
    """Build and install Horovod for the PyTorch that is here."""


@install.command()
@click.option("--force", is_flag=True, help="Build even if the cache has a wheel for this toolchain.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of built wheels  [default: ~/.cache/scalebench/wheels]",
)
@verbosity_options
def horovod(force: bool, cache: Path | None) -> None:
    """Install Horovod with MPI and Gloo (and NCCL where PyTorch has CUDA).

    The first time it is built from the registry's source, which takes some minutes. The wheel is kept, keyed by
    PyTorch, Python, MPI and compiler, and installs in seconds from then on, in other environments too.
    """
    from rich.console import Console

    from scalebench.install.horovod import install_horovod

    console = Console(stderr=True)
    quiet = verbosity() < 0
    if console.is_terminal and not quiet:
        with console.status("Horovod") as status:
            done = install_horovod(force=force, cache=cache, progress=status.update)
    else:
        done = install_horovod(force=force, cache=cache, progress=_LogLines(quiet))
    if not quiet:
        origin = "from the cache" if done.from_cache else "built"
        click.echo(f"Horovod is installed ({origin}, {done.seconds:.0f} s): {done.report}")
        click.echo(f"wheel: {done.wheel}")


class _LogLines:
    """Prints lines for a log: a new stage at once, progress of a stage every 30 s."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._stage = ""
        self._said = 0.0

    def __call__(self, line: str) -> None:
        stage, now = line.partition(":")[0], time.monotonic()
        if self._quiet or (stage == self._stage and now - self._said < 30):
            return
        self._stage, self._said = stage, now
        click.echo(line, file=sys.stderr)
