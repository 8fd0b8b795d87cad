"""The command line: help, one line per usage error, exit codes."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from scalebench import __version__
from scalebench.cli import main as module
from scalebench.cli.main import ALIASES, COMMANDS, GROUPS, command_of, main
from scalebench.cli.options import verbosity, verbosity_options
from scalebench.errors import RunError, StudyError
from tests.facts import together


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scalebench", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command `probe`, to be given a body by each test through `Probe.body`."""
    monkeypatch.setitem(COMMANDS, "probe", "A probe.")
    monkeypatch.setitem(sys.modules, "scalebench.cli.probe", sys.modules[__name__])


class Probe:
    body = staticmethod(lambda: None)


@click.command()
@verbosity_options
def probe() -> object:
    return Probe.body()


def test_help_names_every_command_and_imports_none() -> None:
    program = (
        "import sys; from scalebench.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "print(sorted(name for name in sys.modules if name.startswith('scalebench.') or name in"
        " {'rich', 'pydantic', 'torch', 'numpy', 'yaml'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found = re.findall(r"^(\w+):\n((?:  .+\n)+)", done.stdout, re.MULTILINE)
    sections = {
        heading: [line.split()[0] for line in lines.splitlines()]
        for heading, lines in found
    }
    assert sections.pop("Options")
    assert sections == {heading: list(lines) for heading, lines in GROUPS.items()}
    assert not set(ALIASES) & {name for names in sections.values() for name in names}
    assert {
        words.split()[0] for several in ALIASES.values() for words in several
    } <= set(COMMANDS)
    *_, loaded = done.stdout.splitlines()
    allowed = ["cli", "cli.main", "cli.options", "errors", "study", "study.choices"]
    assert loaded == str([f"scalebench.{name}" for name in allowed])


def test_help_of_a_command_imports_what_its_options_need() -> None:
    """All in one process: what the first of them imports is named beside it."""
    program = (
        "import contextlib, io, sys; from scalebench.cli.main import COMMANDS, main\n"
        "before = set()\n"
        "for name in COMMANDS:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([name, '--help'])\n"
        "    print(name, *sorted(set(sys.modules) - before)); before = set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    # rooms, and libraries that take a tenth of a second each
    allowed = {
        "cli",
        "errors",
        "formatting",
        "measured",
        "records.folder",
        "study.cell",
        "study.choices",
    }
    allowed |= {"system.file_access", "system.parent_watch", "tables"}
    rooms = {name.partition(".")[0] for name in allowed}
    heavy = {"pydantic", "yaml", "numpy", "pandas", "scipy", "matplotlib", "torch"}

    def is_allowed(module: str) -> bool:
        own = module.removeprefix("scalebench.")
        if own == module:
            return module not in heavy
        return own in rooms or any(f"{own}.".startswith(f"{room}.") for room in allowed)

    lines = {name: loaded for name, *loaded in map(str.split, done.stdout.splitlines())}
    assert list(lines) == list(COMMANDS)
    more = {
        name: [module for module in loaded if not is_allowed(module)]
        for name, loaded in lines.items()
    }
    assert {name: modules for name, modules in more.items() if modules} == {}


@pytest.mark.parametrize("name", sorted([*COMMANDS, *ALIASES]))
def test_every_command_exists_and_has_help(name: str) -> None:
    assert isinstance(command_of(name), click.Command)
    result = invoke(name, "--help")
    assert (result.exit_code, "Usage: main " in result.output) == (0, True), (
        result.output
    )


def test_version() -> None:
    assert __version__ in invoke("--version").output
    assert run("--version").stdout == f"scalebench, version {__version__}\n"


def test_no_arguments_print_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert "Usage: scalebench" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["rnu"],
            "unknown command 'rnu'; did you mean 'run'? (see 'scalebench --help')",
        ),
        (["--nope"], "No such option '--nope' (see 'scalebench --help')"),
        (["list", "startegies"], "'startegies' is not one of"),
        (
            ["run", "--set"],
            "Option '--set' requires an argument (see 'scalebench run --help')",
        ),
        (
            ["schema", "--nope"],
            "No such option '--nope' (see 'scalebench schema --help')",
        ),
        (["-q", "-v", "schema"], "--quiet and --verbose exclude each other"),
    ],
)
def test_usage_error_is_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("scalebench: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("error", "code"), [(StudyError("no such\nkey"), 2), (RunError("it died"), 1)]
)
def test_scalebench_error_is_one_line_with_its_exit_code(
    error: Exception, code: int
) -> None:
    def body() -> None:
        raise error

    Probe.body = body  # type: ignore[assignment]
    result = invoke("probe")
    assert result.exit_code == code
    assert result.stderr == f"scalebench: error: {' '.join(str(error).split())}\n"


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "open files (ulimit -n)"),
        (OSError(errno.ENOSPC, "No space left on device"), "room on the disk"),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "processes or threads (ulimit -u)",
        ),
        (RuntimeError("can't start new thread"), "processes or threads (ulimit -u)"),
        (MemoryError(), "memory (ulimit -v"),
        (
            ImportError("libtorch_cpu.so: failed to map segment from shared object"),
            "memory (ulimit -v",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            "memory (ulimit -v",
        ),
    ],
)
def test_resource_that_is_used_up_is_one_line(error: Exception, limit: str) -> None:
    def body() -> None:
        raise error

    Probe.body = body  # type: ignore[assignment]
    result = invoke("probe")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"scalebench: error: no more {limit}")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("command")
