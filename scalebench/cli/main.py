"""The command line, `scalebench COMMAND`: imports a command when it is called, and turns errors into one line."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from scalebench import __version__, errors
from scalebench.cli.options import verbosity_options

# heading in `--help` -> name of a command -> its line there; the module of a command
# has its name
GROUPS = {
    "Start": {
        "init": "Write a commented study.yaml to begin from.",
        "list": "List strategies, models, data sets, clusters, devices, figures.",
        "explain": "Explain a strategy: its rule, its options, what it sends.",
        "doctor": "Say what this machine has, and what adds the rest.",
        "install": "Build and install Horovod for the PyTorch that is here.",
        "schema": "Print the JSON Schema of study files, for editors.",
    },
    "Run": {
        "run": "Run a scaling study, real and virtual, and keep every number.",
        "submit": "Submit a study as jobs of Slurm, PBS or LSF.",
        "status": "Say what of a study is done, and how long the rest will take.",
        "collect": "Merge what the jobs of a submitted study made.",
        "calibrate": "Measure this machine and a model once, for many studies.",
        "recalibrate": "Give finished virtual runs new times, without training.",
        "reproduce": "Run a paper's studies, and put its numbers beside ours.",
    },
    "Look": {
        "plot": "Draw a study's figures, each with the numbers it shows.",
        "table": "Print a study's numbers for a paper: LaTeX, Markdown, CSV.",
        "report": "Write a study on one page: answer, figures, method.",
        "trace": "Trace one short run: what each worker did, and when.",
    },
    "Judge": {
        "check": "Check a study's method: what a reviewer would object to.",
        "diagnose": "Name slow nodes, throttled cores, missing binding.",
        "compare": "Compare two studies, or two strategies: what became slower?",
        "laws": "Fit scaling laws: how many workers are worth running.",
        "validate": "Predict published measurements, and say how wrong it was.",
    },
    "Predict": {
        "predict": "Predict times on other machines, or with other numbers.",
        "plan": "Plan how to divide a training among devices.",
    },
    "Share": {
        "export": "Write a study as JSON, as Parquet, or for MLflow.",
        "artifact": "Pack a study for a reviewer, with a script.",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
ALIASES = {  # names of version 0.1, not in `--help`, and what does the same
    "retry": ["run RESULTS --retry", "submit RESULTS"],
    "what-if": ["predict MODEL --vary"],
}

# made since the last search for cycles, before the next one: a tenth of a gigabyte
_NEW_OBJECTS = 500_000

if TYPE_CHECKING or not (sys.stdout and sys.stdout.isatty()):
    from click import Group

    PANELS: dict[str, Any] = {}
else:  # rich's panels cost as much as the rest of `--help`: only on a terminal
    from rich_click import RichCommandPanel
    from rich_click import RichGroup as Group

    PANELS = {
        "panels": [
            RichCommandPanel(heading, commands=list(group))
            for heading, group in GROUPS.items()
        ]
    }


def command_of(name: str) -> click.Command:
    """Import the module of the command `name`, and return its command."""
    # an alias lives with what does the same
    home = ALIASES[name][0].split()[0] if name in ALIASES else name
    module = importlib.import_module(f"scalebench.cli.{home}")
    return next(
        found
        for found in vars(module).values()
        if isinstance(found, click.Command) and found.name == name
    )


class LazyGroup(Group):
    """A group that knows its commands by name and help line and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        # in the order of GROUPS, which is that of a user's way
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A placeholder with the help line; `resolve_command` imports the command."""
        return (
            # importing all commands for their help lines would take a second
            click.Command(cmd_name, help=COMMANDS[cmd_name])
            if cmd_name in COMMANDS
            else None
        )

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write a section for each group; on a terminal panels stand in their place."""
        width = max(map(len, COMMANDS))
        for heading, lines in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), line) for name, line in lines.items()]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and name not in ALIASES:
            if name.startswith("-"):
                ctx.fail(f"no such option {name!r}")
            ctx.fail(f"unknown command {name!r}; {errors.nearest(name, COMMANDS)}")
        # before the command parses its own options, so by words
        if name in ALIASES and not {"-q", "--quiet"} & set(args):
            instead = " or ".join(f"`scalebench {words}`" for words in ALIASES[name])
            click.echo(
                f"note: the next version has {instead} in place of {name}", err=True
            )
        return name, command_of(name), args[1:]

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and leave with 0, 1 (a run failed), 2 (usage) or 130 (interrupted); bugs keep their traceback."""
        # no-color.org; rich keeps to it by itself, click does not
        if os.environ.get("NO_COLOR"):
            extra.setdefault("color", False)
        if not standalone_mode:
            return super().main(
                args, prog_name, complete_var, standalone_mode=False, **extra
            )
        _search_for_cycles_rarely()
        try:
            _require_working_folder()
            # not standalone: click would print errors in its own form, and leave with
            # its own codes
            code = super().main(
                args, prog_name, complete_var, standalone_mode=False, **extra
            )
            # now, so that a full disk or a closed pipe is an error of the command
            if sys.stdout is not None:  # closed by `>&-`
                sys.stdout.flush()
        except errors.ScalebenchError as error:
            _leave(str(error), error.exit_code)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            _leave(
                _usage_words(error, sys.argv[1:] if args is None else args),
                error.exit_code,
            )
        except click.ClickException as error:
            _leave(error.format_message(), error.exit_code)
        # 128 + SIGINT, as a shell has it
        except (click.Abort, KeyboardInterrupt):
            _leave("interrupted", 130)
        # the reader of our output has gone, as in `scalebench list | head`
        except BrokenPipeError:
            sys.stdout = None  # so that Python does not flush it once more
            sys.exit(1)
        except (Exception, SystemExit) as error:
            if lacking := errors.used_up(error):
                _leave(lacking, 2)
            if not errors.place_in_own_code(error):
                raise
            _leave(errors.in_one_line(error), 2)  # of a user's own strategy or model
        sys.exit(code if isinstance(code, int) else 0)


def _search_for_cycles_rarely() -> None:
    """Let Python search for unused objects that refer to one another rarely, and not at the end.

    What torch and pandas make when they are imported stays: to look through it took a
    third of a short command, half of that at the end.
    """
    gc.set_threshold(_NEW_OBJECTS, 10, 10)
    atexit.unregister(gc.freeze)  # once, however often a process calls commands
    atexit.register(gc.freeze)


def _require_working_folder() -> None:
    """Refuse a working folder that was deleted: torch would end the process without saying so."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise errors.UsageError(
            "the working folder was deleted; change to another one (cd) and try again"
        ) from None


def _usage_words(error: click.UsageError, args: Sequence[str]) -> str:
    """Return what is wrong with the command line, and whose help to see."""
    # an error in the options of the group has no command yet
    named = [word for word in args if word in COMMANDS][:1]
    path = error.ctx.command_path if error.ctx else " ".join(["scalebench", *named])
    return f"{error.format_message().rstrip('.')} (see '{path} --help')"


def _leave(message: str, code: int) -> NoReturn:
    # one line, whatever it quotes
    click.echo(f"scalebench: error: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, **PANELS
)
@click.version_option(__version__, prog_name="scalebench")
@verbosity_options
def main() -> None:
    """How much time does synchronising less often save, at how many workers, and what does it cost in accuracy?

    `scalebench run --workers 1..64`, then `scalebench plot`.
    """
