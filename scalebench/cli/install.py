"""`scalebench install horovod`: build Horovod, which no registry offers for today's PyTorch."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from scalebench.cli.options import FOLDER, verbosity, verbosity_options


@click.group()
def install() -> None:
    """Build and install Horovod for the PyTorch that is here."""


@install.command()
@click.option(
    "--force",
    is_flag=True,
    help="Build even if the cache has a wheel for this toolchain.",
)
@click.option(
    "--cache",
    type=FOLDER,
    help="Folder of built wheels  [default: ~/.cache/scalebench/wheels]",
)
@verbosity_options
def horovod(force: bool, cache: Path | None) -> None:
    """Install Horovod with MPI and Gloo (and NCCL where PyTorch has CUDA).

    The first time it is built from the registry's source, which takes some minutes. The
    wheel is kept, keyed by PyTorch, Python, MPI and compiler, and installs in seconds
    from then on, in other environments too.
    """
    from scalebench.install.horovod_build import install_horovod

    quiet = verbosity() < 0
    stages = set[str]()

    def show(line: str) -> None:
        """Print the first line of each stage."""
        stage = line.partition(":")[0]
        # pip and the compiler print thousands of lines
        if not quiet and stage not in stages:
            stages.add(stage)
            click.echo(line, err=True)

    done = install_horovod(force=force, cache=cache, progress=show)
    if not quiet:
        origin = "from the cache" if done.from_cache else "built"
        click.echo(
            f"Horovod is installed ({origin}, {done.seconds:.0f} s): {done.report}"
        )
        click.echo(f"wheel: {done.wheel}")