def test_deleted_working_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = invoke("probe")
    monkeypatch.chdir(tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert together(result.stderr, "working folder", "deleted", "change")


def test_a_command_does_not_search_for_unused_objects_at_its_end() -> None:
    """What torch and pandas make stays: looking through it took half a second."""
    program = (
        "import atexit, gc\n"
        "from scalebench.cli.main import main\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"  # called last
        "main(['list', 'datasets'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True"


def test_closed_standard_output_is_no_error() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "-", sys.executable, "-m", "scalebench", "list"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("command")
def test_bugs_keep_their_traceback() -> None:
    def body() -> None:
        raise ZeroDivisionError("a bug")

    Probe.body = body  # type: ignore[assignment]
    assert isinstance(invoke("probe").exception, ZeroDivisionError)


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(("returned", "code"), [(None, 0), (1, 1)])
def test_command_returns_its_exit_code(returned: int | None, code: int) -> None:
    Probe.body = lambda: returned  # type: ignore[assignment,return-value]
    assert invoke("probe").exit_code == code


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (["probe"], 0),
        (["-q", "probe"], -1),
        (["probe", "--quiet"], -1),
        (["probe", "-v"], 1),
        (["-v", "probe"], 1),
    ],
)
def test_verbosity_options_work_before_and_after_the_command(
    arguments: list[str], level: int
) -> None:
    said: list[int] = []
    Probe.body = lambda: said.append(verbosity())  # type: ignore[assignment]
    assert invoke(*arguments).exit_code == 0
    assert said == [level]


def test_verbosity_outside_a_command_is_0() -> None:
    assert verbosity() == 0


def test_interrupt_exits_with_130(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import signal, sys, time, types, pathlib, click\n"
        # a shell's background jobs ignore it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from scalebench.cli.main import COMMANDS, main\n"
        "@click.command()\n"
        f"def wait(): pathlib.Path({str(ready)!r}).touch(); time.sleep(60)\n"
        "sys.modules['scalebench.cli.wait'] = types.SimpleNamespace(wait=wait)\n"
        "COMMANDS['wait'] = ''\n"
        "main(['wait'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True
    ) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130
    assert said.strip() == "scalebench: error: interrupted"


def test_closed_pipe_prints_no_error() -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "scalebench", "schema"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(reader)
    os.close(writer)
    _, said = process.communicate()
    assert said == ""
    assert process.returncode in (0, 1)


def test_the_module_runs_as_a_program() -> None:
    assert module.main.name == "main"
    assert run("schema").stdout.startswith("{")


@pytest.mark.usefixtures("command")
@pytest.mark.parametrize(
    ("variables", "colored"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)],
)
def test_no_color_disables_colors(
    variables: dict[str, str], colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    Probe.body = staticmethod(lambda: click.secho("slower", fg="red"))
    done = CliRunner().invoke(main, ["probe"], color=True, env=variables)
    assert ("\x1b[" in done.output) is colored
    assert "slower" in done.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["re"], {"recalibrate", "report", "reproduce"}),
        (["run", "--str"], {"--strategy"}),
        (["run", "--execution", "v"], {"virtual"}),
        (["list", "mod"], {"models"}),
    ],
)
def test_shell_completion(words: list[str], offered: set[str]) -> None:
    state = {
        "COMP_WORDS": " ".join(["scalebench", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = CliRunner().invoke(
        main,
        prog_name="scalebench",
        env={**state, "_SCALEBENCH_COMPLETE": "bash_complete"},
    )
    assert {line.partition(",")[2] for line in done.output.splitlines()} == offered
